"""Transformers models as both engines need them: built without memory, packed attention, disk names.

transformers holds a model in one form and saves it in another: tied heads are left out on disk, and
fused experts become one tensor per expert. `disk_layout` relates the two, tensor by tensor.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from bridge.models.value import SCORE, SCORE_BIAS
from engines.attention import packed_attention, sparse_packed_attention
from engines.batch import PolicyOutput, TrainBatch
from engines.logprobs import next_token_labels, rows_to_tokens, sum_pi_squared, token_log_probs
from engines.sparse_index import Indexer, IndexInputs, check_version, choose_packed, hand_over_indexers
from engines.spec import ModelSpec
from engines.value_head import ValueHead

logger = logging.getLogger(__name__)

ATTENTION = "engine_attention"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Live name, where a value head hangs in the place of the vocabulary's, and name on disk.
VALUE_HEAD_NAMES = {"lm_head.weight": SCORE, "lm_head.bias": SCORE_BIAS}
# Families whose live `experts.gate_up_proj` [E, 2F, D] (gate rows first) and `experts.down_proj` [E, D, F]
# are saved as `experts.{e}.{gate,up,down}_proj.weight`.
FUSED_EXPERT_FAMILIES = ("qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")


class Attend(Protocol):
    """The attention of one forward pass: what the tokens are, sequences or the ends of cached ones, it knows alone."""

    def __call__(
        self, layer: int, q_bHSD: Tensor, k_bGSD: Tensor, v_bGSE: Tensor, scale: float, keys_bSK: Tensor | None
    ) -> Tensor:
        """[b, S, H, E]; with `keys_bSK`, as `choose` returned them, each token sees these keys only."""

    def choose(self, indexer: Indexer, inputs: IndexInputs) -> Tensor:
        """The keys that the tokens of one sparse layer attend to."""


@dataclass(frozen=True)
class PackedAttend:
    """Causal attention inside each sequence of one packed row; `cu_seqlens` [B+1] stays on the host."""

    cu_seqlens: Tensor

    def __call__(
        self, layer: int, q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, scale: float, keys_1TK: Tensor | None
    ) -> Tensor:
        q_THD, k_TGD, v_TGE = (x[0].transpose(0, 1) for x in (q_1HTD, k_1GTD, v_1GTE))
        if keys_1TK is None:
            return packed_attention(q_THD, k_TGD, v_TGE, self.cu_seqlens, scale).unsqueeze(0)
        return sparse_packed_attention(q_THD, k_TGD, v_TGE, self.cu_seqlens, scale, keys_1TK[0]).unsqueeze(0)

    def choose(self, indexer: Indexer, inputs: IndexInputs) -> Tensor:
        return choose_packed(indexer, inputs, self.cu_seqlens)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    attend: Attend,
    indices: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: hand over to the `attend` given to the model's forward.

    `indices` are the keys that a sparse layer chose.

    transformers builds no mask for an attention it has no mask function for, so nothing T x T exists.
    """
    unsupported = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
    given = sorted(name for name, item in unsupported.items() if item is not None)
    if given:
        raise ValueError(
            f"got a model whose attention needs {given}; expected plain causal attention in every layer; "
            "switch the feature off with override_config (e.g. use_sliding_window: false) or choose another model"
        )
    return attend(module.layer_idx, query, key, value, scaling, indices), None


AttentionInterface.register(ATTENTION, _attention)


def dtype_of(name: str, option: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"got {option}={name!r}; expected one of {sorted(DTYPES)}; set {option} to one of them")
    return DTYPES[name]


def read_config(spec: ModelSpec) -> PretrainedConfig:
    """config.json of the model with `override_config` applied; unknown keys are a ValueError."""
    config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
    overrides = dict(spec.override_config)
    if overrides.pop("attn_implementation", None) is not None:
        logger.warning("override_config.attn_implementation has no effect: attention is always packed here")
    known = set(config.to_dict())
    unknown = sorted(set(overrides) - known)
    if unknown:
        near = {key: get_close_matches(key, known, n=1) for key in unknown}
        raise ValueError(
            f"got override_config keys {unknown}; expected keys of {spec.path}/config.json "
            f"(nearest names: {near}); correct or remove them"
        )
    for key, value in overrides.items():
        setattr(config, key, value)
    if spec.head == "value":
        config.tie_word_embeddings = False
    return config


