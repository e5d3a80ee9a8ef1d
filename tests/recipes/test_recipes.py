"""Every recipe as a user would start it, up to the moment it starts: keys, refusals, layout and bytes.

`python3` is replaced by a recorder, so that what a recipe hands to `trainer.main` is what the shell makes of it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bridge.cli.main import main as bridge_main
from engines import check_train_engine
from engines.megatron.mindspeed_flags import config_fields
from engines.megatron.model.config import transformer_config
from engines.megatron.model.hf_config import read_hf_config
from tests.recipes.released import DEEPSEEK_V32, GLM_5, QWEN3_30B_A3B, SMOLLM2_135M, write_config
from tests.tiny import tiny_config
from trainer import wiring
from trainer.build import check_reach
from trainer.config import ConfigErrors, Loaded, load_config

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
ROLLOUT = "actor_rollout_ref.rollout"
REAL = {
    "glm5_dsa_megatron_npu": GLM_5,
    "deepseek_v32_dsa_megatron_npu": DEEPSEEK_V32,
    "qwen3_30b_a3b_megatron_npu": QWEN3_30B_A3B,
    "qwen3_30b_a3b_fsdp_npu": QWEN3_30B_A3B,
}
TINY = {"tiny_qwen3_moe_megatron": "qwen3_moe", "tiny_glm5_dsa_megatron": "glm_moe_dsa"}
# CPU recipes on a dense model.
LEARN = ("tiny_ppo_critic", "tiny_dapo", "tiny_gspo", "tiny_reinforce")
OTHERS = ("quickstart_addition", *LEARN, "tiny_rlvr_mixed")
# What this release refuses in them, in the words of their headers. Building it must shorten this table.
REFUSED = {
    "glm5_dsa_megatron_npu": "data_parallel_size",
    "deepseek_v32_dsa_megatron_npu": "data_parallel_size",
}
# In its place: everything that is not refused is seen through to the end.
INSTEAD = {f"{ROLLOUT}.data_parallel_size": "1", f"{ROLLOUT}.expert_parallel_size": "16"}

GIB = 2**30
DIE = 61.27 * GIB  # what torch reports of the 64 GB of an Atlas A3 die
# Activations, float32 logits, buffers of the collectives and the device context must fit beside the model.
ROOM = 15e9
MEGATRON = [name for name in REAL if "megatron" in name]


def start(name: str, folder: Path, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a recipe whose `python3` writes its last arguments to folder/argv, NUL between them."""
    programs = folder / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    for program in ("python", "python3"):
        (programs / program).write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {shlex.quote(str(folder / 'argv'))}\n")
        (programs / program).chmod(0o755)
    return subprocess.run(
        ["bash", str(RECIPES / f"{name}.sh"), *more],
        env={"PATH": f"{programs}:{os.environ['PATH']}", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def inputs(name: str, folder: Path) -> dict[str, str]:
    """The files a recipe asks for: config.json of its model, and data that may be empty."""
    model = folder / "model"
    if name in TINY:
        config = tiny_config(TINY[name])
        config.architectures = ["Qwen3MoeForCausalLM" if "qwen" in name else "GlmMoeDsaForCausalLM"]
        config.save_pretrained(model)
    else:
        write_config(model, REAL.get(name, SMOLLM2_135M))
    for part in ("train", "val"):
        (folder / f"{part}.jsonl").write_text("{}\n")
    return {
        "MODEL_PATH": str(model),
        "TRAIN_FILE": f"{folder}/train.jsonl",
        "VAL_FILE": f"{folder}/val.jsonl",
        "RUN_DIR": f"{folder}/run",
    }


def arguments(name: str, folder: Path, *more: str) -> list[str]:
    """The command line of `trainer.main`; a CPU recipe, which makes its own inputs, is pointed to ours."""
    paths = inputs(name, folder)
    if name not in REAL:
        own = {
            "actor_rollout_ref.model.path": "MODEL_PATH",
            "data.train_files": "TRAIN_FILE",
            "data.val_files": "VAL_FILE",
        }
        more = (*(f"{key}={paths[variable]}" for key, variable in own.items()), *more)
    done = start(name, folder, *more, **paths, WORK=str(folder / "work"))
    assert done.returncode == 0, done.stderr
    module, entry, *argv = (folder / "argv").read_text().split("\0")[:-1]
    assert (module, entry) == ("-m", "trainer.main")
    return argv


def loaded(name: str, folder: Path) -> Loaded:
    argv = arguments(name, folder)
    if name in REFUSED:
        argv = [f"{key}={INSTEAD.get(key, value)}" for key, _, value in (text.partition("=") for text in argv)]
    return load_config(argv)


def header(name: str) -> dict[str, str]:
    """Heading -> text of the comment at the top; lines without a heading continue the one above."""
    found, heading = {}, "title"
    for line in (RECIPES / f"{name}.sh").read_text().splitlines()[1:]:
        if not line.startswith("#"):
            return found
        if match := re.match(r"# ([A-Z][a-z]+(?: [a-z]+)?): +(.*)", line):
            heading, line = match.groups()
        found[heading] = f"{found.get(heading, '')} {line.lstrip('# ')}".strip()
    raise AssertionError(f"{name} is a comment only")


def test_every_recipe_is_tested_here():
    assert {path.stem for path in RECIPES.glob("*.sh")} == {*REAL, *TINY, *OTHERS}


@pytest.mark.parametrize("name", [*TINY, *OTHERS])
def test_cpu_recipes_load_without_a_word_about_ignored_keys(tmp_path, name):
    found = loaded(name, tmp_path)
    assert found.config.derived.device == "cpu"
    assert not [text for text in found.notices if "no effect" in text or "ignored" in text]


@pytest.mark.parametrize("name", TINY)
def test_tiny_recipes_rehearse_tensor_and_expert_parallelism_with_replay(tmp_path, name):
    config = loaded(name, tmp_path).config
    spec = wiring.actor_spec(config, "cpu", total_steps=3).backend
    assert config.derived.world_size == spec.tensor_model_parallel_size == spec.expert_model_parallel_size == 2
    assert config.model_engine == "megatron" and config.actor_rollout_ref.actor.router_replay.mode == "R3"


@pytest.mark.parametrize("name", REAL)
def test_only_what_is_not_built_is_refused_and_the_header_says_so(tmp_path, name):
    told = header(name)
    assert told["Really run"].startswith("no, untested on NPU")
    if name not in REFUSED:
        assert "Not built" not in told
        load_config(arguments(name, tmp_path))
        return
    with pytest.raises(ConfigErrors) as caught:
        load_config(arguments(name, tmp_path))
    assert [(error.id, error.key) for error in caught.value.errors] == [("not.built", f"{ROLLOUT}.{REFUSED[name]}")]
    assert told["Not built"].startswith(f"rollout.{REFUSED[name]} is refused")


@pytest.mark.parametrize("name", REAL)
def test_the_rest_composes_down_to_the_engines(tmp_path, name):
    found = loaded(name, tmp_path)
    config = found.config
    assert config.derived.device == "npu" and config.trainer.n_gpus_per_node == 16
    assert wiring.rollout_spec(config, "npu").return_routes and wiring.update_options(config).replay_routes
    assert wiring.route_options(config).shape.topk == 8
    spec = wiring.actor_spec(config, "npu", total_steps=4)
    check_train_engine(spec)
    if spec.engine == "megatron":
        hf = read_hf_config(spec.model)
        # These two ask for Transformer Engine, whose place MindSpeed takes on a device.
        own = {"apply_rope_fusion": False, "moe_permute_fusion": False}
        fields = config_fields(hf, spec.backend, "npu") | own
        built = transformer_config(hf, spec.model, replace(spec.backend, override_transformer_config=fields), "npu")
        assert built.recompute_granularity == "full" and built.moe_grouped_gemm and built.bias_activation_fusion
        assert built.experimental_attention_variant == ("dsa" if "dsa" in name else None)
    check_reach(config)
    assert wiring.sync_spec(config, "npu").transport == ("shm" if config.trainer.nnodes == 1 else "broadcast")
    spec = wiring.rollout_spec(config, "npu")
    assert spec.name == "vllm" and spec.vllm.expert_parallel_size == spec.vllm.tensor_parallel_size > 1


@pytest.mark.parametrize("name", REAL)
def test_nothing_in_them_is_without_effect(tmp_path, name):
    for text in loaded(name, tmp_path).notices:
        assert "enable_rollout_routing_replay=True" in text, text


PLAN = re.compile(
    r"# python3 -m bridge (plan .*(?:\\\n# .*)?)\n"
    r"# .*weights ([\d.]+) \+ gradients ([\d.]+) \+ optimizer ([\d.]+) = ([\d.]+) GiB"
)


def planned(name: str, model: Path, world: int) -> tuple[dict, list[float]]:
    """What `bridge plan` reports for the command in a recipe's comment, and the GiB that the comment gives."""
    command, *sizes = PLAN.search((RECIPES / f"{name}.sh").read_text()).groups()
    report = model / "plan.json"
    words = shlex.split(command.replace("\\\n#", ""))
    assert words[-2:] == ["--world", str(world)]
    assert bridge_main([*words, "--hf", str(model), "--json", str(report)]) == 0
    return json.loads(report.read_text()), [float(size) for size in sizes]


@pytest.mark.parametrize("name", MEGATRON)
def test_the_layout_is_planned_and_its_bytes_fit_the_card(tmp_path, name):
    found = loaded(name, tmp_path)
    report, told = planned(name, tmp_path / "model", found.config.derived.world_size)
    spec = wiring.actor_spec(found.config, "npu", total_steps=4).backend
    # The comment plans what the recipe builds.
    assert report["layout"] == {
        "tp": spec.tensor_model_parallel_size,
        "pp": spec.pipeline_model_parallel_size,
        "vpp": 1,
        "ep": spec.expert_model_parallel_size,
        "etp": 1,
    }
    layers = [sum(stop - start for start, stop in stage["layers"]) for stage in report["stages"]]
    first, last = (
        spec.override_transformer_config.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")
    )
    if spec.pipeline_model_parallel_size > 1:
        assert [layers[0], layers[-1]] == [first, last] and len(set(layers[1:-1])) == 1
    # In every stage, and as the comment says in the fullest.
    parts = ("weight_bytes", "gradient_bytes", "optimizer_bytes")
    sums = [sum(stage[part] for part in parts) for stage in report["stages"]]
    assert max(sums) < DIE - ROOM
    fullest = report["stages"][sums.index(max(sums))]
    assert [round(size / GIB, 2) for size in (*(fullest[part] for part in parts), max(sums))] == told


def test_the_fsdp_twin_fits_the_same_node(tmp_path):
    found = loaded("qwen3_30b_a3b_fsdp_npu", tmp_path)
    twin = loaded("qwen3_30b_a3b_megatron_npu", tmp_path)
    ranks = found.config.derived.world_size
    assert ranks == twin.config.derived.world_size == 16
    backend = wiring.actor_spec(found.config, "npu", total_steps=4).backend
    assert backend.model_dtype == "float32" and backend.fsdp_size == -1
    # fp32 weight, gradient and two moments of every parameter, cut evenly; norms are 2e-5 of it
    share = 16 * found.model.parameters / ranks
    comment = (RECIPES / "qwen3_30b_a3b_fsdp_npu.sh").read_text()
    assert float(re.search(r"([\d.]+) GiB of fp32 weights", comment)[1]) == pytest.approx(share / GIB, abs=0.01)
    # The embedding, the head and two decoder layers may be whole in bf16 at the same time.
    layer = (found.model.parameters - 2 * 151936 * 2048) / 48
    assert share + 2 * (2 * 151936 * 2048 + 2 * layer) < DIE - ROOM


def test_the_twins_differ_in_the_engine_only(tmp_path):
    engine = re.compile(
        r"model_engine=|\+?actor_rollout_ref\.actor\.(megatron|fsdp_config)\.|trainer.default_local_dir="
    )
    megatron, fsdp = (
        {text for text in arguments(f"qwen3_30b_a3b_{kind}_npu", tmp_path) if not engine.match(text)}
        for kind in ("megatron", "fsdp")
    )
    assert megatron == fsdp and len(fsdp) > 20


@pytest.mark.parametrize("name", [*REAL, *TINY, "quickstart_addition"])
def test_further_arguments_come_last(tmp_path, name):
    more = ["trainer.total_training_steps=7", "trainer.experiment_name=two words", f"{ROLLOUT}.n=16"]
    argv = arguments(name, tmp_path, *more)
    assert argv[-3:] == more
    if name not in REAL:
        config = load_config(argv).config
        assert config.trainer.total_training_steps == 7 and config.actor_rollout_ref.rollout.n == 16
        assert config.trainer.experiment_name == "two words"


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("missing", ["MODEL_PATH", "TRAIN_FILE", "VAL_FILE", "RUN_DIR"])
def test_a_forgotten_path_is_named_before_anything_starts(tmp_path, name, missing):
    paths = inputs(name, tmp_path)
    del paths[missing]
    done = start(name, tmp_path, **paths)
    assert done.returncode != 0 and f"set {missing} to" in done.stderr
    assert not (tmp_path / "argv").exists()


@pytest.mark.parametrize("name", REAL)
def test_a_folder_without_a_model_is_an_error(tmp_path, name):
    paths = inputs(name, tmp_path) | {"MODEL_PATH": str(tmp_path)}
    done = start(name, tmp_path, **paths)
    assert done.returncode == 2 and "no config.json" in done.stderr and not (tmp_path / "argv").exists()
