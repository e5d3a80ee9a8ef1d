"""The Ascend engine's contract with MindSpeed, told by fakes: order of calls, settings, refusals, corrections."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from engines.megatron import mindspeed
from engines.megatron.mindspeed_flags import FUSED_DSA
from engines.spec import MegatronSpec

ROOT = Path(__file__).resolve().parents[2]
GLM5 = {
    **{"model_type": "glm_moe_dsa", "num_attention_heads": 64, "kv_lora_rank": 512, "n_routed_experts": 256},
    **{"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128},
}


ADAPTOR = """
import sys
from mindspeed.patch_utils import MindSpeedPatchesManager, Patch
from mindspeed.journal import journal
journal.append(f"adaptor, argv {sys.argv[1:]}, megatron loaded {'megatron' in sys.modules}")
if EXIT:
    sys.exit(2)

def repatch(arguments):
    if arguments.get("use_fused_rmsnorm"):
        raise RuntimeError("the patch of forward exist !")
    journal.append(f"repatch {arguments['experimental_attention_variant']} {arguments['moe_grouped_gemm']}")
    for name in TARGETS:
        MindSpeedPatchesManager.patches_info[name] = Patch()
"""
SETTINGS = ("use_dsa_absorb", *FUSED_DSA, "apply_rope_in_complex", "use_fused_rmsnorm")
TARGETS = (*mindspeed._ALWAYS, *(name for names in mindspeed._EXPECTED.values() for name in names))
SCRIPT = """
import json, sys, types
from engines.megatron import mindspeed
from engines.megatron.mindspeed_flags import repatch_arguments
from engines.spec import MegatronSpec, ModelSpec, TrainEngineSpec
from mindspeed.journal import journal

engine = types.ModuleType("engines.megatron.npu_engine")
engine.MindSpeedEngine = lambda spec: journal.append(f"engine on {spec.device}") or "the engine"
sys.modules[engine.__name__] = engine
backend = MegatronSpec(override_transformer_config={"moe_grouped_gemm": True}, mindspeed=MINDSPEED)
spec = TrainEngineSpec("megatron", "npu", ModelSpec(MODEL), backend, None)
import engines
build = engines._lookup(engines.TRAIN_ENGINES, ("megatron", "npu"))
try:
    for _ in range(2):  # actor, then reference: adapted once
        assert build(spec) == "the engine"
    dsa = sys.modules["megatron.core.transformer.experimental_attention_variant.dsa"]
    fused = sys.modules["mindspeed.core.transformer.experimental_attention_variant.dsa_fused"]
    assert dsa.rotate_activation is fused.rotate_activation is mindspeed.unrotated
    journal.append(f"argv {sys.argv[1:]}")
    AFTER
except ValueError as error:
    journal.append(f"error: {error}")
