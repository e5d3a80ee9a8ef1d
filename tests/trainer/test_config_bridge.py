"""Which weight bridge a command line asks for, in our spelling and in verl's."""

import pytest

from tests.trainer.config_bench import ACTOR, REF, errors, load
from trainer import wiring

MEGATRON = ["model_engine=megatron", f"{ACTOR}.use_kl_loss=True"]


def bridges(folder, *given: str) -> tuple[str, str]:
    """What the actor's and the reference's engine are told."""
    config = load(folder, *MEGATRON, *given).config
    return (
        wiring.actor_spec(config, "cpu", total_steps=1).backend.bridge,
        wiring.reference_spec(config, "cpu").backend.bridge,
    )


@pytest.mark.parametrize(
    "given, expected",
    [
        ([], ("auto", "auto")),
        ([f"{ACTOR}.megatron.bridge=native"], ("native", "native")),  # the reference inherits
        ([f"{REF}.megatron.bridge=megatron_bridge"], ("auto", "megatron_bridge")),
        ([f"{ACTOR}.megatron.bridge=megatron_bridge", f"{REF}.megatron.bridge=auto"], ("megatron_bridge", "auto")),
    ],
)
def test_the_engines_are_told_which_bridge(tmp_path, given, expected):
    assert bridges(tmp_path, *given) == expected


def test_another_name_is_refused_with_the_three(tmp_path):
    text = errors(tmp_path, *MEGATRON, f"{ACTOR}.megatron.bridge=mbridge")["value.choice"]
    assert all(name in text for name in ("mbridge", "auto", "native", "megatron_bridge"))


@pytest.mark.parametrize("value", ["True", "False"])
def test_vanilla_mbridge_is_accepted_and_says_who_decides(tmp_path, value):
    argument = f"++{ACTOR}.megatron.vanilla_mbridge={value}"
    assert bridges(tmp_path, argument) == ("auto", "auto")
    notices = [text for text in load(tmp_path, *MEGATRON, argument).notices if "vanilla_mbridge" in text]
    assert len(notices) == 1 and "megatron.bridge chooses" in notices[0]


def test_use_mbridge_is_the_only_way_in(tmp_path):
    assert bridges(tmp_path, f"{ACTOR}.megatron.use_mbridge=True") == ("auto", "auto")
    assert "use_mbridge=False" in errors(tmp_path, *MEGATRON, f"{ACTOR}.megatron.use_mbridge=False")["not.built"]
