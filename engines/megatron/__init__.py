"""Megatron-Core engine. The only folder that imports megatron.

Megatron-Core without TransformerEngine and Apex warns once per module that falls back to torch. We never use
what is missing (layers/ holds portable ones); the other messages are about its own old calls into torch.
Exactly these are silenced, here; everything else it says is shown. No part of it is imported here: on an NPU
MindSpeed must come first (mindspeed.py).
"""

import logging
import warnings

for _message in (
    r"(?s).*Apex (is|are) not installed",
    r"(?s).*dynamic_context\.py",
    r"(?s).*custom_layers\.transformer_engine",
    r".*torch\.jit\.script",
    r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # an expert that is not cut
    r"full scope is deprecated",  # the default of a CUDA graph option we do not touch
    r".*torch\.distributed\.(reduce_scatter|all_gather_into)_tensor.* is deprecated",
    r"MimoModelConfig is experimental",  # 0.19 imports it for a class check whenever it builds an optimizer
):
    warnings.filterwarnings("ignore", message=_message)
# Advice of 0.19 that names what 0.16 does not have: HybridModel, compute_full_param_layout.
for _name, _message in (
    ("models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("distributed.distributed_data_parallel", "full_param_layout not provided"),
):
    logging.getLogger(f"megatron.core.{_name}").addFilter(
        lambda record, message=_message: message not in record.getMessage()
    )
# Float32 shards of the distributed optimizer. Anywhere else the message would point at a mistake.
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", module=r"megatron\.")
