"""`--explain KEY`: type, default, meaning and status of one key, taken from the dataclasses themselves."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from functools import cache

from trainer.config import not_built
from trainer.config.errors import ConfigError, ConfigErrors
from trainer.config.keys import status_of
from trainer.config.legacy import moves
from trainer.config.nearest import abbreviated, suggestions
from trainer.config.refused import ignored, refused
from trainer.config.schema import ENGINES, Leaf, domain_leaves, leaves, sections
from trainer.config.values import REQUIRED, describe, to_text


@cache
def meanings(cls: type) -> dict[str, str]:
    """Field -> the comment behind its declaration, own class before its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(base))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
        for node in ast.parse(source).body[0].body:
            if isinstance(node, ast.AnnAssign) and node.end_lineno in comments:
                found[node.target.id] = comments[node.end_lineno]
    return found


def explain(key: str) -> str:
    """A few lines about one key or section. Raises ConfigErrors for a name that is nothing."""
    for engine in ENGINES:
        known = leaves(engine)
        if key in known and key != "rewards":
            only = "" if all(key in leaves(other) for other in ENGINES) else f"   (model_engine={engine} only)"
            return _leaf(key, known[key], only)
        parts = key.split(".")
        if parts[0] == "rewards" and len(parts) == 3 and parts[2] in domain_leaves():
            return _leaf(key, domain_leaves()[parts[2]], "")
        if key in sections(engine):
            return f"{key}: a section\n" + "\n".join(f"  {name}" for name in known if name.startswith(key + "."))
        if key in moves(engine):
            return f"{key}: legacy spelling of {moves(engine)[key]}\n{explain(moves(engine)[key])}"
    without_effect, never = ignored(key), refused(key)
    if without_effect is not None:
        return f"{key}: accepted without effect; {without_effect[1]}"
    if never is not None:
        return f"{key}: refused; {never[1].reason}"
    names = suggestions(key, ENGINES[0]) or suggestions(key, ENGINES[1])
    expected = f"one of {abbreviated(names)}" if names else "a key of the tree"
    fix = f"--explain {names[0]}" if names else "--cfg resolved"
    raise ConfigErrors([ConfigError("key.unknown", key or "--explain", "a key that does not exist", expected, fix)])


def _leaf(key: str, leaf: Leaf, engine: str) -> str:
    default = "required" if leaf.default == REQUIRED else _shown(leaf.default)
    lines = [f"{key}{engine}", f"  type:     {describe(leaf.type)}", f"  default:  {default}"]
    name = leaf.key.rpartition(".")[2]
    meaning = meanings(leaf.owner).get(name)
    if meaning:
        lines.append(f"  meaning:  {meaning}")
    if not key.startswith("rewards."):
        state = (
            "works"
            if not_built.is_effective(key)
            else "no effect yet"
            if not_built.is_built(key) or status_of(key) == "H"
            else "not built yet"
        )
        if state == "works" and key in not_built.BUILT_VALUES:
            state = "works for " + ", ".join(map(_shown, not_built.BUILT_VALUES[key]))
        lines.append(f"  state:    {state}")
    old = sorted({name for engine in ENGINES for name, target in moves(engine).items() if target == key})
    if old:
        lines.append(f"  legacy:   {', '.join(old)}")
    return "\n".join(lines)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else to_text(value)
