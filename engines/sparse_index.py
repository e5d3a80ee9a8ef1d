"""DeepSeek sparse attention (arXiv 2512.02556) of transformers models, on packed and on cached tokens.

An indexer in each layer scores all earlier tokens, and a query attends to the best `index_topk` of them only. Some
layers have none and reuse the choice of the layer before (arXiv 2603.12201). transformers' indexers know padded
batches only. Here the `attend` object that a model's forward is given runs them: it knows where sequences begin,
or which keys are cached. The index maths stay transformers' own.

Shape legend: b rows of a padded or decoding batch, S tokens of one sequence, T packed tokens, N keys, K chosen keys,
M hidden size, L size of the query's latent, R rotary size, D index head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

SPARSE_FAMILIES = ("deepseek_v32", "glm_moe_dsa")
# Earlier releases rotate these families' heads the wrong way, or lack the ReLU of the index score.
FIRST_RIGHT_VERSION = (5, 13)


@dataclass(frozen=True)
class IndexInputs:
    """What one layer's indexer sees: hidden_bSM, latent_bSL (the query's), and (cos, sin) of [b, S, R] each."""

    hidden_bSM: Tensor
    latent_bSL: Tensor
    rotary: tuple[Tensor, Tensor]

    def cut(self, tokens: slice) -> IndexInputs:
        cos_bSR, sin_bSR = self.rotary
        return IndexInputs(
            self.hidden_bSM[:, tokens], self.latent_bSL[:, tokens], (cos_bSR[:, tokens], sin_bSR[:, tokens])
        )


@dataclass(frozen=True)
class Indexer:
    """The indexer of layer number `layer`, which chooses `topk` keys; `forward` is that of transformers' module."""

    layer: int
    topk: int
    forward: Callable[..., Tensor]

    def choose(self, inputs: IndexInputs, mask_bSN: Tensor, store: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """[b, S, min(topk, N)] int32, the keys with the best scores; ties and masked keys as they come.

        mask_bSN  float, 0 or -inf, added to the scores
        store     is given the index keys [b, S, D] of these tokens and returns all [b, N, D]; None: these are all
        """
        cache = None if store is None else _IndexKeys(store)
        return self.forward(inputs.hidden_bSM, inputs.latent_bSL, inputs.rotary, mask_bSN, None, cache)


@dataclass(frozen=True)
class _IndexKeys:
    """The one method of a transformers cache that an indexer calls."""

    store: Callable[[Tensor], Tensor]

    def update_indexer(self, keys_bSD: Tensor, layer: int) -> Tensor:
        return self.store(keys_bSD)


def choose_packed(
    indexer: Indexer, inputs: IndexInputs, cu_seqlens: Tensor, store: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """[1, T, K] positions, inside its own sequence, of the keys each token attends to.

    One sequence at a time: scores are S x S for each index head. Those of a sequence of at most `topk` tokens are
    computed only when somebody stores its keys: it chooses all tokens, some more than once if K is larger.
    """
    chosen, device = [], inputs.hidden_bSM.device
    for start, end in pairwise(cu_seqlens.tolist()):
        S = end - start  # tokens of this sequence
        if indexer.topk >= S and store is None:
            chosen.append(torch.arange(S, dtype=torch.int32, device=device).expand(1, S, S))
        elif S > 0:
            future_1SS = torch.full((1, S, S), float("-inf"), device=device).triu_(1)
            chosen.append(indexer.choose(inputs.cut(slice(start, end)), future_1SS, store))
    width = max(keys_1SK.shape[-1] for keys_1SK in chosen)
    return torch.cat([pad(keys_1SK, (0, width - keys_1SK.shape[-1])) for keys_1SK in chosen], dim=1)


def hand_over_indexers(model: nn.Module) -> None:
    """Let the `attend` of a forward run the model's indexers, by `attend.choose(Indexer, IndexInputs)`, and freeze
    them: transformers computes them without gradient, and weight decay alone must not move them."""
    for name, module in list(model.named_modules()):
        if name.endswith(".self_attn.indexer"):
            attention = model.get_submodule(name.removesuffix(".indexer"))
            attention.register_forward_pre_hook(_pass_attend_as_mask, with_kwargs=True)
            module.forward = _forward(Indexer(attention.layer_idx, module.index_topk, module.forward))
            module.requires_grad_(False)


class _AttendAsMask:
    """`attend`, where transformers hands a mask to the indexer: the only argument that reaches both."""

    def __init__(self, attend: Any) -> None:
        self.attend = attend

    def __getitem__(self, _: Any) -> _AttendAsMask:
        """transformers drops the head dimension of a mask on the way."""
        return self


def _pass_attend_as_mask(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, kwargs | {"attention_mask": _AttendAsMask(kwargs["attend"])}


def _forward(indexer: Indexer) -> Callable[..., Tensor]:
    def forward(hidden_bSM: Tensor, latent_bSL: Tensor, rotary: tuple, mask: _AttendAsMask, *_: Any, **__: Any):
        return mask.attend.choose(indexer, IndexInputs(hidden_bSM, latent_bSL, rotary))

    return forward


def check_version(model_type: str) -> None:
    """ValueError for a sparse family on a transformers release that computes it wrongly or lacks it."""
    installed = version("transformers")
    if model_type in SPARSE_FAMILIES and tuple(map(int, installed.split(".")[:2])) < FIRST_RIGHT_VERSION:
        needed = ".".join(map(str, FIRST_RIGHT_VERSION))
        raise ValueError(
            f"got a {model_type} model and transformers {installed}, whose sparse attention differs "
            f"from the released models'; expected transformers {needed} or newer; upgrade transformers, or train "
            "with model_engine=megatron and another rollout engine"
        )