print(json.dumps(journal))
"""


@pytest.fixture
def host(tmp_path) -> Path:
    """A folder with a fake MindSpeed, a fake Megatron-Core 0.16, and a model."""
    modules = {
        "mindspeed/__init__.py": "",
        "mindspeed/journal.py": "journal = []",
        "mindspeed/megatron_adaptor.py": f"EXIT, TARGETS = False, {TARGETS!r}\n{ADAPTOR}",
        "mindspeed/patch_utils.py": """
            class Patch:
                is_applied = True
            class MindSpeedPatchesManager:
                patches_info = {}
        """,
        "mindspeed/args_utils.py": f"""
            import types
            def get_full_args():
                return types.SimpleNamespace(**dict.fromkeys({SETTINGS!r}, False))
        """,
        "mindspeed/core/transformer/experimental_attention_variant/dsa_fused.py": "def rotate_activation(x): ...",
        "apex/optimizers.py": "class FusedAdam: ...",
        "megatron/core/optimizer.py": "Adam = None",
        "megatron/core/parallel_state.py": "get_context_parallel_group = None",
        "megatron/core/models/common/embeddings/rope_utils.py": "def _apply_rotary_pos_emb_thd(): ...",
        "megatron/core/transformer/experimental_attention_variant/dsa.py": "def rotate_activation(x): ...",
        "megatron_core-0.16.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.16.1\n",
        "model/config.json": json.dumps(GLM5),
    }
    for name, text in modules.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    for folder in ("megatron", "mindspeed", "apex"):
        for path in [tmp_path / folder, *(tmp_path / folder).rglob("*")]:
            if path.is_dir():
                (path / "__init__.py").touch()
    return tmp_path


def journal(host: Path, settings: dict | None = None, before: str = "", after: str = "") -> list[str]:
    """What happened when the registry built the engine in a process that sees the fakes first."""
    script = SCRIPT.replace("MINDSPEED", repr(settings or {})).replace("MODEL", repr(str(host / "model")))
    script = before + script.replace("AFTER", after)
    command = [sys.executable, "-c", script, "--help", "trainer.device=npu"]
    run = subprocess.run(
        command, env={"PYTHONPATH": f"{host}:{ROOT}", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_mindspeed_comes_first_sees_no_arguments_and_is_told_once(host):
    assert journal(host) == [
        "adaptor, argv [], megatron loaded False",
        "repatch dsa True",
        "engine on npu",
        "engine on npu",
        "argv ['--help', 'trainer.device=npu']",
    ]


def test_a_second_engine_with_other_settings_is_refused(host):
    other = "mindspeed.bootstrap(repatch_arguments(mindspeed.read_config_json(spec.model), MegatronSpec(), 'npu'))"
    assert "differs from the first in moe_grouped_gemm" in journal(host, after=other)[-1]


def test_megatron_loaded_too_early_is_an_error(host):
    (error,) = journal(host, before="import megatron.core\n")
    assert "2 Megatron modules loaded before MindSpeed (megatron" in error


def remove_mindspeed(host: Path) -> None:
    (host / "mindspeed" / "megatron_adaptor.py").unlink()


def break_parser(host: Path) -> None:
    path = host / "mindspeed" / "megatron_adaptor.py"
    path.write_text(path.read_text().replace("EXIT, TARGETS = False", "EXIT, TARGETS = True"))


def age_megatron(host: Path) -> None:
    path = host / "megatron_core-0.16.1.dist-info" / "METADATA"
    path.write_text(path.read_text().replace("0.16.1", "0.19.2"))


def forget_absorption(host: Path) -> None:
    path = host / "mindspeed" / "megatron_adaptor.py"
    path.write_text(path.read_text().replace(mindspeed._EXPECTED["use_dsa_absorb"][0], "elsewhere"))


def forget_flag(host: Path) -> None:
    path = host / "mindspeed" / "args_utils.py"
    path.write_text(path.read_text().replace("'use_dsa_absorb', ", ""))


@pytest.mark.parametrize(
    "damage,found",
    [
        (remove_mindspeed, "ModuleNotFoundError"),
        (break_parser, "SystemExit: 2"),
        (age_megatron, "megatron-core 0.19.2"),
        (forget_flag, "a MindSpeed without use_dsa_absorb"),
        (forget_absorption, "left megatron.core.transformer.multi_latent_attention.MLASelfAttention unreplaced"),
    ],
)
def test_an_incomplete_mindspeed_ends_the_run_and_never_falls_back(host, damage, found):
    damage(host)
    *before, error = journal(host)
    assert found in error and "expected MindSpeed core_r0.16.0" in error and "install: pip install" in error
    assert not [line for line in before if line.startswith("engine")], "no weight is read"


def test_settings_that_mindspeed_itself_refuses_name_its_answer(host):
    error = journal(host, {"use_fused_rmsnorm": True})[-1]
    assert "the patch of forward exist !" in error and "half adapted" in error


def test_an_impossible_setting_is_refused_before_mindspeed_is_imported(host):
    (error,) = journal(host, {"swap_attention": True})
    assert error.startswith("error: got swap_attention on npu")


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(mindspeed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"no package mindspeed; expected MindSpeed core_r0\.16\.0") as caught:
        mindspeed._require_packages()
    assert "model_engine=fsdp" in str(caught.value)


class Linear(nn.Linear):
    def __init__(self, parallel_mode: str):
        super().__init__(2, 2, bias=False)
        self.parallel_mode = parallel_mode
        self.weight.tensor_model_parallel = True


def test_only_duplicated_weights_lose_their_mark():
    model = nn.Sequential(Linear("duplicated"), Linear("column"), nn.LayerNorm(2))
    mindspeed.unmark_replicated([model])
    assert [vars(p).get("tensor_model_parallel") for p in model.parameters()] == [False, True, None, None]


def test_the_attention_form_is_told_by_its_names():
    prefix = "decoder.layers.0.self_attention."
    absorbed = [f"{prefix}linear_{part}_up_proj.weight" for part in ("q", "k", "v")]
    plain = [f"{prefix}linear_{part}_up_proj.weight" for part in ("q", "kv")]
    mindspeed.require_absorbed(absorbed, True)
    mindspeed.require_absorbed(plain, False)
    mindspeed.require_absorbed(["embedding.word_embeddings.weight"], True)
    with pytest.raises(ValueError, match="got a model with linear_kv_up_proj"):
        mindspeed.require_absorbed(plain, True)
    with pytest.raises(ValueError, match=r"expected linear_kv_up_proj\.weight"):
        mindspeed.require_absorbed(absorbed, False)


def test_a_backend_says_nothing_to_mindspeed_unless_told():
    assert replace(MegatronSpec(), tensor_model_parallel_size=2).mindspeed == {}
    assert torch.equal(mindspeed.unrotated(torch.arange(3)), torch.arange(3))
