"""From the command line to prompts, and --check-data: the report and nothing else."""

import json

import pytest

from tests.runs import overrides, write_inputs
from trainer.config import Config, load_config
from trainer.main import main
from trainer.prompts import DataError, Sources, read_sources
from trainer.reward.spec import KNOWN_DOMAINS

CHATML_USER = "<|im_start|>user"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def configured(inputs, tmp_path, *more: str) -> Config:
    return load_config(overrides(inputs, tmp_path / "run", "fsdp", *more)).config


def read(inputs, tmp_path, *more: str) -> Sources:
    return read_sources(configured(inputs, tmp_path, *more), {}, {"scorers": KNOWN_DOMAINS})


def test_templates_reach_the_prompts(inputs, tmp_path):
    def first(*more: str) -> str:
        sources = read(inputs, tmp_path, "data.shuffle=False", "data.max_prompt_length=200", *more)
        return sources.encoder.render(sources.train.next(1)[0].token_ids)

    assert CHATML_USER in first("data.template=chatml") and "system" not in first("data.template=chatml")
    assert first("data.template=chatml", "data.default_system=Brief").startswith("<|im_start|>system")
    assert CHATML_USER in first("data.template_by_tag={math_rule:chatml}")
    (tmp_path / "own.jinja").write_text("{{ messages[-1].content }}!")
    assert first(f"data.chat_template_path={tmp_path}/own.jinja") == "train 0?!"
    with pytest.raises(ValueError) as caught:
        first("data.template_by_tag={maths:chatml}")
    assert str(caught.value) == (
        "got data.template_by_tag for maths; expected tags of the data: math_rule; rename or remove the entry"
    )


def test_shares_are_for_training_only(inputs, tmp_path):
    rows = [
        {"id": i, "tag": tag, "prompt": "q", "ground_truth": "A"} for tag in ("math_rule", "choice") for i in range(8)
    ]
    (tmp_path / "mix.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mix = (f"data.train_files={tmp_path}/mix.jsonl", "data.domain_interleave_probs={math_rule:0.25,choice:0.75}")
    sources = read(inputs, tmp_path, *mix)
    assert [item.row.domain for item in sources.train.next_batch()] == ["choice", "choice", "math_rule", "choice"]
    assert {item.row.domain for item in sources.validation.next(4)} == {"math_rule"}
    with pytest.raises(DataError, match=r"\[D28\] .*mix\.jsonl: got sum 0\.9; "):
        read(inputs, tmp_path, mix[0], "data.domain_interleave_probs={math_rule:0.15,choice:0.75}")


def test_problems_of_training_and_validation_come_together(inputs, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("[]\n[]\n")
    files = ("data.train_files=a.jsonl", "data.val_files=b.jsonl", f"data.dataset_dir={tmp_path}")
    with pytest.raises(DataError) as caught:
        read(inputs, tmp_path, *files, "data.max_reported_errors=3")
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in lines[:3]] == ["[D06] a.jsonl:1", "[D06] a.jsonl:2", "[D06] b.jsonl:1"]
    assert lines[3] == "... and 1 more (data.max_reported_errors)"


def test_the_cache_is_used_when_it_is_named(inputs, tmp_path):
    read(inputs, tmp_path, f"data.prompt_cache_dir={tmp_path}/cache")
    assert len(list((tmp_path / "cache").glob("*.npz"))) == 2  # training and validation


def check_data(inputs, tmp_path, *more: str) -> int:
    return main(overrides(inputs, tmp_path / "run", "fsdp", "--check-data", *more))


def test_check_data_prints_and_writes_only_the_report(inputs, tmp_path, capsys):
    assert check_data(inputs, tmp_path, "data.length_bucket=4") == 0
    shown = capsys.readouterr().out
    assert "train data: 12 rows, 12 kept" in shown and "validation data: 4 rows, 4 kept" in shown
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "data_report.json",
        "length_hist.csv",
        "length_hist.png",
    }
    report = json.loads((tmp_path / "run" / "data_report.json").read_text("utf-8"))
    assert all(int(edge) % 4 == 0 for edge in report["train"]["length_histogram"])


def test_check_data_ends_with_2_for_bad_rows_templates_and_configuration(inputs, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text(json.dumps({"id": 1, "tag": "math_rule", "prompt": "2+2?"}) + "\n")
    bad_rows = [f"data.train_files={tmp_path}/bad.jsonl", "reward.custom_reward_function.path=null"]
    for more, expected in (
        (bad_rows, "[D19]"),
        (["data.template_by_tag={maths:chatml}"], "got data.template_by_tag for maths"),
        (["data.template_by_tag={math_rule:llama}"], "one of native, qwen2_5, qwen3, chatml"),
        (["data.chat_template_path=/none.jinja"], "/none.jinja: no such file"),
        (["data.template=qwen3", "data.chat_template_path=/none.jinja"], "expected: one of the two"),
    ):
        assert check_data(inputs, tmp_path, *more) == 2
        assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_spellings_of_roll(inputs, tmp_path):
    argv = overrides(inputs, tmp_path / "run", "fsdp")
    kept = [each for each in argv if not each.startswith(("data.train_files", "data.val_files", "trainer.test_freq"))]
    config = load_config(
        [
            *kept,
            f"actor_train.data_args.file_name=[{inputs['train']}]",
            f"validation.data_args.file_name={inputs['val']}",
            "actor_train.data_args.template=qwen3",
            "actor_train.data_args.domain_interleave_probs.math_rule=1.0",
            "actor_train.data_args.preprocessing_num_workers=3",
            "validation.generating_args={top_p:0.6,temperature:0.6,do_sample:true}",
            "validation.generating_args.num_return_sequences=2",
            "eval_steps=5",
        ]
    ).config
    assert (config.data.train_files, config.data.val_files) == ((str(inputs["train"]),), (str(inputs["val"]),))
    assert (config.data.template, config.data.domain_interleave_probs) == ("qwen3", {"math_rule": 1.0})
    assert (config.data.filter_overlong_prompts_workers, config.trainer.test_freq) == (3, 5)
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    assert (sampling.n, sampling.temperature, sampling.top_p) == (2, 0.6, 0.6)
