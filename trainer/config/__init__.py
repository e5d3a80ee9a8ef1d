"""The configuration: one frozen dataclass tree with verl's key names.

    loaded = load_config(sys.argv[1:])        # raises ConfigErrors with everything that is wrong
    loaded.config.actor_rollout_ref.actor.ppo_mini_batch_size
    loaded.config.derived.dp

Only the standard library, omegaconf and hydra are imported here.
"""

from trainer.config.errors import ConfigError, ConfigErrors
from trainer.config.explain import explain
from trainer.config.load import Loaded, load_config
from trainer.config.model_config import SUPPORTED_ARCHITECTURES
from trainer.config.save import changed, diff, fingerprint, save_config, to_yaml
from trainer.config.schema import Config
from trainer.config.summary import size_summary

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "Config",
    "ConfigError",
    "ConfigErrors",
    "Loaded",
    "changed",
    "diff",
    "explain",
    "fingerprint",
    "load_config",
    "save_config",
    "size_summary",
    "to_yaml",
]
