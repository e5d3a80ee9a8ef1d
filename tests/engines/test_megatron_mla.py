"""Latent attention against transformers' modules: plain and absorbed, dense and sparse, over parallel layouts."""

import pytest
import torch

from engines.megatron.context_parallel import cut, own_pieces
from engines.megatron.layers.mla import mla_attention_spec
from tests.engines import latent_bench as bench
from tests.ranks import run_ranks

LENGTHS = [13, 3, 8]


def _compare(kind: str, layout: dict, rope: str = "rope", absorb: bool = False, lengths=LENGTHS, **changes) -> None:
    """Outputs within 5e-6, gradients of the input and of every parameter within 2e-5 of their largest entry, and
    the same keys chosen for every query."""
    hf = bench.hf_config(kind, rope, **changes)
    source = bench.hf_attention(hf)
    generator = torch.Generator().manual_seed(5)
    hidden_TX, grad_TX = (torch.randn(sum(lengths), hf.hidden_size, generator=generator) for _ in range(2))
    hidden_TX.requires_grad_()
    outputs, choices = zip(*(bench.hf_forward(source, part) for part in hidden_TX.split(lengths)), strict=True)
    torch.cat(outputs).backward(grad_TX)

    config = bench.megatron_config(hf, absorb, **layout)
    attention = bench.megatron_attention(config, source=source)
    part = cut(lengths, config.tensor_model_parallel_size, torch.device("cpu"))
    seen = [] if kind == "deepseek_v3" else bench.record_choices(attention)
    own_t1X = bench.share(hidden_TX, part, config).requires_grad_()
    out_t1X, bias = attention(own_t1X, None, packed_seq_params=bench.packed(part.lengths))
    out_t1X.backward(bench.share(grad_TX, part, config))

    name = (kind, layout, rope, absorb, lengths)
    assert bias is None
    real = bench.share(torch.ones_like(hidden_TX), part, config)[..., :1]  # padded queries see padding
    expected = bench.share(torch.cat(outputs), part, config)
    assert ((out_t1X - expected) * real).abs().max() <= 5e-6, name
    expected = bench.share(hidden_TX.grad, part, config)
    assert ((own_t1X.grad - expected) * real).abs().max() <= 2e-5 * hidden_TX.grad.abs().max(), name
    _same_gradients(attention, source, config, name)
    if max(lengths) > 4 and kind != "deepseek_v3":
        _same_choices(seen[0], choices, part, lengths)


def _same_gradients(attention, source, config, name) -> None:
    gradients = {key: value.grad for key, value in source.named_parameters() if value.grad is not None}
    expected, own = bench.converted(gradients, config), bench.finish_gradients(attention)
    assert own.keys() == expected.keys(), name
    for key, value in own.items():
        difference = (value - bench.shard(expected[key], value)).abs().max()
        assert difference <= 2e-5 * expected[key].abs().max(), (name, key)


def _same_choices(choice, expected, part, lengths) -> None:
    compared = 0
    for piece, chosen in zip(own_pieces(bench.packed(part.lengths).cu_seqlens_q), choice, strict=True):
        if chosen is None:
            assert part.lengths[piece.sequence] <= 4
            continue
        sets = bench.key_sets(chosen, piece.start)
        theirs = bench.key_sets(expected[piece.sequence], 0)
        for position in range(piece.start, min(piece.stop, lengths[piece.sequence])):
            assert sets[position - piece.start] == theirs[position], (piece, position)
            compared += 1
    assert compared


def _ranks(rank: int, world: int) -> None:
    bench.initialise()
    for absorb in (False, True):
        for rope in bench.ROPES:
            _compare("deepseek_v3", {}, rope, absorb)
        _compare("deepseek_v3", {}, absorb=absorb, q_lora_rank=None)
        for kind in bench.KINDS:
            _compare(kind, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, absorb=absorb)
        for kind in ("deepseek_v32", "glm_moe_dsa"):
            _compare(kind, {}, absorb=absorb)
            _compare(kind, {}, "yarn", absorb, lengths=[24])
            _compare(kind, {}, absorb=absorb, lengths=[4, 3, 1])  # no longer than top-k: dense
    bench.initialise(tp=2)
    for absorb in (False, True):
        for kind in bench.KINDS:
            _compare(kind, {"tp": 2}, absorb=absorb)
            _compare(kind, {"tp": 2, "sp": False}, absorb=absorb)
        _compare("deepseek_v3", {"tp": 2}, absorb=absorb, q_lora_rank=None)
    bench.initialise(cp=2)
    for absorb in (False, True):
        for kind in bench.KINDS:
            _compare(kind, {"cp": 2}, absorb=absorb)


@pytest.mark.gloo
def test_layers_equal_transformers_alone_and_on_two_tensor_or_context_parallel_ranks():
    run_ranks(_ranks, 2, timeout=300)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(tp=4), "q_lora_rank=38 with TP 4; expected a multiple; lower tensor_model"),
        (dict(recompute_granularity="selective", recompute_modules=["mla_up_proj"]), "mla_up_proj .* set recompute_gr"),
    ],
)
def test_what_cannot_be_built_is_refused(changes, message):
    hf = bench.hf_config("deepseek_v3", q_lora_rank=38, kv_lora_rank=24)
    with pytest.raises(ValueError, match=message):
        mla_attention_spec(bench.megatron_config(hf, **changes))


def test_sparse_attention_needs_a_query_latent():
    config = bench.megatron_config(bench.hf_config("deepseek_v32"))
    config.q_lora_rank = None
    with pytest.raises(ValueError, match="q_lora_rank=null; expected a query latent, which the indexer reads; correct"):
        mla_attention_spec(config)
