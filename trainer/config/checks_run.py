"""The run: checkpoints, loggers, devices and files."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from trainer.config.inspection import ACTOR, Inspection

CONTENTS = ("model", "optimizer", "extra", "hf_model")
RESUMABLE = ("model", "optimizer", "extra")
LOGGER_PACKAGES = {"tensorboard": "tensorboard"}
# MindSpeed arguments: they mean nothing to Megatron-Core without an NPU.
NPU_FLAGS = (
    "use_flash_attn",
    "use_fused_rmsnorm",
    "use_fused_swiglu",
    "use_fused_rotary_pos_emb",
    "fused_permute_unpermute",
    "use_dsa_absorb",
    "use_fused_lightning_indexer",
    "use_fused_sparse_flash_attention",
    "use_fused_lightning_indexer_kl_loss",
    "context_parallel_algo",
)
DSA_TRAINED = "dsa_indexer_loss_coeff"  # trains the indexer, on every device
DATA_SUFFIXES = (".parquet", ".jsonl")


def check(view: Inspection) -> None:
    checkpoints(view)
    loggers(view)
    mindspeed(view)
    cores(view)
    data_files(view)
    reward_file(view)
    python_prefix(view)


def checkpoints(view: Inspection) -> None:
    contents, trainer = view.actor.checkpoint, view.config.trainer
    for name, values in (("save_contents", contents.save_contents), ("load_contents", contents.load_contents)):
        unknown = [value for value in values if value not in CONTENTS]
        inherited = name == "load_contents" and values == contents.save_contents
        if unknown and not inherited:
            key = f"{ACTOR}.checkpoint.{name}"
            kept = [value for value in values if value in CONTENTS] or ["model"]
            view.error(
                "ckpt.save",
                key,
                f"{name} with {', '.join(unknown)}",
                f"any of {', '.join(CONTENTS)}",
                f"{key}=[{','.join(kept)}]",
            )
    left_out = [value for value in RESUMABLE if value not in contents.save_contents]
    if left_out:
        key = f"{ACTOR}.checkpoint.save_contents"
        view.error(
            "not.built",
            key,
            f"save_contents without {', '.join(left_out)}",
            f"at least {', '.join(RESUMABLE)}: partial checkpoints are not built yet",
            f"{key}=[{','.join((*RESUMABLE, *[v for v in contents.save_contents if v not in RESUMABLE]))}]",
        )
    beyond = [value for value in contents.load_contents if value not in contents.save_contents]
    if beyond:
        view.notices.append(f"{ACTOR}.checkpoint.load_contents: {', '.join(beyond)} is not in save_contents")
    if contents.async_save and view.config.model_engine == "fsdp":
        key = f"{ACTOR}.checkpoint.async_save"
        view.error("ckpt.save", key, "async_save=True, model_engine=fsdp", "False with fsdp", f"{key}=False")
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        view.error(
            "ckpt.save",
            "trainer.resume_from_path",
            "resume_from_path=null, resume_mode=resume_path",
            "the checkpoint directory to resume",
            "trainer.resume_from_path=DIRECTORY   (or trainer.resume_mode=auto)",
        )
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path:
        view.notices.append(f"trainer.resume_from_path has no effect with resume_mode={trainer.resume_mode}")
    for role in ("actor", "ref") if view.config.model_engine == "megatron" else ():
        section = vars(view.config.actor_rollout_ref)[role].megatron
        if section.use_dist_checkpointing and not section.dist_checkpointing_path:
            key = f"actor_rollout_ref.{role}.megatron"
            got = f"use_dist_checkpointing=True, dist_checkpointing_path={section.dist_checkpointing_path or 'empty'}"
            fix = f"{key}.dist_checkpointing_path=DIRECTORY   (or {key}.use_dist_checkpointing=False)"
            view.error("ckpt.dist", f"{key}.dist_checkpointing_path", got, "a non-empty path", fix)
            return


def loggers(view: Inspection) -> None:
    for name in view.config.trainer.logger:
        package = LOGGER_PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            kept = [other for other in view.config.trainer.logger if other != name] or ["console"]
            view.error(
                "log.package",
                "trainer.logger",
                f"logger {name}: the package {package} is not installed",
                "an installed package",
                f"pip install {package}   (or trainer.logger=[{','.join(kept)}])",
            )


def mindspeed(view: Inspection) -> None:
    if view.config.derived.device == "npu" or view.config.model_engine != "megatron":
        return
    key = f"{ACTOR}.megatron.override_transformer_config"
    for name in view.actor.megatron.override_transformer_config:
        if name in NPU_FLAGS or name.startswith("use_ascend_"):
            got = f"{name} on {view.config.derived.device}{view.where(f'{key}.{name}')}"
            view.error("dev.npu_only", f"{key}.{name}", got, "an NPU: it is a MindSpeed argument", "remove it")
        elif name == "experimental_attention_variant" or (name.startswith("dsa_") and name != DSA_TRAINED):
            got = f"{name}{view.where(f'{key}.{name}')}"
            expected = "unset: the layers of sparse attention read the model's config.json"
            view.error("dsa.own_layers", f"{key}.{name}", got, expected, "remove it")


def cores(view: Inspection) -> None:
    ranks, available = view.config.derived.world_size, len(os.sched_getaffinity(0))
    if view.config.derived.device == "cpu" and ranks > available:
        view.notices.append(f"{ranks} ranks on {available} cores: ranks wait for each other (device=cpu)")


def data_files(view: Inspection) -> None:
    data = view.config.data
    for part in ("train_files", "val_files"):
        for name in vars(data)[part]:
            if name == "":
                continue
            path = Path(name).expanduser()
            if data.dataset_dir and not path.is_absolute():
                path = Path(data.dataset_dir).expanduser() / path
            if path.suffix in DATA_SUFFIXES and path.is_file():
                continue
            problem = "no such file" if not path.is_file() else f"suffix {path.suffix or 'none'}"
            view.error(
                "data.files",
                f"data.{part}",
                f"{path}: {problem}",
                "an existing .parquet or .jsonl file",
                f"data.{part}=FILE",
            )


def reward_file(view: Inspection) -> None:
    function = view.config.reward.custom_reward_function
    key = "reward.custom_reward_function"
    if function.path is not None and not Path(function.path).expanduser().is_file():
        view.error("reward.file", f"{key}.path", f"{function.path}: no such file", "a python file", f"{key}.path=FILE")
    if function.path is not None and not function.name:
        view.error(
            "reward.file",
            f"{key}.name",
            "no function name",
            "the name of a function in that file",
            f"{key}.name=compute_score",
        )


def python_prefix(view: Inspection) -> None:
    """Ray starts workers with this command: its first word must exist here."""
    key = "ray_kwargs.ray_init.runtime_env"
    command = view.config.ray_kwargs.ray_init.runtime_env.get("py_executable")
    if command is None:
        return
    words = str(command).split()
    if not words or shutil.which(words[0]) is None:
        got = f"py_executable={command}: {words[0] if words else 'nothing'} is not on PATH"
        view.error(
            "ray.python",
            f"{key}.py_executable",
            got,
            "a command whose first word is on PATH",
            f"{key}.py_executable=null",
        )
