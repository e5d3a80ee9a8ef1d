"""The FSDP2 engine on one rank against plain transformers and AdamW, in fp32."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from engines import build_train_engine
from engines.base import ForwardOptions
from engines.batch import Denominators, PolicyOutput, TrainBatch
from engines.fsdp import weights
from engines.fsdp.shard import owned_rows
from engines.metric import Metric, Metrics
from engines.spec import FsdpSpec, LrSchedule, ModelSpec, OptimSpec, TrainEngineSpec
from tests.tiny import KINDS, write_tiny_model

TEMPERATURE = 0.7
ENTROPY_COEFFICIENT = 0.01
# Lengths 1, 9, 3, 6: a sequence without prediction, long beside short.
SEQUENCES = [[7], [5, 6, 7, 8, 9, 3, 3, 4, 99], [10, 11, 12], [129, 21, 22, 23, 1, 2]]
SCHEDULE = LrSchedule(lr=2e-3, style="linear", warmup_steps=2, total_steps=8, warmup_init=5e-4)
# AdamW divides by sqrt(v) + eps: with a tiny eps it would blow rounding of near-zero gradients up to lr.
OPTIM = OptimSpec(schedule=SCHEDULE, weight_decay=0.1, eps=1e-6, clip_grad=1.0)
ONE_BY_ONE = ForwardOptions(temperature=TEMPERATURE, micro_batch_size=1, entropy=True, entropy_grad=True)


def make_spec(path: Path, optim: OptimSpec | None = OPTIM, model: dict | None = None, **backend) -> TrainEngineSpec:
    backend = FsdpSpec(**{"param_dtype": "float32", **backend})
    return TrainEngineSpec("fsdp", "cpu", ModelSpec(str(path), **(model or {})), backend, optim)


def loaded_engine(path: Path, **changes):
    engine = build_train_engine(make_spec(path, **changes))
    engine.load(path)
    return engine


def make_batch(rows: list[int], sequences: list[list[int]] = SEQUENCES) -> TrainBatch:
    """The given sequences; the advantage of token t of sequence b is hand-made and signed."""
    return TrainBatch.pack(
        [sequences[b] for b in rows],
        loss_mask=[[float(t > 0) for t in range(len(sequences[b]))] for b in rows],
        advantages=[[(b + 1) * 0.5 - 0.4 * t for t in range(len(sequences[b]))] for b in rows],
    )


DENOMINATORS = Denominators(tokens=float(sum(len(s) - 1 for s in SEQUENCES)), sequences=float(len(SEQUENCES)))


def policy_loss(output: PolicyOutput, batch: TrainBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
    gain_T = batch.tokens["advantages"] * output.log_probs
    if output.entropy is not None:
        gain_T = gain_T + ENTROPY_COEFFICIENT * output.entropy
    loss = -(gain_T * batch.tokens["loss_mask"]).sum() / denominators.tokens
    return loss, {"loss": Metric("partial", float(loss.detach()))}


class Reference:
    """Plain transformers, one sequence at a time, torch's own clipping and AdamW."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": OPTIM.weight_decay},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, betas=OPTIM.betas, eps=OPTIM.eps)

    def score(self) -> tuple[Tensor, Tensor]:
        """Packed log-probs and entropies of SEQUENCES."""
        log_probs, entropies = [], []
        for sequence in SEQUENCES:
            logits = self.model(torch.tensor([sequence])).logits[0] / TEMPERATURE
            log_p = logits.log_softmax(-1)
            first = torch.zeros(1)
            log_probs += [first, log_p[:-1].gather(-1, torch.tensor(sequence[1:], dtype=torch.int64)[:, None])[:, 0]]
            entropies += [first, -(log_p.exp() * log_p).sum(-1)[:-1]]
        return torch.cat(log_probs), torch.cat(entropies)

    def update(self, step: int) -> tuple[float, float]:
        """(loss, gradient norm before clipping)"""
        loss, _ = policy_loss(PolicyOutput(*self.score()), make_batch([0, 1, 2, 3]), DENOMINATORS)
        self.adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.clip_grad)
        for group in self.adamw.param_groups:
            group["lr"] = SCHEDULE.at(step)
        self.adamw.step()
        return float(loss.detach()), float(norm)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {kind: write_tiny_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_entropy_equal_plain_transformers(models, kind):
    engine = loaded_engine(models[kind], optim=None)
    with torch.no_grad():
        log_probs_T, entropy_T = Reference(models[kind]).score()
    for cut in ({"micro_batch_size": 1}, {"micro_batch_size": 4}, {"max_tokens": 9}):
        output = engine.log_probs(make_batch([0, 1, 2, 3]), ForwardOptions(TEMPERATURE, entropy=True, **cut))
        torch.testing.assert_close(output.log_probs, log_probs_T, rtol=0, atol=1e-5)
        torch.testing.assert_close(output.entropy, entropy_T, rtol=0, atol=1e-5)
    assert engine.log_probs(make_batch([0, 1, 2, 3]), ForwardOptions(micro_batch_size=2)).entropy is None


@pytest.mark.parametrize("kind", ["llama", "qwen3_tied"])
def test_five_updates_equal_plain_transformers_with_adamw(models, kind):
    engine, reference = loaded_engine(models[kind]), Reference(models[kind])
    for step in range(5):
        metrics = engine.update(make_batch([0, 1, 2, 3]), policy_loss, DENOMINATORS, ONE_BY_ONE, step)
        loss, norm = reference.update(step)
        assert metrics["loss"].value == pytest.approx(loss, rel=1e-5)
        assert metrics["actor/grad_norm"].value == pytest.approx(norm, rel=1e-5)
        assert norm > OPTIM.clip_grad, "this test must exercise clipping"
        assert metrics["actor/lr"].value == SCHEDULE.at(step)
        assert metrics["actor/nonfinite_grad_steps"].value == 0
    expected = reference.model.state_dict()
    for name, tensor in engine.hf_weights():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(
    "cut",
    [{"micro_batch_size": 2}, {"micro_batch_size": 4}, {"max_tokens": 9}, {"max_tokens": 100}],
    ids=["by two", "at once", "by tokens", "by many tokens"],
)
def test_gradient_does_not_depend_on_micro_batches(models, cut):
    before = one_update(models["qwen3"], ONE_BY_ONE)
    options = ForwardOptions(TEMPERATURE, entropy=True, entropy_grad=True, **cut)
    assert_same_update(one_update(models["qwen3"], options), before)


@pytest.mark.parametrize(
    "changes",
    [{"model": {"gradient_checkpointing": True}}, {"reshard_after_forward": False}],
    ids=["recompute", "zero2"],
)
def test_memory_options_do_not_change_the_update(models, changes):
    assert_same_update(one_update(models["llama"], ONE_BY_ONE, **changes), one_update(models["llama"], ONE_BY_ONE))


def one_update(path: Path, options: ForwardOptions, **changes) -> tuple[float, dict[str, Tensor]]:
    engine = loaded_engine(path, **changes)
    metrics = engine.update(make_batch([0, 1, 2, 3]), policy_loss, DENOMINATORS, options, 3)
    return metrics["actor/grad_norm"].value, {name: tensor.clone() for name, tensor in engine.hf_weights()}


def assert_same_update(got: tuple[float, dict], expected: tuple[float, dict]) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    for name, tensor in got[1].items():
        torch.testing.assert_close(tensor, expected[1][name], rtol=1e-4, atol=1e-5)


def test_packed_sequences_do_not_see_each_other(models):
    engine = loaded_engine(models["qwen3"], optim=None)
    options = ForwardOptions(micro_batch_size=4)
    changed = [*SEQUENCES[:2], [50, 60, 70], SEQUENCES[3]]
    before = make_batch([0, 1, 2, 3]).rows(engine.log_probs(make_batch([0, 1, 2, 3]), options).log_probs)
    after = make_batch([0, 1, 2, 3]).rows(engine.log_probs(make_batch([0, 1, 2, 3], changed), options).log_probs)
    for b in (0, 1, 3):
        torch.testing.assert_close(after[b], before[b], rtol=0, atol=1e-6)
    assert (after[2] - before[2]).abs().max() > 0.1


def test_entropy_carries_gradient_only_when_asked(models):
    engine = loaded_engine(models["llama"])
    seen = []

    def loss(output, batch, denominators):
        seen.append(output.entropy.requires_grad)
        return policy_loss(output, batch, denominators)

    for grad in (False, True):
        options = ForwardOptions(micro_batch_size=4, entropy=True, entropy_grad=grad)
        engine.update(make_batch([0, 1]), loss, DENOMINATORS, options, 0)
    assert seen == [False, True]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nonfinite_step_changes_nothing_and_is_counted(models, where):
    engine = loaded_engine(models["llama"])
    engine.update(make_batch([0, 1, 2, 3]), policy_loss, DENOMINATORS, ONE_BY_ONE, 0)
    before = {name: tensor.clone() for name, tensor in engine.hf_weights()}
    state = engine.optimizer.adamw.state_dict()["state"]
    moments = {i: s["exp_avg"].clone() for i, s in state.items()}

    def broken(output, batch, denominators):
        loss, metrics = policy_loss(output, batch, denominators)
        if where == "loss":
            return loss + torch.inf, metrics  # the gradient stays finite
        output.log_probs.register_hook(lambda grad: grad * torch.nan)
        return loss, metrics

    metrics = engine.update(make_batch([0, 1, 2, 3]), broken, DENOMINATORS, ONE_BY_ONE, 1)
    assert metrics["actor/nonfinite_grad_steps"].value == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.hf_weights())
    assert all(torch.equal(s["exp_avg"], moments[i]) for i, s in engine.optimizer.adamw.state_dict()["state"].items())
    metrics = engine.update(make_batch([0, 1, 2, 3]), policy_loss, DENOMINATORS, ONE_BY_ONE, 2)
    assert metrics["actor/nonfinite_grad_steps"].value == 0 and metrics["actor/grad_norm"].value > 0


