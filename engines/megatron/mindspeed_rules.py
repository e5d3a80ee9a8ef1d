"""What MindSpeed (core_r0.16.0) cannot do, said before a worker starts.

MindSpeed checks part of this itself, but late (while the model is built, on every rank) and as AssertionErrors;
the rest ends in NameErrors, slow paths or wrong gradients. One generator per room, each problem in three parts.
No torch, no megatron: these are checks of a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engines.megatron.mindspeed_flags import (
    ABSORB,
    DSA,
    DSA_CONTEXT_PARALLEL,
    FLAGS,
    FUSED_DSA,
    INSTEAD,
    REFUSED,
    config_fields,
    is_latent,
    is_sparse,
    mindspeed_flags,
)
from engines.spec import MegatronSpec

# Modules whose `forward` never runs when the projections are absorbed: only their weights are read.
NEVER_CALLED = ("linear_k_up_proj", "linear_v_up_proj", "indexer")
_SELECTIVE = ("mlp", "moe", "shared_experts")
_CONTEXT_PARALLEL = ("megatron_cp_algo", "hybrid_cp_algo", "ulysses_cp_algo", DSA_CONTEXT_PARALLEL)


@dataclass(frozen=True)
class Problem:
    got: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"got {self.got}; expected {self.expected}; {self.fix}"


@dataclass(frozen=True)
class Run:
    """One configuration: the model's config.json, parallel sizes, and every setting in force by name.

    device    "npu", or "cpu" for a rehearsal without the fused operators
    targets   modules that get adapters or another number format
    """

    hf: Mapping[str, Any]
    backend: MegatronSpec
    device: str
    settings: Mapping[str, Any]
    targets: tuple[str, ...] = ()

    def on(self, name: str) -> bool:
        return bool(self.settings.get(name))

    @property
    def experts(self) -> int:
        return self.hf.get("num_experts") or self.hf.get("n_routed_experts") or 0


def check(hf: Mapping[str, Any], backend: MegatronSpec, device: str = "npu", targets: tuple[str, ...] = ()) -> None:
    """ValueError with everything that MindSpeed cannot do, one line each.

    hf       content of config.json
    targets  module names that adapters or quantisation are asked for; "all-linear" is none of the refused
    """
    found = problems(hf, backend, device, targets)
    if found:
        raise ValueError("\n".join(map(str, found)))


def problems(
    hf: Mapping[str, Any], backend: MegatronSpec, device: str = "npu", targets: tuple[str, ...] = ()
) -> list[Problem]:
    settings = config_fields(hf, backend, device) | mindspeed_flags(hf, backend, device)
    run = Run(hf, backend, device, settings, targets)
    return [problem for rule in RULES for problem in rule(run)]


def names(run: Run) -> Iterator[Problem]:
    for name in run.backend.mindspeed:
        if name in REFUSED:
            fix = f"set {INSTEAD[name]} instead" if name in INSTEAD else f"remove {name}"
            yield Problem(f"{name} on npu", f"it unset, because {REFUSED[name]}", fix)
        elif name not in FLAGS:
            yield Problem(f"MindSpeed flag {name}", f"one of {', '.join(sorted(FLAGS))}", f"correct or remove {name}")


def sparse_attention(run: Run) -> Iterator[Problem]:
    if not is_sparse(run.hf):
        for name in DSA:
            if run.on(name):
                yield Problem(
                    f"{name}=True with model_type {run.hf.get('model_type')!r}",
                    "a model with DeepSeek Sparse Attention (index_topk in config.json)",
                    f"remove {name}",
                )
        return
    yield from _indexers(run)
    for name, wanted in (("experimental_attention_variant", "dsa"), ("qk_layernorm", True)):
        if run.settings.get(name, wanted) != wanted:
            yield Problem(f"{name}={run.settings[name]} with sparse attention", f"{wanted}", f"remove {name}")
    if run.settings.get("multi_latent_attention", True) is not True:
        yield Problem("multi_latent_attention=False with sparse attention", "True", "remove multi_latent_attention")
    off = [name for name in DSA if not run.on(name)]
    if any(run.on(name) for name in FUSED_DSA) and off:
        yield Problem(
            f"fused sparse attention without {', '.join(off)}",
            f"{', '.join(DSA)} all on: the fused operators work together only",
            f"set {' '.join(f'{name}=True' for name in off)}",
        )
    elif off and run.device == "npu":
        yield Problem(
            f"{', '.join(off)} off",
            f"{', '.join(DSA)} all on: packed sequences need the fused operators",
            f"set {' '.join(f'{name}=True' for name in off)}",
        )
    if run.on("apply_rope_in_complex"):
        yield Problem(
            "apply_rope_in_complex=True",
            "False: it splits the indexer's heads at the wrong place unless half of them is rotated",
            "remove apply_rope_in_complex",
        )
    algorithm = run.settings.get("context_parallel_algo")
    if run.backend.context_parallel_size > 1 and algorithm != DSA_CONTEXT_PARALLEL:
        yield Problem(
            f"context_parallel_algo={algorithm} with sparse attention and "
            f"context_parallel_size={run.backend.context_parallel_size}",
            DSA_CONTEXT_PARALLEL,
            "remove context_parallel_algo",
        )


def _indexers(run: Run) -> Iterator[Problem]:
    missing = [name for name in ("index_n_heads", "index_head_dim") if run.hf.get(name) is None]
    if missing:
        yield Problem(
            f"config.json with index_topk and without {', '.join(missing)}", "all three", "complete config.json"
        )
    kinds = run.hf.get("indexer_types") or run.hf.get("index_topk_pattern")
    shared = set(kinds) - {"full", "F"} if kinds else run.hf.get("index_topk_freq", 1) > 1
    if shared:
        yield Problem(
            "indexers shared between layers (indexer_types, index_topk_pattern or index_topk_freq of config.json)",
            "one indexer per layer: MindSpeed builds no other",
            "train this model on cuda, or another one on npu",
        )


def latent_attention(run: Run) -> Iterator[Problem]:
    tp = run.backend.tensor_model_parallel_size
    if is_latent(run.hf) and tp > 1 and not run.backend.sequence_parallel:
        yield Problem(
            f"sequence_parallel=False with multi-latent attention and tensor_model_parallel_size={tp}",
            "True: without it MindSpeed's gradients of the replicated projections are wrong and differ between ranks",
            "set sequence_parallel=True",
        )
    if run.backend.mla_absorb and not is_sparse(run.hf):
        yield Problem(
            "mla_absorb=True on npu without sparse attention",
            "False: MindSpeed absorbs the projections of sparse attention only",
            "set mla_absorb=False",
        )
    absorbed = is_sparse(run.hf) and run.on(ABSORB)
    for target in run.targets:
        if absorbed and any(name in target for name in NEVER_CALLED):
            yield Problem(
                f"an adapter or number format for {target} with {ABSORB}=True",
                f"none on {', '.join(NEVER_CALLED)}: absorbed attention reads their weights and never calls them",
                f"remove {target} from the target modules",
            )


def attention(run: Run) -> Iterator[Problem]:
    invariant = run.on("use_flash_attn_npu_batch_invariant")
    if invariant and run.on("use_flash_attn"):
        yield Problem(
            "use_flash_attn_npu_batch_invariant and use_flash_attn",
            "one of them: both replace the same function",
            "set use_flash_attn=False",
        )
    if invariant and run.backend.context_parallel_size > 1:
        yield Problem(
            f"use_flash_attn_npu_batch_invariant with context_parallel_size={run.backend.context_parallel_size}",
            "context_parallel_size=1",
            "set context_parallel_size=1",
        )
    if run.on("use_flash_attn") and run.settings.get("sparse_mode", 0) not in (0, 2):
        yield Problem(f"sparse_mode={run.settings['sparse_mode']}", "0 or 2 with use_flash_attn", "set sparse_mode=2")
    if run.settings.get("position_embedding_type", "rope") != "rope":
        yield Problem(
            f"position_embedding_type={run.settings['position_embedding_type']}",
            "rope: no family here has another one",
            "remove position_embedding_type",
        )
    if run.settings["transformer_impl"] != "transformer_engine":
        yield Problem(
            f"transformer_impl={run.settings['transformer_impl']}",
            "transformer_engine: MindSpeed's layers stand behind this name",
            "remove transformer_impl",
        )


def context_parallel(run: Run) -> Iterator[Problem]:
    size = run.backend.context_parallel_size
    algorithm = run.settings.get("context_parallel_algo", "megatron_cp_algo")
    ulysses = run.settings.get("ulysses_degree_in_cp")
    heads, tp = run.hf["num_attention_heads"], run.backend.tensor_model_parallel_size
    if run.settings.get("context_parallel_size", size) != size:
        yield Problem(
            f"override_transformer_config.context_parallel_size={run.settings['context_parallel_size']}",
            f"{size}, the engine's own setting",
            "remove it from override_transformer_config",
        )
    if algorithm not in _CONTEXT_PARALLEL:
        yield Problem(
            f"context_parallel_algo={algorithm}",
            f"one of {', '.join(_CONTEXT_PARALLEL)}",
            "set context_parallel_algo=megatron_cp_algo",
        )
    if size == 1:
        return
    if algorithm == DSA_CONTEXT_PARALLEL and run.settings.get("attention_mask_type", "causal") != "causal":
        yield Problem(
            f"attention_mask_type={run.settings['attention_mask_type']} with {algorithm}",
            "causal",
            "remove attention_mask_type",
        )
    if algorithm == "hybrid_cp_algo":
        if not ulysses or size % ulysses or size // ulysses <= 1:
            yield Problem(
                f"ulysses_degree_in_cp={ulysses} with context_parallel_size={size}",
                "a divisor of context_parallel_size smaller than it",
                "set ulysses_degree_in_cp to such a divisor, or context_parallel_algo=megatron_cp_algo",
            )
        elif heads % (ulysses * tp):
            yield Problem(
                f"{heads} heads with ulysses_degree_in_cp={ulysses} and tensor_model_parallel_size={tp}",
                "heads divisible by their product",
                "lower ulysses_degree_in_cp",
            )
    if algorithm == "ulysses_cp_algo" and heads % (size * tp):
        yield Problem(
            f"{heads} heads with ulysses_cp_algo, context_parallel_size={size}, tensor_model_parallel_size={tp}",
            "heads divisible by the product of both sizes",
            "set context_parallel_algo=megatron_cp_algo",
        )


def experts(run: Run) -> Iterator[Problem]:
    dispatcher = run.settings.get("moe_token_dispatcher_type", "alltoall")
    if dispatcher != "alltoall":
        yield Problem(f"moe_token_dispatcher_type={dispatcher} on npu", "alltoall", "remove moe_token_dispatcher_type")
    if run.on("moe_enable_deepep"):
        yield Problem("moe_enable_deepep=True on npu", "False: DeepEP is a GPU library", "remove moe_enable_deepep")
    grouped = run.on("moe_grouped_gemm")
    for name in ("moe_alltoall_overlap_comm", "moe_fb_overlap", "gemm_gradient_accumulation_fusion"):
        if run.on(name) and not grouped:
            yield Problem(f"{name}=True without moe_grouped_gemm", "both", "set moe_grouped_gemm=True")
    permute = run.on("moe_permute_fusion") or run.on("use_fused_moe_token_permute_and_unpermute")
    if permute and run.on("moe_expert_capacity_factor") and not run.on("moe_pad_expert_input_to_capacity"):
        yield Problem(
            "fused token permutation with moe_expert_capacity_factor",
            "moe_pad_expert_input_to_capacity=True beside it, or no capacity factor",
            "remove moe_expert_capacity_factor",
        )
    if run.on("moe_alltoall_overlap_comm") and run.on("use_ascend_mc2"):
        yield Problem(
            "moe_alltoall_overlap_comm and use_ascend_mc2", "one of them: both schedule communication", "remove one"
        )
    overlap = run.on("moe_alltoall_overlap_comm") or run.on("moe_fb_overlap")
    if run.settings.get("moe_zero_memory", "disable") != "disable" and not overlap:
        yield Problem(
            f"moe_zero_memory={run.settings['moe_zero_memory']} alone",
            "moe_alltoall_overlap_comm or moe_fb_overlap beside it",
            "remove moe_zero_memory",
        )
    if run.on("moe_fb_overlap"):
        yield from _forward_backward_overlap(run)
    elif run.on("moe_unperm2_mem_optim_swap"):
        yield Problem(
            "moe_unperm2_mem_optim_swap=True without moe_fb_overlap", "both", "remove moe_unperm2_mem_optim_swap"
        )


def _forward_backward_overlap(run: Run) -> Iterator[Problem]:
    for name in ("moe_alltoall_overlap_comm", "overlap_grad_reduce", "moe_zero_memory_num_layers"):
        if run.on(name):
            yield Problem(f"moe_fb_overlap and {name}", "one of them", f"remove {name}")
    if run.settings.get("moe_zero_memory") == "level1":
        yield Problem("moe_zero_memory=level1 with moe_fb_overlap", "level0 or disable", "set moe_zero_memory=level0")
    etp = run.backend.expert_tensor_parallel_size
    if run.backend.expert_model_parallel_size == 1 or etp not in (None, 1):
        yield Problem(
            f"moe_fb_overlap with expert_model_parallel_size={run.backend.expert_model_parallel_size}, "
            f"expert_tensor_parallel_size={etp}",
            "expert_model_parallel_size above 1 and expert_tensor_parallel_size 1",
            "remove moe_fb_overlap",
        )
    if run.backend.pipeline_model_parallel_size > 1 and run.backend.virtual_pipeline_model_parallel_size is None:
        yield Problem(
            "moe_fb_overlap with pipeline stages of one chunk",
            "no pipeline, or virtual_pipeline_model_parallel_size",
            "remove moe_fb_overlap",
        )


def memory(run: Run) -> Iterator[Problem]:
    if run.on("swap_optimizer") and not run.backend.use_distributed_optimizer:
        yield Problem(
            "swap_optimizer=True with use_distributed_optimizer=False", "both", "set use_distributed_optimizer=True"
        )
    if run.on("swap_optimizer") and run.on("reuse_fp32_param"):
        yield Problem("swap_optimizer and reuse_fp32_param", "one of them", "remove reuse_fp32_param")
    if run.settings.get("optimizer_selection") == "fused_ema_adamw":
        yield Problem(
            "optimizer_selection=fused_ema_adamw",
            "fused_adamw or fused_torch_adamw: the averaged weights live in Megatron's own training loop",
            "remove optimizer_selection",
        )
    if run.on("use_fused_swiglu") and not run.on("bias_activation_fusion"):
        yield Problem(
            "use_fused_swiglu=True with bias_activation_fusion=False",
            "True: the fused operator is reached through it only",
            "remove bias_activation_fusion",
        )
    for name in ("fp8", "fp4", "fp8_param", "fp8_format"):
        if run.on(name):
            yield Problem(
                f"{name}={run.settings[name]} on npu", "bf16: Atlas A2 and A3 compute no fp8", f"remove {name}"
            )


def recompute(run: Run) -> Iterator[Problem]:
    granularity = run.settings.get("recompute_granularity")
    if granularity != "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if run.on(name):
                yield Problem(
                    f"{name}={run.settings[name]} with recompute_granularity={granularity}",
                    "it only with recompute_granularity=full",
                    f"remove {name}",
                )
    if granularity != "selective":
        return
    modules = run.settings.get("recompute_modules") or ["core_attn"]  # Megatron's default
    works = _SELECTIVE if is_latent(run.hf) else (*_SELECTIVE, "core_attn")
    bad = [name for name in modules if name not in works]
    if bad:
        yield Problem(
            f"recompute_modules={list(modules)} under MindSpeed",
            f"only {', '.join(works)}: {', '.join(bad)} fails in the first backward pass",
            "set recompute_granularity=full, or recompute_norm / recompute_activation_function",
        )


def bridge(run: Run) -> Iterator[Problem]:
    chunks = run.backend.virtual_pipeline_model_parallel_size
    if run.backend.bridge == "megatron_bridge" and chunks:
        yield Problem(
            f"bridge=megatron_bridge with virtual_pipeline_model_parallel_size={chunks} on npu",
            "the native bridge for interleaved stages",
            "set bridge=native",
        )


def not_built(run: Run) -> Iterator[Problem]:
    """MindSpeed's attention wants the offsets of a rank's own tokens, Megatron's rotary embeddings those of all, in
    one field; and kvallgather cuts a pack as a whole where this engine cuts every sequence."""
    if run.backend.context_parallel_size > 1 and run.device == "npu":
        yield Problem(
            f"context_parallel_size={run.backend.context_parallel_size} on npu",
            "1: packed sequences split over ranks are not built for MindSpeed's attention yet",
            "set context_parallel_size=1, and raise tensor_model_parallel_size for long sequences",
        )


RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    names,
    sparse_attention,
    latent_attention,
    attention,
    context_parallel,
    experts,
    memory,
    recompute,
    bridge,
    not_built,
)
