"""Value models: both engines compute what transformers' token classifiers do, learn alike in every layout, and come
back from disk as they were."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from bridge import HfCheckpoint
from engines import build_train_engine
from engines.base import ForwardOptions
from engines.batch import Denominators, TrainBatch
from engines.export import export_hf
from engines.megatron.megatron_bridge import choose_bridge
from engines.megatron.model.hf_config import read_hf_config
from engines.metric import Metric, merge
from engines.spec import FsdpSpec, LrSchedule, MegatronSpec, ModelSpec, OptimSpec, TrainEngineSpec
from engines.value_head import INIT_STD
from tests.ranks import run_ranks
from tests.tiny import MOE_KINDS, write_tiny_model

KINDS = ("qwen3", "llama_tied")
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
OPTIM = OptimSpec(LrSchedule(2e-3), weight_decay=0.1, clip_grad=1.0)
BACKENDS = {
    "fsdp": FsdpSpec(param_dtype="float32"),
    "megatron": MegatronSpec(dtype="float32"),
    "tp2": MegatronSpec(dtype="float32", tensor_model_parallel_size=2),
    "tp2 no sp": MegatronSpec(dtype="float32", tensor_model_parallel_size=2, sequence_parallel=False),
    "pp2": MegatronSpec(dtype="float32", pipeline_model_parallel_size=2, override_transformer_config=UNEVEN),
    "cp2": MegatronSpec(dtype="float32", context_parallel_size=2),
    "bf16": MegatronSpec(dtype="bfloat16"),
}
SEED = 7
BY_TWO, BUDGET = ForwardOptions(micro_batch_size=2), ForwardOptions(max_tokens=40)
# On two ranks, by model: layout and how the batch is cut; and (model, layout) that read the straight run's export.
LAYOUTS = (
    [("fsdp", BUDGET), ("tp2", BY_TWO), ("pp2", BUDGET), ("tp2 no sp", BUDGET), ("cp2", BY_TWO), ("megatron", BY_TWO)],
    [("tp2", BUDGET), ("pp2", BY_TWO)],
)
AGAIN = ((0, "tp2"), (1, "fsdp"))


def _batch() -> TrainBatch:
    """Five sequences of very different lengths, one of a single token, with returns to learn."""
    generator = torch.Generator().manual_seed(3)
    batch = TrainBatch.pack([torch.randint(3, 130, (n,), generator=generator).tolist() for n in (19, 1, 33, 11, 6)])
    later = batch.position_ids > 0
    batch.tokens["loss_mask"] = ((torch.rand(batch.num_tokens, generator=generator) < 0.7) & later).float()
    batch.tokens["returns"] = torch.randn(batch.num_tokens, generator=generator)
    return batch


def _loss(output, batch, denominators):
    error_T = (output.values - batch.tokens["returns"]) * batch.tokens["loss_mask"]
    loss = 0.5 * error_T.square().sum() / denominators.tokens
    return loss, {"loss": Metric("partial", loss.item())}


def _build(folder: str, name: str, load: bool = True):
    kind = "fsdp" if name == "fsdp" else "megatron"
    model = ModelSpec(folder, head="value")
    spec = TrainEngineSpec(kind, "cpu", model, BACKENDS[name], OPTIM, seed=SEED, timeout_s=60, role="critic")
    engine = build_train_engine(spec)
    if load:
        engine.load(folder)
    return engine


def _update(engine, step: int, options: ForwardOptions = BY_TWO) -> dict:
    batch = _batch()
    denominators = Denominators(float(batch.tokens["loss_mask"].sum()), 5.0)
    share = batch.select(range(5)[engine.dp_rank :: engine.dp_size])
    metrics = engine.update(share, _loss, denominators, options, step)
    return metrics if engine.is_output_rank else {}


def _values(engine, options: ForwardOptions) -> torch.Tensor | None:
    """The whole batch on every data-parallel rank; None on ranks that do not answer."""
    values_T = engine.values(_batch(), options)
    return values_T if engine.is_output_rank else None


def _trajectory(folder: str, name: str, options: ForwardOptions, out: Path | None = None) -> dict:
    """Values before and after one and three updates, the updates' metrics, and (with `out`) an export."""
    engine = _build(folder, name)
    values, metrics = [_values(engine, options)], []
    for step in range(3):
        metrics.append(_update(engine, step, options))
        if step != 1:
            values.append(_values(engine, options))
    if out is not None:
        export_hf(engine, out, Path(folder), {}, head="value")
    engine.close()
    return {"values": values, "metrics": metrics}


