"""Our settings -> vLLM's engine arguments."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.rollout.vllm.platform import Platform
from engines.spec import RolloutEngineSpec

WORKER = "engines.rollout.vllm.worker.WeightWorker"
# What this adapter decides; engine_kwargs.vllm may not say otherwise.
OURS = ("model", "skip_tokenizer_init", "worker_extension_cls", "logprobs_mode", "load_format", "dtype", "seed")


def engine_arguments(spec: RolloutEngineSpec, folder: Path, platform: Platform) -> dict[str, Any]:
    """Keyword arguments of vllm.EngineArgs. `folder` holds the config.json to serve.

    ValueError for engine_kwargs that would take over what the adapter relies on, and without `max_model_len`.
    """
    if spec.max_model_len is None:
        raise ValueError(
            "got no max_model_len; expected the length of the longest prompt and answer: vLLM reserves memory by it; "
            "set rollout.max_model_len"
        )
    taken = sorted(set(OURS) & spec.engine_kwargs.keys())
    if taken:
        raise ValueError(
            f"got engine_kwargs.vllm with {taken}; expected none of {list(OURS)}: the trainer decides those; "
            "use the rollout keys of the same meaning"
        )
    fields = json.loads((folder / "config.json").read_text())
    settings = spec.vllm
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "trust_remote_code": spec.model.trust_remote_code,
        "dtype": spec.dtype,
        "seed": settings.seed,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": max(settings.max_num_batched_tokens, spec.max_num_seqs),
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        # A cached prefix is not run again, so nobody would see where its tokens went.
        "enable_prefix_caching": settings.enable_prefix_caching and not spec.return_routes,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_expert_parallel": settings.expert_parallel_size > 1,
        "load_format": "dummy",  # the trainer's weights come before the first request
        "logprobs_mode": "processed_logprobs",  # raw ones ignore the temperature
        "worker_extension_cls": WORKER,
        "scheduling_policy": settings.scheduling_policy,
        "disable_log_stats": True,
    }
    arguments |= platform.arguments(spec, fields)
    for name, value in spec.engine_kwargs.items():
        if isinstance(value, Mapping) and isinstance(arguments.get(name), dict):
            arguments[name] = arguments[name] | dict(value)  # a dict adds to ours, it does not wipe it out
        else:
            arguments[name] = value
    return arguments


@contextmanager
def served_folder(spec: RolloutEngineSpec) -> Iterator[Path]:
    """The model's own folder, or one with a config.json that vLLM can serve here, which is there while vLLM starts.

    On CPU vLLM has no sparse attention. While no sequence is longer than `index_topk` every token sees all others,
    so such a model is the dense DeepSeek-V3 that it contains, exactly; beyond that it is refused.
    """
    path = Path(spec.model.path)
    fields = json.loads((path / "config.json").read_text())
    changed = fields | dict(spec.model.override_config)
    if changed.get("model_type") in ("deepseek_v32", "glm_moe_dsa") and spec.device == "cpu":
        changed = as_dense(changed, spec.max_model_len)
    if changed.get("model_type") in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe"):
        # vLLM picks the router by these; released configurations have them, transformers' own classes do not.
        changed = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"} | changed
    if changed == fields:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="vllm_model_") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(changed, indent=1))
        for code in path.glob("*.py"):  # trust_remote_code
            (folder / code.name).write_bytes(code.read_bytes())
        yield folder


def as_dense(fields: Mapping[str, Any], max_model_len: int) -> dict[str, Any]:
    """config.json of the DeepSeek-V3 inside a sparse model. ValueError where sparse is not dense."""
    if fields["index_topk"] < max_model_len:
        raise ValueError(
            f"got index_topk={fields['index_topk']} and max_model_len={max_model_len} with rollout.name=vllm on CPU; "
            "expected index_topk >= max_model_len: vLLM has no sparse attention there; shorten the sequences or set "
            "rollout.name=hf"
        )
    dropped = {"indexer_types", "layer_types", "architectures", "model_type"}
    kept = {name: value for name, value in fields.items() if not name.startswith("index") and name not in dropped}
    return kept | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