def build_on_meta(spec: ModelSpec, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model without any memory behind its parameters; see `materialize`. A value model is one
    whose head has a single row: every family has such a class, and few have one for token classification."""
    check_version(PretrainedConfig.get_config_dict(spec.path)[0].get("model_type", ""))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            read_config(spec), dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=spec.trust_remote_code
        )
        if spec.head == "value":
            model.set_output_embeddings(ValueHead(model.get_output_embeddings().in_features, "meta", dtype))
    hand_over_indexers(model)
    _choose_experts_kernel(model)
    _keep_float32_buffers(model)
    # torch withholds the gradient of the row named pad_token_id. Nothing is padded here, and that token may be a
    # real one (often the end token): it learns like every other, as it does in Megatron.
    model.get_input_embeddings().padding_idx = None
    return model


def _choose_experts_kernel(model: PreTrainedModel) -> None:
    """transformers' default, torch's grouped matrix product, takes only rows of whole 16 bytes, eight bfloat16
    numbers: models of other sizes (tiny ones) loop over their experts, in every dtype and engine alike."""
    rows = {p.shape[-1] for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name}
    if any(size % 8 for size in rows):
        model.set_experts_implementation("eager")


def _keep_float32_buffers(model: PreTrainedModel) -> None:
    """Undo the cast of buffers that transformers keeps in float32 when it loads a file: correction biases of
    routers, whose differences bfloat16 would swallow."""
    for name, buffer in model.named_buffers():
        if any(part in name for part in model._keep_in_fp32_modules_strict):
            buffer.data = buffer.data.float()


def materialize(model: PreTrainedModel, device: torch.device | str) -> None:
    """Give a model from `build_on_meta` memory. Parameters are undefined until weights are loaded; what no
    file holds (rotary frequencies) is computed."""
    model.to_empty(device=device)
    model.tie_weights()  # to_empty gave tied tensors memory of their own
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers' own mark for "do not touch"
    model.initialize_weights()


def packed_log_probs(
    model: nn.Module,
    batch: TrainBatch,
    device: torch.device,
    temperature: float,
    entropy: bool = False,
    squares: bool = False,
) -> PolicyOutput:
    """log p of every token given the earlier ones of its sequence, and the entropy and (with `squares`) the sum of
    squared probabilities of what it was drawn from.

    All [T] float32 on `device`, 0 at first tokens, the first two differentiable; None unless asked for.
    """
    input_ids_T, cuts = batch.input_ids.to(device), batch.cu_seqlens.to(device)
    logits_1TV = _packed_logits(model, batch, device)
    log_probs_T, entropy_T = token_log_probs(
        logits_1TV[0], next_token_labels(input_ids_T, cuts), temperature=temperature, entropy=entropy
    )
    squares_T = sum_pi_squared(logits_1TV[0], temperature=temperature) if squares else None
    log_probs_T, entropy_T, squares_T = (
        None if x is None else rows_to_tokens(x, cuts) for x in (log_probs_T, entropy_T, squares_T)
    )
    return PolicyOutput(log_probs_T, entropy_T, sum_pi_squared=squares_T)


def packed_values(model: nn.Module, batch: TrainBatch, device: torch.device) -> Tensor:
    """[T] float32 on `device`: what the value model expects of a sequence before each of its tokens."""
    return rows_to_tokens(_packed_logits(model, batch, device).flatten(), batch.cu_seqlens.to(device))


def _packed_logits(model: nn.Module, batch: TrainBatch, device: torch.device) -> Tensor:
    """[1, T, V], of a value model [1, T, 1]."""
    return model(
        input_ids=batch.input_ids.to(device).unsqueeze(0),
        position_ids=batch.position_ids.to(device).unsqueeze(0),
        use_cache=False,
        attend=PackedAttend(batch.cu_seqlens.cpu()),
    ).logits


@dataclass(frozen=True)
class DiskTensor:
    """A tensor of the file form: `live[index]` of the live tensor named `live`, index () being all of it."""

    name: str
    live: str
    index: tuple[int | slice, ...]
    shape: tuple[int, ...]


def disk_layout(model: PreTrainedModel) -> list[DiskTensor]:
    """Every tensor of the file form in the model's own order; together they cover each live tensor once."""
    layout, renamed = [], VALUE_HEAD_NAMES if has_value_head(model) else {}
    for live, tensor in model.state_dict().items():
        if live in model.all_tied_weights_keys:
            continue
        stem, _, kind = live.rpartition(".")
        if stem.endswith(".experts") and kind in ("gate_up_proj", "down_proj"):
            layout += _expert_tensors(stem, kind, tuple(tensor.shape), model.config.model_type)
        else:
            layout.append(DiskTensor(renamed.get(live, live), live, (), tuple(tensor.shape)))
    return layout


def _expert_tensors(stem: str, kind: str, shape: tuple[int, ...], family: str) -> Iterable[DiskTensor]:
    if family not in FUSED_EXPERT_FAMILIES:
        raise ValueError(
            f"got fused experts {stem}.{kind} of model_type {family!r}; expected one of {FUSED_EXPERT_FAMILIES}, "
            "whose file form is known; choose another model"
        )
    count, rows, columns = shape
    for e in range(count):
        if kind == "down_proj":
            yield DiskTensor(f"{stem}.{e}.down_proj.weight", f"{stem}.{kind}", (e,), (rows, columns))
        else:
            half = rows // 2
            for part, cut in (("gate_proj", slice(0, half)), ("up_proj", slice(half, rows))):
                yield DiskTensor(f"{stem}.{e}.{part}.weight", f"{stem}.{kind}", (e, cut), (half, columns))


def has_value_head(model: PreTrainedModel) -> bool:
    return isinstance(model.get_output_embeddings(), ValueHead)


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Tied tensor -> the tensor it must equal; a file may hold the former or leave it out."""
    return dict(model.all_tied_weights_keys)


def is_ignorable(model: PreTrainedModel, name: str) -> bool:
    """True for names a file may hold although the model has no place for them: rotary caches, layers that predict
    further tokens, indexers of layers that use another one's choice, the vocabulary's head beside a value head."""
    if has_value_head(model) and name == "lm_head.weight":
        return True
    match = re.match(r"model\.layers\.(\d+)\.(self_attn\.indexer\.)?", name)
    if match:
        layer, config = int(match[1]), model.config.to_dict()
        first_extra = config["num_hidden_layers"]
        if first_extra <= layer < first_extra + (config.get("num_nextn_predict_layers") or 0):
            return True
        if match[2] and layer < first_extra and config.get("indexer_types", ["full"] * first_extra)[layer] == "shared":
            return True
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return name.endswith("rotary_emb.inv_freq") or any(re.search(pattern, name) for pattern in patterns)


def check_names(model: PreTrainedModel, layout: list[DiskTensor], given: Collection[str], source: str) -> None:
    """ValueError with every missing and unknown name, unless `given` is exactly the file form of `model`."""
    expected = {tensor.name for tensor in layout}
    extra = set(given) - expected - set(tied_names(model))
    left_out = {name for name in extra if is_ignorable(model, name)}
    report_names(sorted(expected - set(given)), [], sorted(extra - left_out), source)
    if left_out:
        logger.info("%s: %d tensors have no place in this model and are left out", source, len(left_out))


def report_names(missing: list[str], doubled: list[str], unknown: list[str], source: str) -> None:
    """Raise one ValueError that lists everything wrong with a set of weight names; silent if nothing is."""
    if missing or doubled or unknown:
        raise ValueError(
            f"got weights from {source} with missing {missing}, doubled {doubled} and unknown {unknown} names; "
            "expected every tensor of the model exactly once; "
            "check that weights and config.json (and override_config) belong to the same model"
        )
