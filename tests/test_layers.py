"""Who may know whom: recipes -> trainer -> engines -> bridge -> torch. Also inside function bodies."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STANDARD = set(sys.stdlib_module_names)

# Where a heavy package may be imported: folders or files of the product.
OWNERS = {
    "megatron": ("engines/megatron/",),
    "mindspeed": ("engines/megatron/mindspeed.py",),
    "torch_npu": ("engines/device.py", "engines/megatron/mindspeed.py"),
    "vllm": ("engines/rollout/vllm/",),
    "ray": ("trainer/cluster.py",),
    "hydra": ("trainer/main.py", "trainer/config/"),
    "omegaconf": ("trainer/main.py", "trainer/config/"),
    "transformers": ("engines/", "trainer/prompts/templates.py"),
    "math_verify": ("trainer/reward/",),
}
# What a folder may import at all (None: anything that OWNERS does not forbid).
ALLOWED = {
    "bridge/": {"torch", "safetensors", "bridge"},
    "trainer/config/": {"omegaconf", "hydra", "trainer"},
}
FORBIDDEN = {
    "engines/": {"trainer"},
    "trainer/": {"bridge"},
}
SIBLINGS = ("engines/fsdp/", "engines/megatron/", "engines/rollout/")


def imports(path: Path) -> list[tuple[str, int]]:
    """(absolute module name, line) of every import statement in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            found.append((node.module, node.lineno))
    return found


def violations(file: str, module: str) -> list[str]:
    top = module.split(".")[0]
    wrong = []
    if top in OWNERS and not file.startswith(OWNERS[top]):
        wrong.append(f"{top} belongs to {OWNERS[top]}")
    for folder, allowed in ALLOWED.items():
        if file.startswith(folder) and top not in allowed | STANDARD:
            wrong.append(f"{folder} may import only {sorted(allowed)} and the standard library")
    for folder, forbidden in FORBIDDEN.items():
        if file.startswith(folder) and top in forbidden:
            wrong.append(f"{folder} never imports {top}")
    for own in SIBLINGS:
        other = module.replace(".", "/") + "/"
        if file.startswith(own) and other.startswith(tuple(set(SIBLINGS) - {own})):
            wrong.append(f"{own} never imports its sibling {module}")
    return wrong


def test_every_import_respects_the_layers():
    wrong = []
    for folder in ("bridge", "engines", "trainer"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            for module, line in imports(path):
                wrong += [f"{file}:{line}: import {module}: {reason}" for reason in violations(file, module)]
    assert not wrong, "\n".join(wrong)


def test_the_rules_catch_what_they_forbid():
    assert violations("trainer/loop.py", "ray")
    assert violations("trainer/loop.py", "bridge.ops")
    assert violations("engines/base.py", "trainer.config")
    assert violations("engines/fsdp/engine.py", "engines.megatron.build")
    assert violations("engines/rollout/hf.py", "megatron.core")
    assert violations("bridge/plan.py", "transformers")
    assert violations("trainer/config/schema.py", "torch")
    assert not violations("engines/fsdp/engine.py", "engines.attention")
    assert not violations("trainer/cluster.py", "ray.util")


def test_recipes_are_short_and_say_what_they_need():
    for path in (ROOT / "recipes").glob("*.sh"):
        text = path.read_text()
        assert len(text.splitlines()) <= 80, f"{path.name} has more than 80 lines"
        assert '"$@"' in text, f"{path.name} does not pass its arguments on"
        for heading in ("# Needs:", "# Command:", "# Really run:"):
            assert heading in text, f"{path.name} lacks {heading!r}"
