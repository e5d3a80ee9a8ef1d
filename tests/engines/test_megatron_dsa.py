"""The indexer's parts with numbers worked out by hand, attention over chosen keys, and shared choices."""

import math

import pytest
import torch
from megatron.core import tensor_parallel

from engines.attention import packed_attention
from engines.batch import cumulative
from engines.megatron.context_parallel import Piece
from engines.megatron.layers.dsa import choice as choices
from engines.megatron.layers.dsa.attention import sparse_attention
from engines.megatron.layers.dsa.choice import chosen_mask, index_scores, top_keys
from engines.megatron.layers.dsa.indexer import KeyNorm
from engines.megatron.layers.mla import mla_attention_spec
from engines.megatron.layers.rotary import rotate
from tests.engines import latent_bench as bench
from tests.ranks import run_ranks

GLM52_FULL = {0, 1, 2, *range(6, 78, 4)}


def test_score_is_the_weighted_sum_of_rectified_products():
    # Two heads of size 4: products / 2 are (1, -1) and (3, 2) for the two keys; the negative one counts as 0.
    query_nID = torch.tensor([[[1.0, 0, 0, 0], [0, 1.0, 0, 0]]])
    key_SD = torch.tensor([[2.0, 6, 0, 0], [-2.0, 4, 0, 0]])
    assert index_scores(query_nID, key_SD, torch.tensor([[10.0, -1]])).tolist() == [[10 - 3, 0 - 2]]


def test_a_later_key_takes_no_place_and_early_queries_keep_all():
    # One head of size 1: scores are the keys themselves. Key 3 is the best, but only query 3 may see it.
    key_SD = torch.tensor([[1.0], [3.0], [2.0], [9.0]])
    chosen = top_keys(torch.ones(4, 1, 1), key_SD, torch.ones(4, 1), start=0, topk=2)
    assert bench.key_sets(chosen, 0) == [{0}, {0, 1}, {1, 2}, {1, 3}]
    tail = top_keys(torch.ones(2, 1, 1), key_SD, torch.ones(2, 1), start=2, topk=2)  # the last two queries alone
    assert bench.key_sets(tail, 2) == [{1, 2}, {1, 3}]
    assert chosen_mask(tail, 2, 4).tolist() == [[False, True, True, False], [False, True, False, True]]
    assert top_keys(torch.ones(4, 1, 1), key_SD, torch.ones(4, 1), start=0, topk=4) is None


def test_both_pairings_turn_the_same_pairs():
    x = torch.arange(6.0).view(1, 1, 6)
    angles = torch.tensor([[0.1, 0.7, 2.0]])
    rotary = angles.cos(), angles.sin()
    expected = [(a + 1j * b) * complex(math.cos(t), math.sin(t)) for a, b, t in [(0, 1, 0.1), (2, 3, 0.7), (4, 5, 2)]]
    neighbours = rotate(x, rotary, interleaved=True)[0, 0].tolist()
    assert neighbours == pytest.approx([z.real for z in expected] + [z.imag for z in expected])
    halves = rotate(x[..., [0, 2, 4, 1, 3, 5]], rotary, interleaved=False)[0, 0].tolist()
    assert halves == neighbours


def test_key_norm_computes_in_float32_under_bfloat16():
    config = bench.megatron_config(bench.hf_config("deepseek_v32"), params_dtype=torch.bfloat16, bf16=True)
    norm, generator = KeyNorm(config, 20, eps=1e-6), torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
        norm.bias.normal_(generator=generator)
    x = torch.randn(50, 20, generator=generator).bfloat16()
    wide = (x.double() - x.double().mean(-1, keepdim=True)) / (x.double().var(-1, False, keepdim=True) + 1e-6).sqrt()
    expected = wide * norm.weight.double() + norm.bias.double()
    assert torch.equal(norm(x), expected.bfloat16())


def _attention_input(lengths, heads=4):
    generator = torch.Generator().manual_seed(1)
    shapes = (heads, 20), (1, 20), (1, 12)
    parts = [torch.randn(sum(lengths), *shape, generator=generator).requires_grad_() for shape in shapes]
    return parts, [Piece(number, 0, length) for number, length in enumerate(lengths)]


def test_attention_over_chosen_keys_equals_softmax_over_them():
    lengths, topk, scale = [13, 3, 9], 4, 0.3
    (q, k, v), pieces = _attention_input(lengths)
    picks = [torch.stack([torch.randperm(n)[:topk] for _ in range(n)]).int() if n > topk else None for n in lengths]
    for chosen in picks:  # a query always sees at least one key
        if chosen is not None:
            chosen[:, 0] = torch.arange(len(chosen))
    out = sparse_attention(q, k, v, cumulative(lengths), pieces, picks, scale)
    offset = 0
    for length, chosen in zip(lengths, picks, strict=True):
        for t in range(length):
            keys = range(t + 1) if chosen is None else sorted({s for s in chosen[t].tolist() if s <= t})
            rows = [offset + s for s in keys]
            weights = (scale * q[offset + t] @ k[rows, 0].T).softmax(-1)
            torch.testing.assert_close(out[offset + t], weights @ v[rows, 0], atol=1e-6, rtol=1e-5)
        offset += length


