"""Megatron-Core engine. The only folder that imports megatron.

Importing Megatron-Core without TransformerEngine and Apex prints one warning per module that falls back
to torch. We never use what is missing (layers/ holds portable ones), so exactly these messages are
silenced, here, around the first import; everything Megatron says later is shown.
"""

import warnings

with warnings.catch_warnings():
    for _message in (
        r"(?s).*Apex (is|are) not installed",
        r"(?s).*dynamic_context\.py",
        r"(?s).*custom_layers\.transformer_engine",
        r".*torch\.jit\.script",
    ):
        warnings.filterwarnings("ignore", message=_message)
    import megatron.core
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
