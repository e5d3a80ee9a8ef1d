"""Configuration -> the critic's engine and its part of the loop."""

from __future__ import annotations

from dataclasses import replace

from engines.base import ForwardOptions
from engines.spec import TrainEngineSpec
from trainer import wiring
from trainer.config import Config
from trainer.update.critic import CriticPlan
from trainer.update.value_loss import ValueLoss


def critic_spec(config: Config, device: str, total_steps: int) -> TrainEngineSpec | None:
    """A value model in the actor's processes and process groups; None where no critic is trained."""
    if not config.derived.needs_critic:
        return None
    critic = config.critic
    section = critic.megatron if config.model_engine == "megatron" else critic.fsdp
    spec = wiring.train_engine(config, section, device, wiring.optimizer(config, critic.optim, total_steps))
    return replace(spec, model=replace(wiring.model_of(critic.model), head="value"), role="critic")


def critic_plan(config: Config) -> CriticPlan | None:
    """None where no critic is trained. One way of cutting batches serves values and updates."""
    if not config.derived.needs_critic:
        return None
    critic = config.critic
    return CriticPlan(
        options=ForwardOptions(
            **wiring.split_options(
                config, critic.use_dynamic_bsz, critic.ppo_micro_batch_size_per_gpu, critic.ppo_max_token_len_per_gpu
            )
        ),
        loss=ValueLoss(
            cliprange_value=critic.cliprange_value,
            loss_agg_mode=critic.loss_agg_mode,
            loss_scale_factor=critic.loss_scale_factor or config.data.max_response_length,
        ),
        mini_batch_size=critic.ppo_mini_batch_size,
        epochs=critic.ppo_epochs,
        shuffle_seed=critic.data_loader_seed if critic.shuffle else None,
        warmup_steps=config.trainer.critic_warmup,
    )
