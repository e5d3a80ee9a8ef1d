"""Megatron-Core engine. The only folder that imports megatron.

Megatron-Core without TransformerEngine and Apex prints one warning per module that falls back to torch. We
never use what is missing (layers/ holds portable ones), so exactly these messages are silenced, here and
only while Megatron is imported and configured; everything it says later is shown.
"""

import contextlib
import warnings
from collections.abc import Iterator

_HARMLESS = (
    r"(?s).*Apex (is|are) not installed",
    r"(?s).*dynamic_context\.py",
    r"(?s).*custom_layers\.transformer_engine",
    r".*torch\.jit\.script",
    r"full scope is deprecated",  # the default of a CUDA graph option we do not touch
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the messages above; all others pass."""
    with warnings.catch_warnings():
        for message in _HARMLESS:
            warnings.filterwarnings("ignore", message=message)
        yield


with quiet():
    import megatron.core
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