def _loaded(folder: str, name: str, out: Path | None = None) -> torch.Tensor | None:
    """Values of a critic as it was read; with `out` it is also exported."""
    engine = _build(folder, name)
    values_T = _values(engine, BUDGET)
    if out is not None:
        export_hf(engine, out, Path(folder), {}, head="value")
    engine.close()
    return values_T


def _resumed(folder: str, name: str, directory: Path) -> tuple:
    """Straight: two updates. Resumed: one, saved, and one after restoring into an engine that never loaded."""
    directory.mkdir(exist_ok=True, parents=True)
    engine = _build(folder, name)
    _update(engine, 0)
    engine.save(directory)
    straight = _update(engine, 1), _values(engine, BY_TWO)
    engine.close()
    engine = _build(folder, name, load=False)
    engine.restore(directory)
    resumed = _update(engine, 1), _values(engine, BY_TWO)
    engine.close()
    return straight, resumed


def _first_head(folder: str, name: str) -> dict:
    engine = _build(folder, name)
    found = {key: value.clone() for key, value in engine.hf_weights() if "score" in key or "head" in key}
    engine.close()
    return found


def _one_rank(rank: int, world: int, lms: list[str], classifiers: list[str], out: str) -> dict:
    return {
        "loaded": [[_loaded(folder, name) for name in ("fsdp", "megatron")] for folder in classifiers],
        "straight": [_trajectory(folder, "fsdp", BY_TWO, Path(out) / Path(folder).name) for folder in lms],
        "megatron": [_trajectory(folder, "megatron", BUDGET) for folder in lms],
    }


def _two_ranks(rank: int, world: int, lms: list[str], trained: list[str], out: str) -> dict:
    """`trained` are the exports of the straight run."""
    return {
        "runs": {(i, case): _trajectory(lms[i], *case) for i, cases in enumerate(LAYOUTS) for case in cases},
        "heads": [_first_head(lms[1], name) for name in ("fsdp", "tp2", "pp2")],
        "again": [_loaded(trained[i], name, Path(out) / name / str(i)) for i, name in AGAIN],
        "resumed": {name: _resumed(lms[1], name, Path(out) / f"{name} checkpoint") for name in ("fsdp", "tp2", "pp2")},
    }


def _classifier(folder: Path, kind: str) -> Path:
    """The tiny language model as transformers' token classifier with one label, saved by transformers."""
    source = write_tiny_model(folder / "lm", kind)
    model = AutoModelForTokenClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    torch.nn.init.constant_(model.score.bias, 0.25)
    model.save_pretrained(folder / "critic")
    return folder / "critic"


def _reference(folder: Path) -> torch.Tensor:
    """[T]: transformers' score of the token before, sequence by sequence; 0 at first tokens."""
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        for ids in _batch().rows(_batch().input_ids):
            rows.append(torch.cat([torch.zeros(1), model(ids[None]).logits[0, :-1, 0]]))
    return torch.cat(rows)


@pytest.fixture(scope="module")
def lms(tmp_path_factory) -> list[str]:
    return [str(write_tiny_model(tmp_path_factory.mktemp("lm") / kind, kind)) for kind in KINDS]


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory) -> list[Path]:
    return [_classifier(tmp_path_factory.mktemp(kind), kind) for kind in KINDS]


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def trained(exports) -> list[Path]:
    """Where the straight run leaves its critics."""
    return [exports / kind for kind in KINDS]


@pytest.fixture(scope="module")
def one(lms, classifiers, exports) -> dict:
    return run_ranks(_one_rank, 1, lms, [str(folder) for folder in classifiers], str(exports))[0]


@pytest.fixture(scope="module")
def two(one, lms, trained, exports) -> list[dict]:
    return run_ranks(_two_ranks, 2, lms, [str(folder) for folder in trained], str(exports), timeout=240)


def _check_same(label: object, straight: dict, ranks: list[dict]) -> None:
    for stage, want_T in enumerate(straight["values"]):
        answers = [rank["values"][stage] for rank in ranks if rank["values"][stage] is not None]
        assert answers, label
        for values_T in answers:
            torch.testing.assert_close(values_T, want_T, atol=2e-5, rtol=1e-4, msg=lambda text: f"{label}: {text}")
    for step, want in enumerate(straight["metrics"]):
        got = merge(rank["metrics"][step] for rank in ranks)
        for name in ("loss", "critic/grad_norm", "critic/lr"):
            assert got[name].value == pytest.approx(want[name].value, rel=1e-4), (label, step, name)


