"""The reward report: numbers worked out by hand, warnings, and pictures that show something."""

import json
import math

import matplotlib.image
import pytest

from tests.trainer.config_bench import errors, values
from trainer.prompts import Message, PromptItem, Row
from trainer.reward import RewardResult
from trainer.validation.reward_report import (
    ReportSample,
    build_report,
    from_scored,
    main,
    no_signal,
    read_dump,
    refuse_flat,
    report_lines,
    write_reward_report,
)


def group(uid: str, *accs: float, tag: str = "t", scores: tuple[float, ...] = ()) -> list[ReportSample]:
    return [
        ReportSample(uid, tag, score, acc, text=f"answer {uid}/{i}")
        for i, (acc, score) in enumerate(zip(accs, scores or accs, strict=True))
    ]


MIXED = [*group("a", 1, 0), *group("b", 0, 0), *group("c", 1, 1), *group("d", 0.5, 0.5)]


def test_numbers_of_a_tag():
    failed = ReportSample("d", "t", 9.0, None, reason="error", failed=True)
    late = ReportSample("e", "t", 0.0, 0.0, reason="timeout")
    report = build_report([*MIXED, failed, late])["t"]
    assert (report["count"], report["groups"], report["min"], report["max"]) == (9, 5, 0, 1)
    assert report["mean"] == pytest.approx(4 / 9)
    assert report["std"] == pytest.approx(math.sqrt((3 * 1 + 2 * 0.25) / 9 - (4 / 9) ** 2))
    assert report["group_shares"] == {"all_0": 0.4, "all_1": 0.2, "mixed": 0.2, "same": 0.2}
    assert (report["failed"], report["timeouts"]) == (0.1, 0.1)
    assert [sample["score"] for sample in report["best"]] == [1, 1, 1, 0.5, 0.5]
    assert [sample["score"] for sample in report["worst"]] == [0, 0, 0, 0, 0.5]
    assert report["best"][0] == {
        "uid": "a",
        "score": 1,
        "acc": 1,
        "reason": "",
        "prompt": "",
        "text": "answer a/0",
    }


def test_groups_are_judged_by_accuracy_not_by_the_shaped_score():
    report = build_report(group("a", 0, 0, 0, 0, scores=(-1, -1, -1.5, -2)))["t"]
    assert report["group_shares"]["all_0"] == 1 and report["std"] > 0.4
    assert no_signal({"t": report}, 0.05) == [
        "no signal: t: none of 1 groups is mixed; the data is too hard or the scorer reads no answer: look at the "
        "samples, take easier rows, another reward, or more samples per prompt (rollout.n)"
    ]
    without_accuracy = [ReportSample("a", "t", 0.1), ReportSample("a", "t", 0.4)]
    assert build_report(without_accuracy)["t"]["group_shares"]["mixed"] == 1


def test_what_counts_as_no_signal():
    flat = [ReportSample(f"{i}", "t", 0.5 + 0.01 * (j % 2), 0.3) for i in range(2) for j in range(2)]
    assert no_signal(build_report(flat), 0.05) == [
        "no signal: t: standard deviation 0.005 of 4 scores, below 0.05 and none of 2 groups is mixed; take other "
        "data, another reward, or more samples per prompt (rollout.n)"
    ]
    easy = build_report(group("a", 1, 1))
    assert no_signal(easy, 0.05)[0].endswith("; the data is too easy: take harder rows")
    broken = build_report([ReportSample("a", "t", 0.0, None, failed=True)])
    assert no_signal(broken, 0.05) == ["no signal: t: no answer could be scored; mend the scorer"]
    assert no_signal(build_report(MIXED), 0.05) == []
    assert len(no_signal(build_report(MIXED), 0.5)) == 1  # their standard deviation is 0.43


def test_flat_rewards_may_stop_the_run():
    refuse_flat([])
    with pytest.raises(ValueError) as caught:
        refuse_flat(["no signal: t: x", "no signal: u: y"])
    assert str(caught.value) == (
        "got a reward without signal:\n  no signal: t: x\n  no signal: u: y\nexpected scores that differ within a "
        "group; follow the advice above, or set reward.report.on_flat=warn to train all the same"
    )
    with pytest.raises(ValueError, match=r"got no samples for the reward report; expected .*; raise reward\.report"):
        build_report([])


def test_files_of_the_report(tmp_path):
    samples = [*MIXED, *group("z", 0, 0, tag="a/b"), ReportSample("f", "none", 0.0, None, failed=True)]
    report, warnings = write_reward_report(tmp_path / "run", samples)
    stored = json.loads((tmp_path / "run/reward_report.json").read_text("utf-8"))
    assert stored == {"min_std": 0.05, "warnings": warnings, "tags": report} and len(warnings) == 2
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "reward_report.json",
        "reward_hist_t.png",
        "reward_hist_a%2Fb.png",
    }
    pixels = matplotlib.image.imread(tmp_path / "run/reward_hist_t.png")[..., :3]
    assert pixels.shape[0] > 200 and pixels.std() > 0.05
    red = (pixels[..., 0] > 0.7) & (pixels[..., 1] < 0.3)
    assert sum(red.sum(axis=0) > 60) >= 3  # mean, and mean ± std, are upright lines


def test_samples_of_the_rooms():
    class Scored:
        item = PromptItem("u", Row("1", "t", "math_rule", (Message("system", "s"), Message("user", "q"))), (1,))
        result = RewardResult(0.5, 1.0, "7", "correct", failed=True)
        text = "x"

    assert from_scored([Scored]) == [ReportSample("u", "t", 0.5, 1.0, "x", "q", "correct", True)]


def test_a_dump_gives_the_same_report(tmp_path, capsys):
    dump = tmp_path / "4.jsonl"
    rows = [
        {"uid": s.uid, "tag": s.tag, "score": s.score, "acc": s.acc, "answer": s.text, "prompt": "", "reason": ""}
        for s in MIXED
    ]
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_dump(dump) == MIXED
    assert main([str(dump), "--out", str(tmp_path)]) == 0
    line = (
        "t: 8 answers, score 0.500 ± 0.433 in [0, 1]; 4 groups: all 0 0.25, all 1 0.25, mixed 0.25, same 0.25; "
        "failed 0.00, timed out 0.00"
    )
    assert capsys.readouterr().out == line + "\n" == "".join(f"{x}\n" for x in report_lines(build_report(MIXED)))
    assert (tmp_path / "reward_hist_t.png").exists()
    assert main([str(dump), "--out", str(tmp_path), "--min-std", "0.9"]) == 1
    dump.write_text('{"uid": "a"}\n')
    assert main([str(dump), "--out", str(tmp_path)]) == 2
    assert f"got {dump}:1 ('tag'); expected a sample of trainer.rollout_data_dir" in capsys.readouterr().err


def test_the_switch_has_two_names(tmp_path):
    found, _ = values("trainer.reward_check=true", "reward.report.on_flat=error")
    assert (found["reward.report.enable"], found["reward.report.on_flat"]) == (True, "error")
    assert "value.choice" in errors(tmp_path, "reward.report.on_flat=stop")
    assert "value.range" in errors(tmp_path, "reward.report.n=0")
