"""The loss that trains an indexer, against its definition written out over whole matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from engines.megatron.context_parallel import cut
from engines.megatron.layers.dsa import loss as indexer_loss
from engines.megatron.layers.rotary import rotate
from tests.engines import latent_bench as bench
from tests.ranks import run_ranks

LENGTHS, TOKENS, COEFF = [13, 3, 8], 24, 0.5
HF = bench.hf_config("glm_moe_dsa")
HEADS, PLAIN, ROPE, LATENT = HF.num_attention_heads, HF.qk_nope_head_dim, HF.qk_rope_head_dim, HF.kv_lora_rank
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn"])


@dataclass
class Trained:
    """One forward and backward pass with a trainable indexer: the loss of all ranks, and gradients."""

    attention: nn.Module
    value: float
    input_grad: Tensor
    gradients: dict[str, Tensor]

    @property
    def indexer_gradients(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.gradients.items() if ".indexer." in name}


def _input_and_gradient() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(TOKENS, HF.hidden_size, generator=generator), torch.randn(
        TOKENS, HF.hidden_size, generator=generator
    )


def _train(absorb: bool = False, **changes: object) -> Trained:
    hidden_TX, grad_TX = _input_and_gradient()
    config = bench.megatron_config(HF, absorb, loss_coeff=COEFF, **changes)
    attention = bench.megatron_attention(config, source=bench.hf_attention(HF))
    part = cut(LENGTHS, config.tensor_model_parallel_size, torch.device("cpu"))
    sequences = bench.packed(part.lengths)
    indexer_loss.set_token_weights(sequences, part.local(torch.full((TOKENS,), 1 / TOKENS)))
    own_t1X = bench.share(hidden_TX, part, config).requires_grad_()
    out, _ = attention(own_t1X, None, packed_seq_params=sequences)
    out.backward(bench.share(grad_TX, part, config))
    value = indexer_loss.value(sequences)
    if config.context_parallel_size > 1:
        dist.all_reduce(value)
    return Trained(attention, float(value), own_t1X.grad, bench.finish_gradients(attention))


def _definition(attention: nn.Module, x_SX: Tensor) -> Tensor:
    """KL per query of one sequence, [S], from the layer's weights; gradient reaches the indexer's only."""
    weight = {name: value if ".indexer." in name else value.detach() for name, value in attention.named_parameters()}
    index = {name.rpartition("indexer.")[2]: value for name, value in weight.items()}
    length = len(x_SX)
    angles = torch.arange(length)[:, None] * HF.rope_parameters["rope_theta"] ** (-torch.arange(0, ROPE, 2) / ROPE)

    def turn(x: Tensor) -> Tensor:
        return rotate(x, (angles.cos(), angles.sin()), interleaved=True)

    latent = x_SX @ weight["linear_q_down_proj.weight"].T
    latent = functional.rms_norm(latent, latent.shape[-1:], weight["q_layernorm.weight"], 1e-6)
    query = (latent @ weight["linear_q_up_proj.weight"].T).view(length, HEADS, PLAIN + ROPE)
    key_latent, key_rope = (x_SX @ weight["linear_kv_down_proj.weight"].T).split([LATENT, ROPE], -1)
    key_latent = functional.rms_norm(key_latent, (LATENT,), weight["kv_layernorm.weight"], 1e-6)
    key = (key_latent @ weight["linear_kv_up_proj.weight"].T).view(length, HEADS, -1)[..., :PLAIN]
    logits = torch.einsum("qhd,khd->hqk", query[..., :PLAIN], key)
    logits += torch.einsum("qhd,kd->hqk", turn(query[..., PLAIN:]), turn(key_rope[:, None])[:, 0])

    index_query = (latent @ index["linear_wq_b.weight"].T).view(length, 16, 20)
    index_key = x_SX @ index["linear_wk.weight"].T
    index_key = functional.layer_norm(index_key, (20,), index["k_norm.weight"], index["k_norm.bias"], 1e-6)[:, None]
    index_query, index_key = (torch.cat([turn(x[..., :ROPE]), x[..., ROPE:]], -1) for x in (index_query, index_key))
    products = torch.einsum("qid,kd->qik", index_query, index_key[:, 0]) / math.sqrt(20)
    head_weights = x_SX @ index["linear_weights_proj.weight"].T / math.sqrt(16)
    scores = torch.einsum("qi,qik->qk", head_weights, products.relu())

    causal = torch.ones(length, length).tril().bool()
    best = scores.masked_fill(~causal, -1e30).topk(min(HF.index_topk, length)).indices
    keep = torch.zeros(length, length, dtype=torch.bool).scatter(1, best, True) & causal
    p = (logits / math.sqrt(PLAIN + ROPE)).masked_fill(~keep, -1e30).softmax(-1).mean(0)
    log_q = scores.masked_fill(~keep, -1e30).log_softmax(-1)
    return torch.where(keep, p * (p.clamp(min=1e-30).log() - log_q), 0.0).sum(-1)


def _assert_close(own: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert own.keys() == expected.keys()
    for name, value in own.items():
        assert (value - expected[name]).abs().max() <= 2e-5 * expected[name].abs().max(), name


def _alone() -> Trained:
    trained = _train()
    reference = torch.cat([_definition(trained.attention, x) for x in _input_and_gradient()[0].split(LENGTHS)]).mean()
    assert float(reference) > 0.01
    assert trained.value == pytest.approx(float(reference), rel=1e-5)
    own = {name: value for name, value in trained.attention.named_parameters() if ".indexer." in name}
    expected = torch.autograd.grad(COEFF * reference, list(own.values()))
    _assert_close(trained.indexer_gradients, dict(zip(own, expected, strict=True)))
    _nothing_else_learns(trained)
    for again in (_train(absorb=True), _train(absorb=True, **SELECTIVE), _train(**SELECTIVE)):
        assert again.value == pytest.approx(trained.value, rel=1e-5)
        _assert_close(again.indexer_gradients, trained.indexer_gradients)
    return trained


def _nothing_else_learns(trained: Trained) -> None:
    """Everything but the indexer has, bit for bit, the gradients of a layer whose indexer is frozen."""
    frozen = bench.megatron_attention(bench.megatron_config(HF), source=bench.hf_attention(HF))
    assert not any(value.requires_grad for name, value in frozen.named_parameters() if ".indexer." in name)
    hidden_TX, grad_TX = _input_and_gradient()
    own_T1X = hidden_TX.unsqueeze(1).requires_grad_()
    frozen(own_T1X, None, packed_seq_params=bench.packed(LENGTHS))[0].backward(grad_TX.unsqueeze(1))
    assert torch.equal(own_T1X.grad, trained.input_grad)
    for name, gradient in bench.finish_gradients(frozen).items():
        assert torch.equal(gradient, trained.gradients[name]), name


def _needs_token_weights() -> None:
    attention = bench.megatron_attention(bench.megatron_config(HF, loss_coeff=COEFF), source=bench.hf_attention(HF))
    hidden_t1X = _input_and_gradient()[0].unsqueeze(1)
    with torch.no_grad():  # scoring does without
        attention(hidden_t1X, None, packed_seq_params=bench.packed(LENGTHS))
    with pytest.raises(AssertionError, match="call set_token_weights before the forward pass"):
        attention(hidden_t1X, None, packed_seq_params=bench.packed(LENGTHS))


def _ranks(rank: int, world: int) -> None:
    bench.initialise()
    alone = _alone()
    _needs_token_weights()
    bench.initialise(tp=2)
    shared = [_train(absorb, tp=2, sp=sp) for absorb in (False, True) for sp in (True, False)]
    bench.initialise(cp=2)
    shared += [_train(absorb, cp=2) for absorb in (False, True)]
    for trained in shared:
        assert trained.value == pytest.approx(alone.value, rel=1e-5)
        _assert_close(trained.indexer_gradients, alone.indexer_gradients)


@pytest.mark.gloo
def test_an_indexer_learns_the_attention_and_disturbs_nothing_alone_and_on_two_ranks():
    run_ranks(_ranks, 2, timeout=300)