@pytest.mark.parametrize("kind", KINDS)
def test_export_equals_the_file_and_leaves_out_the_tied_head(models, kind, monkeypatch):
    monkeypatch.setattr(weights, "BUCKET_BYTES", 40_000)  # several buckets, and tensors larger than one
    engine = loaded_engine(models[kind], optim=None)
    exported = {name: tensor.clone() for name, tensor in engine.hf_weights()}
    source = load_file(models[kind] / "model.safetensors")
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], source[name]) for name in source)
    assert ("lm_head.weight" in exported) == (not kind.endswith("tied"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_one_place_in_the_optimizer(models, kind):
    engine = loaded_engine(models[kind])
    sizes = [p.numel() for group in engine.optimizer.adamw.param_groups for p in group["params"]]
    assert sum(sizes) == sum(t.numel() for t in load_file(models[kind] / "model.safetensors").values())


def test_scoring_leaves_no_stale_weights_behind(models, tmp_path):
    """Gathered copies from a forward pass must not outlive it: the next load and export use the shards."""
    other = write_tiny_model(tmp_path, "llama", seed=5)
    engine = loaded_engine(models["llama"], optim=None, param_dtype="bfloat16")
    engine.log_probs(make_batch([1]), ONE_BY_ONE)
    source = load_file(models["llama"] / "model.safetensors")
    assert all(torch.equal(tensor, source[name].bfloat16()) for name, tensor in engine.hf_weights())
    engine.load(other)
    expected = loaded_engine(other, optim=None, param_dtype="bfloat16").log_probs(make_batch([1]), ONE_BY_ONE)
    assert torch.equal(engine.log_probs(make_batch([1]), ONE_BY_ONE).log_probs, expected.log_probs)


def test_export_is_in_the_compute_dtype(models):
    engine = loaded_engine(models["llama"], param_dtype="bfloat16")
    source = load_file(models["llama"] / "model.safetensors")
    assert all(torch.equal(tensor, source[name].bfloat16()) for name, tensor in engine.hf_weights())


def write_tiny_moe(folder: Path, experts: int) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=130, hidden_size=48, intermediate_size=56, moe_intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=experts, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_fused_experts_travel_one_by_one(tmp_path):
    engine = loaded_engine(write_tiny_moe(tmp_path, experts=3))
    source = load_file(tmp_path / "model.safetensors")
    exported = {name: tensor.clone() for name, tensor in engine.hf_weights()}
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in source and exported.keys() == source.keys()
    assert all(torch.equal(exported[name], source[name]) for name in source)
    with torch.no_grad():
        expected, _ = Reference(tmp_path).score()
    output = engine.log_probs(make_batch([0, 1, 2, 3]), ONE_BY_ONE)
    torch.testing.assert_close(output.log_probs, expected, rtol=0, atol=1e-5)


def test_restored_engine_continues_bit_identically(models, tmp_path):
    straight = loaded_engine(models["qwen2"])
    resumed = loaded_engine(models["qwen2"])
    for step in range(2):
        straight.update(make_batch([0, 1, 2, 3]), policy_loss, DENOMINATORS, ONE_BY_ONE, step)
    straight.save(tmp_path)
    drawn = torch.rand(3)
    resumed.restore(tmp_path)
    assert torch.equal(torch.rand(3), drawn)
    for engine in (straight, resumed):
        engine.update(make_batch([0, 1, 2, 3]), policy_loss, DENOMINATORS, ONE_BY_ONE, 2)
    for (name, a), (_, b) in zip(straight.hf_weights(), resumed.hf_weights(), strict=True):
        assert torch.equal(a, b), name


def test_restore_refuses_another_layout(models, tmp_path):
    loaded_engine(models["llama"]).save(tmp_path)
    with pytest.raises(ValueError, match=r"'optimizer': True.*expected.*'optimizer': False"):
        build_train_engine(make_spec(models["llama"], optim=None)).restore(tmp_path)
    (tmp_path / "fsdp_rank00000_of_00001.pt").rename(tmp_path / "fsdp_rank00000_of_00002.pt")
    with pytest.raises(ValueError, match=r"shards found: .*of_00002.*number of ranks"):
        build_train_engine(make_spec(models["llama"])).restore(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
def test_load_lists_every_wrong_name(models, kind, tmp_path):
    source = load_file(models[kind] / "model.safetensors")
    gone = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    write_copy(models[kind], tmp_path, {n: t for n, t in source.items() if n not in gone} | {"stray": torch.ones(2)})
    with pytest.raises(ValueError, match=rf"missing \['{gone[0]}', '{gone[1]}'\].*unknown \['stray'\]"):
        loaded_engine(tmp_path)


def test_load_checks_shapes_before_writing(models, tmp_path):
    source = load_file(models["llama"] / "model.safetensors")
    write_copy(models["llama"], tmp_path, source | {"model.norm.weight": torch.ones(81)})
    with pytest.raises(ValueError, match=r"model.norm.weight.*\(81,\), expected \(80,\)"):
        loaded_engine(tmp_path)


def test_tied_head_in_the_file_must_equal_the_embedding(models, tmp_path):
    source = load_file(models["llama_tied"] / "model.safetensors")
    head = source["model.embed_tokens.weight"].clone()
    write_copy(models["llama_tied"], tmp_path, source | {"lm_head.weight": head})
    loaded_engine(tmp_path)
    head[3, 4] += 1
    write_copy(models["llama_tied"], tmp_path, source | {"lm_head.weight": head})
    with pytest.raises(ValueError, match=r"lm_head.weight different from model.embed_tokens.weight"):
        loaded_engine(tmp_path)


def write_copy(source: Path, target: Path, tensors: dict[str, Tensor]) -> None:
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def test_override_config_is_applied_and_unknown_keys_are_refused(models):
    spec = make_spec(models["llama"], model={"override_config": {"rms_norm_eps": 1e-3}})
    assert build_train_engine(spec).model.model.norm.variance_epsilon == 1e-3
    with pytest.raises(ValueError, match=r"rms_norm_epss.*nearest names.*rms_norm_eps'"):
        build_train_engine(replace(spec, model=replace(spec.model, override_config={"rms_norm_epss": 1e-3})))


def test_attention_features_that_packing_lacks_are_refused(models, tmp_path):
    config = json.loads((models["qwen2"] / "config.json").read_text())
    write_copy(models["qwen2"], tmp_path, load_file(models["qwen2"] / "model.safetensors"))
    windowed = config | {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(windowed))
    with pytest.raises(ValueError, match="sliding_window"):
        loaded_engine(tmp_path, optim=None).log_probs(make_batch([1]), ONE_BY_ONE)


def test_unusable_settings_are_refused(models):
    with pytest.raises(ValueError, match=r"float16.*loss scaling"):
        build_train_engine(make_spec(models["llama"], param_dtype="float16"))
    with pytest.raises(ValueError, match="fsdp_size=3 on 1 ranks"):
        build_train_engine(make_spec(models["llama"], fsdp_size=3))


def test_owned_rows_are_those_of_torch_chunk():
    assert [owned_rows(5, rank, 4) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    for rows in range(1, 12):
        chunks = torch.arange(rows).chunk(4)
        for rank in range(4):
            expected = chunks[rank].tolist() if rank < len(chunks) else []
            assert list(range(*owned_rows(rows, rank, 4))) == expected
