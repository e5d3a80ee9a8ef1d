"""What Megatron must know of a Hugging Face model.

families.py   what sets each model_type apart   hf_config.py  config.json, checked
fields.py     model -> TransformerConfig fields  splits.py     which parallel sizes fit
config.py     these, the engine's own fields and the user's overrides
"""
