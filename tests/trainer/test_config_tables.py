"""The tables of statuses agree with the dataclasses, and the room stays light."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.config_bench import command
from trainer.config import bounds, inherit, legacy, not_built
from trainer.config.explain import meanings
from trainer.config.keys import STATUS, status_of, status_table
from trainer.config.patterns import covering, expand, expand_all
from trainer.config.refused import ignored_names, refused_names
from trainer.config.schema import ENGINES, leaves, sections

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "transformers", "vllm", "megatron", "mindspeed", "torch_npu", "numpy")


def every_leaf() -> set[str]:
    return {key for engine in ENGINES for key in leaves(engine)}


def every_section() -> set[str]:
    return {key for engine in ENGINES for key in sections(engine)}


def test_braces():
    assert list(expand("a.{b, c}.d{1,2}")) == ["a.b.d1", "a.b.d2", "a.c.d1", "a.c.d2"]
    assert covering("a.b.c", {"a", "a.b"}) == "a.b"
    assert covering("ab.c", {"a"}) is None


def test_every_field_has_a_status_and_every_status_a_field():
    table = status_table()
    assert [key for key in every_leaf() if covering(key, table) is None] == []
    assert [key for key in table if key not in every_leaf() | every_section()] == []
    assert len(table) == len(set(expand_all(pattern for patterns in STATUS.values() for pattern in patterns)))


def test_other_tables_name_what_exists():
    known = every_leaf() | every_section()
    named = [*expand_all(not_built.NOT_BUILT), *expand_all(not_built.BUILT_LATER), *expand_all(not_built.VLLM_ONLY)]
    named += [*not_built.BUILT_VALUES, *not_built.NO_OP, *not_built.FIX]
    named += expand_all((*bounds.POSITIVE, *bounds.NOT_NEGATIVE, *bounds.SHARES))
    named += [*inherit.FOLLOWS, *inherit.FOLLOWS.values()]
    assert [name for name in named if name not in known] == []


def test_keys_without_effect_and_refused_keys_are_no_fields():
    leaf_names = every_leaf()
    other = [*ignored_names(), *refused_names()]
    assert [name for name in other if name in leaf_names or name in every_section()] == []
    assert set(ignored_names()).isdisjoint(refused_names())


@pytest.mark.parametrize("engine", ENGINES)
def test_legacy_keys_lead_to_keys_that_exist(engine):
    for old, new in legacy.moves(engine).items():
        assert old not in every_leaf(), f"{old} is legacy and a field"
        assert new in every_section() or covering(new, every_leaf()) is not None, f"{old} leads to {new}"


def test_later_keys_are_unbuilt_unless_they_are_named():
    for key in every_leaf():
        if status_of(key) == "2" and covering(key, set(expand_all(not_built.BUILT_LATER))) is None:
            assert not not_built.is_built(key), key


def test_loading_imports_nothing_heavy(tmp_path):
    """Also the checks, the summary, saving and explaining run without the engines' packages."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from trainer.config import *\n"
        f"loaded = load_config({command(tmp_path, '--dry-run')!r})\n"
        f"size_summary(loaded); save_config(loaded, Path({str(tmp_path / 'run')!r})); explain('data.seed')\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_room_imports_only_the_standard_library_omegaconf_and_hydra():
    allowed = sys.stdlib_module_names | {"omegaconf", "hydra", "trainer"}
    for path in (ROOT / "trainer" / "config").glob("*.py"):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]) and len(words) > 1:
                assert words[1].split(".")[0] in allowed, f"{path.name}: {line}"


def test_every_field_has_a_meaning():
    silent = [
        key
        for engine in ENGINES
        for key, leaf in leaves(engine).items()
        if key.rpartition(".")[2] not in meanings(leaf.owner) and key != "rewards"
    ]
    assert silent == []
