"""All of Megatron-Core that the engine uses, loaded at once, and what its import changes put right."""

import megatron.core
import megatron.core.distributed
import megatron.core.models.gpt
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.optimizer
import megatron.core.pipeline_parallel  # noqa: F401
import torch

# Importing 0.19 puts a stricter function in the place of torch.storage._load_from_bytes. Pickled tensors name it by
# module, so whoever receives one (the driver through Ray, a rollout process) would import Megatron to read it.
# Under torch's own name each reader uses its own; with 0.16 these two lines change nothing.
torch.storage._load_from_bytes.__module__ = "torch.storage"
torch.storage._load_from_bytes.__qualname__ = "_load_from_bytes"
