"""What a run is going to be, in a few lines: for `--dry-run`."""

from __future__ import annotations

from trainer.config.load import Loaded
from trainer.config.save import changed, fingerprint

GIB = 2**30


def size_summary(loaded: Loaded) -> str:
    """Devices, batch arithmetic, token counts, model size, and every key that is not at its default."""
    config, derived = loaded.config, loaded.config.derived
    data, rollout = config.data, config.actor_rollout_ref.rollout
    steps, layout = derived.total_training_steps, derived.formulas["dp"].partition(": ")[2]
    lines = [
        f"configuration {fingerprint(config)}: no error",
        f"engine        {config.model_engine} on {derived.device}; {layout}; dp {derived.dp}",
        f"rollout       {rollout.name}, {derived.rollout_replicas} replicas on {derived.rollout_world_size} ranks",
        f"step          {data.train_batch_size} prompts x {rollout.n} = {derived.sequences_per_train_batch} samples, "
        f"{derived.optimizer_steps_per_train_step} optimizer steps",
        f"mini-batch    {derived.sequences_per_mini_batch} samples, {derived.sequences_per_rank} per dp rank",
        f"length        {data.max_prompt_length} + {data.max_response_length} = {derived.max_sequence_length} tokens; "
        f"at most {derived.sequences_per_train_batch * derived.max_sequence_length} tokens per step",
        f"steps         {steps if steps is not None else f'{config.trainer.total_epochs} epochs'}",
        f"reference     {'yes' if derived.needs_reference else 'no'}",
        f"run directory {derived.run_dir}",
    ]
    if loaded.model is not None:
        count = loaded.model.parameters
        lines.append(
            f"model         {loaded.model.architecture}, {count / 1e6:.1f}M parameters, "
            f"{count * 16 / GIB:.2f} GiB of weights, gradients and optimizer state in all"
        )
    return "\n".join(lines + ["given:"] + [f"  {text}" for text in changed(loaded)])
