"""What the adapter asks of vLLM-Ascend, on stand-ins that write down the calls. UNTESTED ON NPU: these tests hold the
order of calls and the environment, not what a device does with them."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from engines import build_rollout_engine
from engines.base import Prompt, SamplingParams
from engines.hf_model import read_config
from engines.rollout.vllm import build
from engines.rollout.vllm.latent import check_derived
from engines.rollout.vllm.platform import platform_of
from engines.spec import ModelSpec, RolloutEngineSpec, VllmSpec
from engines.transport import Address
from engines.weight_sync import WeightSource
from tests.tiny import write_tiny_model

PROMPTS = [Prompt("a", (5, 6, 7))]
SAMPLING = SamplingParams(n=2, max_new_tokens=2)
SOURCE = WeightSource(Address("shm", "127.0.0.1", 1, b"key"), 5.0, "replica 0", "npu")


class FakeLlm:
    """LLMEngine as the adapter sees it: every call is written down, every request ends in its first step."""

    calls: list[tuple] = []
    routes: torch.Tensor | None = None
    error: Exception | None = None

    @classmethod
    def from_engine_args(cls, arguments: dict) -> FakeLlm:
        self = cls()
        self.arguments, self.waiting = arguments, []
        config = read_config(ModelSpec(arguments["model"]))
        self.model_config = SimpleNamespace(
            hf_config=config, dtype=f"torch.{arguments['dtype']}", max_model_len=arguments["max_model_len"]
        )
        self.engine_core = SimpleNamespace(shutdown=lambda: self.calls.append(("shutdown",)))
        return self

    def add_request(self, name: str, prompt: dict, sampling: dict) -> str:
        self.waiting.append((name, prompt["prompt_token_ids"]))
        return f"{name}-inside"

    def step(self) -> list:
        done, self.waiting = self.waiting, []
        answer = SimpleNamespace(
            token_ids=[4, 5],
            logprobs=[{4: SimpleNamespace(logprob=-1.0)}, {5: SimpleNamespace(logprob=-2.0)}],
            finish_reason="length",
            routed_experts=None if self.routes is None else self.routes.numpy(),
        )
        return [SimpleNamespace(request_id=name, finished=True, outputs=[answer]) for name, _ in done]

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        self.calls.append((method,))
        return [[self.error] if self.error else []]

    def reset_prefix_cache(self) -> bool:
        self.calls.append(("reset_prefix_cache",))
        return True

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))

    def abort_request(self, names: list[str]) -> None:
        self.calls.append(("abort", len(names)))


@pytest.fixture
def fake_vllm(monkeypatch):
    """vllm's modules, as far as engine.py imports them."""
    parts = {
        "vllm": dict(EngineArgs=dict, RequestOutput=object, SamplingParams=dict),
        "vllm.sampling_params": dict(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final")),
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.llm_engine": dict(LLMEngine=FakeLlm),
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "engines.rollout.vllm.engine", raising=False)
    monkeypatch.setattr(build, "find_spec", lambda name: True)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(FakeLlm, "calls", [])
    yield FakeLlm
    sys.modules.pop("engines.rollout.vllm.engine", None)  # it holds on to the stand-ins


def spec(folder, kind: str = "qwen3", **changes) -> RolloutEngineSpec:
    model = str(write_tiny_model(folder / kind, kind))
    return replace(RolloutEngineSpec("vllm", "npu", ModelSpec(model), max_model_len=64, timeout_s=77), **changes)


def test_the_environment_is_set_before_the_engine_and_yields_to_the_users(fake_vllm, tmp_path, monkeypatch):
    os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
    build_rollout_engine(spec(tmp_path))
    assert os.environ["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "77"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_an_environment_that_lays_weights_out_as_nz_is_refused(fake_vllm, tmp_path):
    os.environ["VLLM_ASCEND_ENABLE_NZ"] = "1"
    with pytest.raises(ValueError, match=r"got VLLM_ASCEND_ENABLE_NZ=1; expected 0: .* unset it"):
        build_rollout_engine(spec(tmp_path))


def test_engine_arguments_are_those_of_a_device(fake_vllm, tmp_path):
    settings = VllmSpec(gpu_memory_utilization=0.6, cudagraph_capture_sizes=(2, 4), sleep_level=1)
    engine = build_rollout_engine(spec(tmp_path, vllm=settings, engine_kwargs={"additional_config": {"x": 1}}))
    got = engine._engine.arguments
    assert got["enable_sleep_mode"] is True and got["gpu_memory_utilization"] == 0.6
    assert got["compilation_config"] == {"cudagraph_capture_sizes": [2, 4]} and got["enforce_eager"] is False
    assert got["load_format"] == "dummy" and got["logprobs_mode"] == "processed_logprobs"
    assert got["additional_config"] == {"x": 1} and "kv_cache_memory_bytes" not in got


@pytest.mark.parametrize("level", [1, 2])
def test_a_cycle_wakes_weights_updates_drops_prefixes_and_only_then_wakes_the_cache(fake_vllm, tmp_path, level):
    engine = build_rollout_engine(spec(tmp_path, vllm=VllmSpec(sleep_level=level)))
    engine.fetch_weights(SOURCE, 1)
    assert len(list(engine.generate(PROMPTS, SAMPLING))) == 2
    fake_vllm.calls.clear()
    engine.sleep()
    engine.sleep()  # once is enough
    engine.wake("weights")
    engine.fetch_weights(SOURCE, 2)
    engine.wake("cache")
    samples = list(engine.generate(PROMPTS, SAMPLING))
    assert fake_vllm.calls == [
        ("sleep", level),
        ("wake_up", "weights"),
        ("fetch_weights",),
        ("reset_prefix_cache",),
        ("wake_up", "kv_cache"),
    ]
    assert [(s.log_probs, s.weight_version) for s in samples] == [([-1.0, -2.0], 2)] * 2


def test_generation_is_refused_in_every_state_but_awake_and_complete(fake_vllm, tmp_path):
    engine = build_rollout_engine(spec(tmp_path))

    def is_refused(reason: str) -> None:
        with pytest.raises(RuntimeError, match=reason):
            engine.generate(PROMPTS, SAMPLING)

    is_refused("holds no complete set of weights")
    engine.fetch_weights(SOURCE, 1)
    engine.sleep()
    is_refused("is asleep")
    with pytest.raises(RuntimeError, match="weights are asleep"):
        engine.fetch_weights(SOURCE, 2)
    engine.wake("weights")
    is_refused("is asleep")
    engine.wake("cache")
    assert len(list(engine.generate(PROMPTS, SAMPLING))) == 2  # level 1 kept the weights
    fake_vllm.error = ValueError("a tensor is missing")
    with pytest.raises(ValueError, match="a tensor is missing"):
        engine.fetch_weights(SOURCE, 3)
    is_refused("holds no complete set of weights")
    fake_vllm.error = None
    engine.fetch_weights(SOURCE, 4)
    assert len(list(engine.generate(PROMPTS, SAMPLING))) == 2


def test_sleep_level_2_leaves_nothing_to_generate_with(fake_vllm, tmp_path):
    engine = build_rollout_engine(spec(tmp_path, vllm=VllmSpec(sleep_level=2)))
    engine.fetch_weights(SOURCE, 1)
    engine.sleep()
    fake_vllm.calls.clear()
    engine.wake()
    assert fake_vllm.calls == [("wake_up", "weights"), ("wake_up", "kv_cache")]
    with pytest.raises(RuntimeError, match="holds no complete set of weights"):
        engine.generate(PROMPTS, SAMPLING)


def test_sleep_stops_what_still_runs(fake_vllm, tmp_path):
    engine = build_rollout_engine(spec(tmp_path))
    engine.fetch_weights(SOURCE, 1)
    started = engine.generate(PROMPTS, SAMPLING)
    next(started)
    fake_vllm.calls.clear()
    engine.sleep()
    assert fake_vllm.calls == [("abort", 1), ("sleep", 1)]
    with pytest.raises(RuntimeError, match="put to sleep"):
        next(started)


def test_routes_come_from_vllm_itself_and_no_worker_is_asked(fake_vllm, tmp_path, monkeypatch):
    engine = build_rollout_engine(spec(tmp_path, "qwen3_moe", return_routes=True))
    assert engine._engine.arguments["enable_return_routed_experts"] is True
    assert engine._engine.arguments["enable_prefix_caching"] is False
    engine.fetch_weights(SOURCE, 1)
    monkeypatch.setattr(fake_vllm, "routes", torch.arange(24, dtype=torch.uint8).view(4, 3, 2))
    first = next(engine.generate(PROMPTS, SAMPLING))
    assert first.routes.dtype == torch.int16 and torch.equal(first.routes.long(), torch.arange(24).view(4, 3, 2))
    monkeypatch.setattr(fake_vllm, "routes", None)
    assert [s.routes for s in engine.generate(PROMPTS, SAMPLING)] == [None, None]
    assert ("take_routes",) not in fake_vllm.calls


class Latent(nn.Module):
    """A sparse layer of vLLM-Ascend after loading: kv_b_proj is gone, what was made of it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(6, 2 * (3 + 4), bias=False)  # 2 heads, keys of 3, values of 4, latent 6
        self.kv_b_proj.tp_rank = 0

    def derive(self, weight: torch.Tensor) -> None:
        heads_NBL = weight.detach().view(2, 7, 6)
        self.W_UK_T, self.W_UV = heads_NBL[:, :3].clone(), heads_NBL[:, 3:].transpose(1, 2).clone()

    def dispose(self) -> None:
        self.kv_b_proj.weight.data = torch.empty(0, dtype=self.kv_b_proj.weight.dtype)


def test_a_disposed_parameter_gets_its_memory_back_before_an_update(monkeypatch):
    model = nn.ModuleDict({"attn": Latent()}).to(torch.bfloat16)
    recorded = {id(m): {n: p.data.to("meta") for n, p in m.named_parameters(recurse=False)} for m in model.modules()}
    reload = ModuleType("vllm.model_executor.model_loader.reload.layerwise")
    reload.get_layerwise_info = lambda module: SimpleNamespace(restore_metadata=(recorded[id(module)], {}))
    for name in (reload.__name__.rsplit(".", count)[0] for count in range(1, 5)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, reload.__name__, reload)
    model["attn"].dispose()
    platform = platform_of("npu")
    platform.before_update(model)
    weight = model["attn"].kv_b_proj.weight
    assert weight.shape == (14, 6) and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    weight.data.fill_(3.0)
    platform.before_update(model)
    assert bool((weight == 3).all()), "memory that is there must stay"


def test_derived_weights_that_are_not_those_of_kv_b_proj_stop_the_run():
    name, own = "model.layers.3.self_attn.kv_b_proj.weight", nn.Module()
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleDict({"3": nn.ModuleDict({"self_attn": own})})})})
    own.attn = Latent()
    sent = torch.randn(14, 6)
    own.attn.derive(sent)
    own.attn.dispose()
    check_derived(model, {name: sent, "model.embed_tokens.weight": torch.zeros(3, 2)})
    for row, tensor in ((2, "W_UK_T"), (13, "W_UV")):
        other = sent.clone()
        other[row, 4] += 0.25
        with pytest.raises(ValueError, match=rf"got {tensor} that differs from the {name} just sent by up to 0.25"):
            check_derived(model, {name: other})
    own.attn.kv_b_proj.tp_rank = 1  # the second rank holds the other half of four heads
    check_derived(model, {name: torch.cat([torch.randn(14, 6), sent])})
    with pytest.raises(ValueError, match="got W_UK_T that differs"):
        check_derived(model, {name: torch.cat([sent, torch.randn(14, 6)])})
