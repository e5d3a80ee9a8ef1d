"""A complete, valid command line on files in a temporary directory, and shortcuts into the configuration."""

import json
from pathlib import Path

import pytest

from trainer.config import ConfigErrors, Loaded, load_config
from trainer.config.commandline import parse
from trainer.config.compose import compose_tree
from trainer.config.load import coerce_all
from trainer.config.overrides import rewrite

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}


def command(folder: Path, *more: str, **config: object) -> list[str]:
    """argv that loads on one CPU rank; `more` is appended, `config` changes the model's config.json."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(TINY | config))
    for name in ("train.jsonl", "val.jsonl"):
        (folder / name).write_text("{}\n")
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder}/train.jsonl",
        f"data.val_files={folder}/val.jsonl",
        f"{ROLLOUT}.name=hf",
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ROLLOUT}.n=4",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=4",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        *more,
    ]


def load(folder: Path, *more: str, **config: object) -> Loaded:
    return load_config(command(folder, *more, **config))


def errors(folder: Path, *more: str, **config: object) -> dict[str, str]:
    """id -> complete text of the errors that this command line ends in (the last one of each id)."""
    with pytest.raises(ConfigErrors) as caught:
        load(folder, *more, **config)
    return {error.id: str(error) for error in caught.value.errors}


def values(*argv: str) -> tuple[dict[str, object], list[str]]:
    """Typed values of some arguments before inheritance and checks, and the errors without the missing keys."""
    overrides = rewrite(parse(list(argv)))
    found, _ = coerce_all(compose_tree(overrides), overrides)
    return found, [str(error) for error in overrides.errors if error.id != "value.required"]


def value(argument: str) -> object:
    """The typed value of one argument that has no error; a key below a passthrough is looked up inside."""
    found, problems = values(argument)
    assert problems == []
    key = argument.partition("=")[0].lstrip("+~")
    while key not in found:
        key, _, leaf = key.rpartition(".")
        inside = found[key]
        return inside[leaf]
    return found[key]


def problem(argument: str) -> str:
    """The one error of one argument."""
    problems = values(argument)[1]
    assert len(problems) == 1, problems
    return problems[0]
