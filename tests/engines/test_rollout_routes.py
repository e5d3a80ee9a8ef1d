"""Routes of the transformers rollout: they are those of a full forward, and replaying them (R3) brings the training
engines closer to the rollout in bfloat16."""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines import build_rollout_engine, build_train_engine
from engines.base import ForwardOptions, Prompt, Sample, SamplingParams
from engines.batch import TrainBatch
from engines.hf_model import read_config
from engines.hf_routing import forward_recording
from engines.routes import LIVE, RouteShape, align
from engines.spec import FsdpSpec, MegatronSpec, ModelSpec, RolloutEngineSpec, TrainEngineSpec
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

TEMPERATURE = 0.3  # probabilities of a random model are all small at 1
KINDS = {"qwen3_moe": dict(mlp_only_layers=[1]), "deepseek_v3": {}}


def _samples(folder: str, prompts: list[Prompt], sampling: SamplingParams, **spec: object) -> list[Sample]:
    engine = build_rollout_engine(RolloutEngineSpec("hf", "cpu", ModelSpec(folder), **spec))
    engine.load_weights(load_file(f"{folder}/model.safetensors").items(), version=0)
    samples = list(engine.generate(prompts, sampling))
    assert len(samples) == len(prompts) * sampling.n
    return samples


@pytest.mark.parametrize("kind", KINDS)
def test_routes_are_those_of_a_full_forward_whatever_was_decoded_together(tmp_path, kind):
    folder = str(write_tiny_model(tmp_path, kind, **KINDS[kind]))
    lengths = [3, 9, 1, 6, 4]
    prompts = [Prompt(str(i), tuple(range(10 + 7 * i, 10 + 7 * i + length))) for i, length in enumerate(lengths)]
    # Three rows for ten samples: prompts wait, rows are evicted and refilled; 40 tokens end answers at any length.
    sampling = SamplingParams(n=2, max_new_tokens=12, eos_token_ids=tuple(range(40)))
    samples = _samples(folder, prompts, sampling, dtype="float32", max_num_seqs=3, return_routes=True)
    assert len({len(sample.response_ids) for sample in samples}) > 3
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shape = RouteShape.of(model.config.to_dict())
    for sample in samples:
        ids = [*sample.prompt_ids, *sample.response_ids]
        assert sample.routes.shape == (len(ids) - 1, 3, shape.topk) and sample.routes.dtype == torch.int16
        with torch.no_grad():
            _, expected = forward_recording(model, input_ids=torch.tensor([ids]))
        assert torch.equal(sample.routes.sort(-1).values, expected[:-1].sort(-1).values)
        dense = [layer for layer in range(3) if layer not in shape.moe_layers]
        assert dense and bool((sample.routes[:, dense] == LIVE).all())


def test_a_rollout_that_was_not_asked_returns_no_routes(tmp_path):
    folder = str(write_tiny_model(tmp_path, "qwen3_moe"))
    (sample,) = _samples(folder, [Prompt("0", (5, 6, 7))], SamplingParams(max_new_tokens=2))
    assert sample.routes is None


def test_a_dense_model_cannot_return_routes(tmp_path):
    folder = str(write_tiny_model(tmp_path, "qwen3"))
    with pytest.raises(ValueError, match=r"got a dense model \(qwen3\)"):
        build_rollout_engine(RolloutEngineSpec("hf", "cpu", ModelSpec(folder), return_routes=True))


def _largest_gap(engine, batch: TrainBatch, options: ForwardOptions) -> float:
    log_probs_T = engine.log_probs(batch, options).log_probs
    mask_T = batch.tokens["loss_mask"].bool()
    gap_T: Tensor = (log_probs_T.exp() - batch.tokens["rollout"].exp()).abs()
    return float(gap_T[mask_T].max())


def _gaps(rank: int, world: int, folder: str) -> dict[str, tuple[float, float]]:
    """engine -> largest probability difference to the rollout with live routing, and with the rollout's routes."""
    prompts = [Prompt(str(i), tuple(range(10 + i, 18 + i))) for i in range(24)]
    sampling = SamplingParams(n=4, max_new_tokens=16, temperature=TEMPERATURE)
    samples = _samples(folder, prompts, sampling, return_routes=True)
    shape = RouteShape.of(read_config(ModelSpec(folder)).to_dict())
    masks = [[0.0] * len(s.prompt_ids) + [1.0] * len(s.response_ids) for s in samples]
    rollout = [[0.0] * len(s.prompt_ids) + s.log_probs for s in samples]
    batch = TrainBatch.pack([[*s.prompt_ids, *s.response_ids] for s in samples], loss_mask=masks, rollout=rollout)
    lengths = batch.lengths
    batch.tokens["routes"] = torch.cat([align(s.routes, n, shape) for s, n in zip(samples, lengths, strict=True)])
    found = {}
    for name, backend in (("fsdp", FsdpSpec()), ("megatron", MegatronSpec())):
        engine = build_train_engine(TrainEngineSpec(name, "cpu", ModelSpec(folder), backend, None, timeout_s=60))
        engine.load(folder)
        options = dict(max_tokens=512, temperature=TEMPERATURE)
        found[name] = tuple(
            _largest_gap(engine, batch, ForwardOptions(replay_routes=replay, **options)) for replay in (False, True)
        )
        engine.close()
    return found


@pytest.mark.gloo
def test_replayed_routes_shrink_the_gap_between_trainer_and_rollout(tmp_path):
    folder = str(write_tiny_model(tmp_path, "qwen3_moe"))
    for name, (live, replayed) in run_ranks(_gaps, 1, folder)[0].items():
        print(f"{name}: largest probability difference {live:.4f} with live routing, {replayed:.4f} with R3")
        assert replayed < live / 2, (name, live, replayed)