def test_chunks_change_neither_choice_nor_attention(monkeypatch):
    lengths, scale = [24, 3, 17], 0.3
    (q, k, v), pieces = _attention_input(lengths)
    generator = torch.Generator().manual_seed(2)
    index = [torch.randn(n, 16, 20, generator=generator) for n in lengths]
    keys = [torch.randn(n, 20, generator=generator) for n in lengths]
    weights = [torch.randn(n, 16, generator=generator) for n in lengths]

    def run():
        picks = [top_keys(*parts, start=0, topk=4) for parts in zip(index, keys, weights, strict=True)]
        out = sparse_attention(q, k, v, cumulative(lengths), pieces, picks, scale)
        return picks, out, torch.autograd.grad(out.square().sum(), (q, k, v))

    picks, out, gradients = run()
    monkeypatch.setattr(choices, "CHUNK_NUMBERS", 16 * 24 * 5)  # five queries of the longest sequence at a time
    assert [rows.stop - rows.start for rows in choices.chunks(24, 16 * 24)] == [5, 5, 5, 5, 4]
    cut_picks, cut_out, cut_gradients = run()
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(picks, cut_picks, strict=True))
    torch.testing.assert_close(cut_out, out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(cut_gradients, gradients, atol=1e-5, rtol=1e-5)


def test_sequences_within_topk_are_dense_attention_exactly():
    lengths = [4, 2, 3]
    (q, k, v), pieces = _attention_input(lengths)
    out = sparse_attention(q, k, v, cumulative(lengths), pieces, [None] * 3, 0.3)
    torch.testing.assert_close(out, packed_attention(q, k, v, cumulative(lengths), 0.3), atol=1e-6, rtol=1e-6)


def _glm52(**changes):
    hf = bench.hf_config("glm_moe_dsa", num_hidden_layers=78, indexer_types=None, index_topk_freq=4)
    hf.indexer_types = ["full" if layer in GLM52_FULL else "shared" for layer in range(78)]
    return bench.megatron_config(hf, num_layers=78, pipeline_dtype=torch.float32, **changes)


def _layout(*sizes):
    stages = [["decoder"] * size for size in sizes]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return dict(pipeline_model_parallel_size=len(sizes), pipeline_model_parallel_layout=stages)


def test_stages_start_on_layers_with_an_indexer():
    mla_attention_spec(_glm52())
    mla_attention_spec(_glm52(**_layout(18, 20, 20, 20)))
    with pytest.raises(ValueError, match=r"start on layers \[0, 20, 40, 59\] .* \[20, 40, 59\] have no .* change over"):
        mla_attention_spec(_glm52(**_layout(20, 20, 19, 19)))
    uneven = dict(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=38)
    mla_attention_spec(_glm52(**uneven))
    with pytest.raises(ValueError, match=r"start on layers \[0, 39\] .* \[39\] have no"):
        mla_attention_spec(_glm52(pipeline_model_parallel_size=2))


def _shared(rank: int, world: int) -> None:
    """Layers full, shared, full; two micro-batches whose passes interleave, each layer recomputed on its own."""
    bench.initialise()
    hf = bench.hf_config("glm_moe_dsa", indexer_types=["full", "shared", "full"])
    config = bench.megatron_config(hf)
    sources = [bench.hf_attention(hf, layer, seed=layer) for layer in range(3)]
    layers = [bench.megatron_attention(config, layer, source) for layer, source in enumerate(sources)]
    own = [{name for name, _ in layer.named_parameters() if ".indexer." in name} for layer in layers]
    assert [len(names) for names in own] == [5, 0, 5]
    batches = [([13, 8], bench.packed([13, 8])) for _ in range(2)]  # of one shape: a mix-up has no other sign
    hidden = [torch.randn(sum(lengths), hf.hidden_size) for lengths, _ in batches]

    expected = []
    for x_TX, (lengths, _) in zip(hidden, batches, strict=True):
        parts = []
        for out in x_TX.split(lengths):
            chosen = None
            for layer, source in enumerate(sources):
                change, chosen = bench.hf_forward(source, out, chosen if layer == 1 else None)
                out = out + change
            parts.append(out)
        expected.append(torch.cat(parts))
        expected[-1].sum().backward()

    outputs = []
    for x_TX, (_, sequences) in zip(hidden, batches, strict=True):
        out = x_TX.unsqueeze(1).requires_grad_()
        for layer in layers:

            def run(x, layer=layer, sequences=sequences):
                return x + layer(x, None, packed_seq_params=sequences)[0]

            out = tensor_parallel.checkpoint(run, False, out)
        outputs.append(out)
    for out, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(out.squeeze(1), theirs, atol=1e-5, rtol=1e-5)
        out.sum().backward()
    for layer, source in zip(layers, sources, strict=True):
        gradients = {name: value.grad for name, value in source.named_parameters() if value.grad is not None}
        theirs, mine = bench.converted(gradients, config), bench.finish_gradients(layer)
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert (value - theirs[name]).abs().max() <= 2e-5 * theirs[name].abs().max(), name


@pytest.mark.gloo
def test_a_shared_layer_uses_its_own_micro_batchs_choice_also_when_recomputed():
    run_ranks(_shared, 1, timeout=300)
