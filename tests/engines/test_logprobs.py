"""Token log-probs and entropy against torch's log_softmax, whole and split over ranks."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engines.batch import cumulative
from engines.logprobs import next_token_labels, rows_to_tokens, sum_pi_squared, token_log_probs
from tests.ranks import run_ranks

T, V, PADDED = 11, 130, 144


def _case(vocab=V):
    """Logits with padded columns that would dominate if they counted, labels at both ends of the shards."""
    generator = torch.Generator().manual_seed(0)
    logits_TV = 3 * torch.randn(T, PADDED, generator=generator)
    logits_TV[:, vocab:] = 50.0
    labels_T = torch.randint(0, vocab, (T,), generator=generator)
    labels_T[:4] = torch.tensor([0, 47, 48, vocab - 1])
    grads_2T = torch.randn(2, T, generator=generator)
    return logits_TV, labels_T, grads_2T


def _reference(temperature, vocab=V):
    logits_TV, labels_T, grads_2T = _case(vocab)
    logits_TV = logits_TV.double().requires_grad_()
    log_p_TV = (logits_TV[:, :vocab] / temperature).log_softmax(-1)
    log_probs_T = log_p_TV.gather(1, labels_T[:, None]).squeeze(1)
    entropy_T = -(log_p_TV.exp() * log_p_TV).sum(-1)
    (log_probs_T * grads_2T[0] + entropy_T * grads_2T[1]).sum().backward()
    return log_probs_T, entropy_T, logits_TV.grad


def test_a_hand_computed_value_at_temperature_one_half():
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    log_probs, entropy = token_log_probs(logits, torch.tensor([0]), temperature=0.5)
    assert log_probs.item() == pytest.approx(-0.142932, abs=1e-6) and entropy is None


def test_entropy_of_equal_logits_is_log_of_the_real_vocabulary():
    _, entropy = token_log_probs(torch.zeros(1, 8), torch.tensor([0]), temperature=1.0, vocab_size=5, entropy=True)
    assert entropy.item() == pytest.approx(math.log(5), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_values_and_gradients_equal_log_softmax(temperature, chunk):
    expected_log_probs, expected_entropy, expected_grad = _reference(temperature)
    logits_TV, labels_T, grads_2T = _case()
    logits_TV.requires_grad_()
    log_probs_T, entropy_T = token_log_probs(
        logits_TV, labels_T, temperature=temperature, vocab_size=V, entropy=True, chunk=chunk
    )
    (log_probs_T * grads_2T[0] + entropy_T * grads_2T[1]).sum().backward()
    torch.testing.assert_close(log_probs_T, expected_log_probs.float(), atol=3e-6, rtol=0)
    torch.testing.assert_close(entropy_T, expected_entropy.float(), atol=3e-6, rtol=0)
    torch.testing.assert_close(logits_TV.grad, expected_grad.float(), atol=1e-6, rtol=1e-5)
    assert not logits_TV.grad[:, V:].any()


def test_gradient_without_entropy_equals_the_log_softmax_gradient():
    logits_TV, labels_T, grads_2T = _case()
    ours, theirs = (logits_TV.clone().requires_grad_() for _ in range(2))
    log_probs_T, _ = token_log_probs(ours, labels_T, temperature=0.7, vocab_size=V)
    (log_probs_T * grads_2T[0]).sum().backward()
    picked_T = (theirs[:, :V] / 0.7).log_softmax(-1).gather(1, labels_T[:, None]).squeeze(1)
    (picked_T * grads_2T[0]).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_bfloat16_logits_are_summed_in_float32():
    logits_TV, labels_T, _ = _case()
    logits_TV = logits_TV.bfloat16()
    log_probs_T, _ = token_log_probs(logits_TV, labels_T, temperature=1.0, vocab_size=V)
    expected = logits_TV[:, :V].double().log_softmax(-1).gather(1, labels_T[:, None]).squeeze(1)
    assert log_probs_T.dtype == torch.float32
    torch.testing.assert_close(log_probs_T, expected.float(), atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    ("logits", "temperature", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.0], 1.0, 0.25),
        ([900.0, 0.0, -900.0], 1.0, 1.0),
        ([math.log(0.5), math.log(0.3), math.log(0.2)], 1.0, 0.38),
        ([math.log(4.0), math.log(1.0)], 2.0, 5 / 9),  # probabilities 2/3 and 1/3
    ],
)
def test_sum_of_squared_probabilities(logits, temperature, expected):
    value_T = sum_pi_squared(torch.tensor([logits]), temperature=temperature)
    assert value_T.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_sum_of_squared_probabilities_without_padding_and_gradient(chunk):
    logits_TV = _case()[0].requires_grad_()
    expected_T = (logits_TV[:, :V].double() / 0.7).softmax(-1).square().sum(-1)
    value_T = sum_pi_squared(logits_TV, temperature=0.7, vocab_size=V, chunk=chunk)
    torch.testing.assert_close(value_T, expected_T.float(), rtol=1e-5, atol=0)
    assert not value_T.requires_grad


def test_labels_and_rows_shift_inside_each_sequence():
    ids, bounds = torch.tensor([7, 8, 9, 5, 6]), cumulative([3, 2])
    assert next_token_labels(ids, bounds).tolist() == [8, 9, 0, 6, 0]
    assert rows_to_tokens(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), bounds).tolist() == [0.0, 1.0, 2.0, 0.0, 4.0]


def _on_rank(rank, world, temperature, vocab):
    logits_TV, labels_T, grads_2T = _case(vocab)
    local_TV = logits_TV.chunk(world, dim=1)[rank].clone().requires_grad_()
    log_probs_T, entropy_T = token_log_probs(
        local_TV, labels_T, temperature=temperature, group=dist.group.WORLD, vocab_size=vocab, entropy=True, chunk=4
    )
    (log_probs_T * grads_2T[0] + entropy_T * grads_2T[1]).sum().backward()
    squares_T = sum_pi_squared(local_TV, temperature=temperature, group=dist.group.WORLD, vocab_size=vocab, chunk=4)
    return log_probs_T.detach(), entropy_T.detach(), squares_T, local_TV.grad


@pytest.mark.gloo
def test_shards_of_the_vocabulary_give_the_whole_value_and_gradient():
    """Three ranks of 48 columns, 90 real ones: one full shard, one partly padding, one nothing but padding."""
    expected_log_probs, expected_entropy, expected_grad = _reference(0.7, vocab=90)
    results = run_ranks(_on_rank, 3, 0.7, 90)
    expected_squares_T = (_case(90)[0][:, :90].double() / 0.7).softmax(-1).square().sum(-1)
    for log_probs_T, entropy_T, squares_T, _ in results:
        torch.testing.assert_close(squares_T, expected_squares_T.float(), rtol=1e-5, atol=0)
        torch.testing.assert_close(log_probs_T, expected_log_probs.float(), atol=3e-6, rtol=0)
        torch.testing.assert_close(entropy_T, expected_entropy.float(), atol=3e-6, rtol=0)
    grad_TV = torch.cat([grad for *_, grad in results], dim=1)
    torch.testing.assert_close(grad_TV, expected_grad.float(), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_no_float32_copy_of_the_logits_is_ever_held():
    """The plain way needs about six times the bf16 logits: the measurement can tell."""
    script = Path(__file__).parents[2] / "benchmarks" / "losses.py"
    command = [sys.executable, str(script), "--tokens", "2048", "--vocabulary", "32768"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["peak"]["plain log-softmax"] > 4
