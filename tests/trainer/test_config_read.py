"""A key that works is a key somebody reads: configuration that nothing uses is a lie to the user."""

import ast
from pathlib import Path

from trainer.config.not_built import is_effective
from trainer.config.schema import ENGINES, domain_leaves, leaves

ROOT = Path(__file__).resolve().parents[2]
# Read inside trainer/config only: they choose or fill other values, or are checked there.
READ_HERE = {
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.ref.strategy",
    "critic.strategy",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.actor.megatron.use_mbridge",
    "actor_rollout_ref.ref.megatron.use_mbridge",
    "critic.megatron.use_mbridge",
    "actor_rollout_ref.model.use_remove_padding",
    "critic.model.use_remove_padding",
    "actor_rollout_ref.rollout.val_kwargs.do_sample",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.v1.trainer_mode",
    "data.gen_batch_size",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision.buffer_dtype",
    "critic.fsdp.mixed_precision.buffer_dtype",
    "actor_rollout_ref.rollout.checkpoint_engine.backend",
    "trainer.nnodes",  # these four: factors of derived.world_size and derived.rollout_replicas
    "trainer.n_gpus_per_node",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.n_gpus_per_node",
}


def names_used() -> set[str]:
    """Attribute names, keyword names and string constants of trainer/ and engines/ outside trainer/config."""
    found: set[str] = set()
    for folder in ("trainer", "engines"):
        for path in (ROOT / folder).rglob("*.py"):
            if ROOT / "trainer" / "config" in path.parents:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    found.add(node.attr)
                elif isinstance(node, ast.keyword) and node.arg:
                    found.add(node.arg)
    return found


def unread() -> list[str]:
    used = names_used()
    keys = {key: None for engine in ENGINES for key in leaves(engine)}
    missing = [key for key in keys if is_effective(key) and key not in READ_HERE and key.rpartition(".")[2] not in used]
    return missing + [
        f"rewards.*.{key}"
        for key in domain_leaves()
        if key not in used and key not in ("worker", "infer_batch_size", "template", "devices")
    ]


def test_every_working_key_is_read():
    assert unread() == []
