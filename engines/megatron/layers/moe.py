"""The router of a mixture of experts, choosing and weighing exactly as transformers does.

Megatron-Core's own differs in three places: it ranks a group of experts by its best K // group_topk instead of its
best two, it computes softmax weights from the chosen logits only, and its gating kernel needs TransformerEngine's
names even where that is absent (0.16).

Shape legend: T tokens of this rank, E experts, K experts per token, G groups.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import functional


class Router(TopKRouter):
    """Top-k routing. Weights and the float32 buffer `expert_bias` are Megatron's, and so is route replay."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits [.., E] in float32 if `moe_router_dtype` says so, else in the model's dtype."""
        dtype = torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype
        return functional.linear(input.to(dtype), self.weight.to(dtype))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [.., E] -> (weights [T, E], zero for experts not chosen; choice [T, E] bool)."""
        logits_TE = logits.view(-1, self.config.num_moe_experts)
        if self.score_function == "sigmoid":
            scores_TE = logits_TE.sigmoid()
            ranking_TE = scores_TE + self.expert_bias  # the bias decides who is chosen, not how much it weighs
        else:
            scores_TE = ranking_TE = logits_TE.softmax(-1, dtype=torch.float32)
        chosen_TK = self._choose(ranking_TE.detach())
        weights_TK = self._weigh(scores_TE.gather(1, chosen_TK)).to(logits.dtype)
        weights_TE = torch.zeros_like(logits_TE).scatter(1, chosen_TK, weights_TK)
        return weights_TE, torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, chosen_TK, True)

    def _choose(self, ranking_TE: Tensor) -> Tensor:
        config = self.config
        arguments = (ranking_TE, self.topk, config.moe_router_num_groups, config.moe_router_group_topk)
        if self.router_replay is None:
            return top_experts(*arguments)[1]
        return self.router_replay.get_replay_topk(*arguments, top_experts)[1]

    def _weigh(self, scores_TK: Tensor) -> Tensor:
        if self.score_function == "sigmoid":
            scores_TK = scores_TK / (scores_TK.sum(-1, keepdim=True) + 1e-20)
            return scores_TK * self.config.moe_router_topk_scaling_factor
        if self.config.moe_router_pre_softmax:
            return scores_TK
        return scores_TK / scores_TK.sum(-1, keepdim=True)


def top_experts(
    ranking_TE: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
) -> tuple[Tensor, Tensor]:
    """(values, indices) [T, K] of the best experts, within the best `group_topk` of `num_groups` groups if set.

    A group counts as much as its two best experts together (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    if num_groups is not None:
        grouped_TGM = ranking_TE.unflatten(1, (num_groups, -1))
        best_TG = grouped_TGM.topk(2, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        dropped_TG = torch.ones_like(grouped_TGM[..., 0], dtype=torch.bool).scatter(1, best_TG, False)
        ranking_TE = grouped_TGM.masked_fill(dropped_TG[..., None], float("-inf")).flatten(1)
    return ranking_TE.topk(topk, dim=-1)