@pytest.mark.gloo
def test_values_are_those_of_transformers(one, classifiers):
    for folder, engines in zip(classifiers, one["loaded"], strict=True):
        expected = _reference(folder)
        assert expected.abs().max() > 0.3 and (expected[[0, 19, 20]] == 0).all()
        for values_T in engines:
            torch.testing.assert_close(values_T, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gloo
def test_both_engines_learn_alike(one):
    for kind, straight, megatron in zip(KINDS, one["straight"], one["megatron"], strict=True):
        before, after_one, after_three = straight["values"]
        assert before.abs().max() > 1e-2, "a head of zeros would hide a wrong alignment"
        assert (after_one - before).abs().max() > 1e-2 and (after_three - after_one).abs().max() > 1e-2
        _check_same(kind, straight, [megatron])


@pytest.mark.gloo
def test_one_trajectory_in_every_layout(one, two):
    for i, cases in enumerate(LAYOUTS):
        for case in cases:
            _check_same((KINDS[i], *case), one["straight"][i], [rank["runs"][i, case] for rank in two])


@pytest.mark.gloo
def test_a_language_model_gets_the_same_first_head_everywhere(two):
    expected = torch.randn(1, 80, generator=torch.Generator().manual_seed(SEED)) * INIT_STD
    for head in two[0]["heads"]:
        assert head.keys() == {"score.weight", "score.bias"}
        assert torch.equal(head["score.weight"], expected) and head["score.bias"].tolist() == [0.0]


@pytest.mark.gloo
def test_a_trained_critic_goes_to_disk_and_comes_back(one, two, trained, exports):
    """transformers reads it with the values it was trained to; a second export is the same to the last bit."""
    for folder, straight in zip(trained, one["straight"], strict=True):
        torch.testing.assert_close(_reference(folder), straight["values"][-1], atol=2e-5, rtol=1e-4)
    for (i, name), values_T in zip(AGAIN, two[0]["again"], strict=True):
        torch.testing.assert_close(values_T, one["straight"][i]["values"][-1], atol=2e-5, rtol=1e-4)
        first, second = HfCheckpoint(trained[i]), HfCheckpoint(exports / name / str(i))
        assert sorted(first.names()) == sorted(second.names()) and "lm_head.weight" not in first.names()
        assert all(torch.equal(first.read(key), second.read(key)) for key in first.names())


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["fsdp", "tp2", "pp2"])
def test_resume_equals_straight(two, name):
    for rank in two:
        (metrics, values_T), (again, values_again_T) = rank["resumed"][name]
        assert metrics == again
        if values_T is not None:
            assert torch.equal(values_T, values_again_T)


def _every_family(rank: int, world: int, folders: list[str]) -> list[list[dict]]:
    return [[_trajectory(folder, name, BY_TWO) for name in ("fsdp", "megatron", "bf16")] for folder in folders]


def test_a_value_model_is_no_policy_and_needs_our_bridge(classifiers):
    with pytest.raises(ValueError, match=r"Qwen3ForTokenClassification.*a value model; expected a causal"):
        read_hf_config(ModelSpec(str(classifiers[0])))
    with pytest.raises(ValueError, match="knows no value head"):
        choose_bridge("megatron_bridge", read_hf_config(ModelSpec(str(classifiers[0]), head="value")))


def _first_step(run: dict) -> dict:
    return {"values": run["values"][:1], "metrics": run["metrics"][:1]}


@pytest.mark.gloo
@pytest.mark.slow
def test_every_family_can_be_a_critic(tmp_path):
    """Also in bfloat16, where values keep the head's float32."""
    kinds = ("qwen2", *MOE_KINDS)
    folders = [str(write_tiny_model(tmp_path / kind, kind)) for kind in kinds]
    for kind, (straight, megatron, bf16) in zip(
        kinds, run_ranks(_every_family, 1, folders, timeout=240)[0], strict=True
    ):
        # Later steps are left out: a rounding error may choose another expert, or another key, for a token.
        _check_same(kind, _first_step(straight), [_first_step(megatron)])
        before_T, wanted_T = bf16["values"][0], straight["values"][0]
        assert before_T.dtype == torch.float32 and not torch.equal(before_T, before_T.bfloat16().float()), kind
        assert (before_T - wanted_T).abs().mean() < 0.25 * wanted_T.abs().mean(), kind
