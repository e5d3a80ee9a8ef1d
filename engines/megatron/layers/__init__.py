"""Portable Megatron layers: plain torch, no TransformerEngine, the same on every device."""
