"""Validation statistics against numbers worked out by hand or by the published recipe."""

import json
import logging
import math
import random

import numpy as np
import pytest

from trainer.validation.history import ValidationHistory
from trainer.validation.summary import (
    ValRecord,
    bootstrap,
    draw_sizes,
    majority,
    pass_at,
    sample_table,
    summarise,
    write_samples,
)


def record(uid="p", index=0, acc=1.0, tag="t", pred=None, score=None, length=10, finish="stop", failed=False):
    score = acc if score is None else score
    return ValRecord(uid, tag, uid, index, "q", "a", pred, "g", acc, score, "correct", length, finish, failed)


def test_accuracy_comes_from_acc_and_every_sample_counts_once():
    records = [record("a", acc=1, score=1), record("b", acc=0, score=-1)]
    assert summarise(records)["val_correct/t/mean"] == 0.5
    five = [record(str(i), acc=float(i == 0)) for i in range(5)]
    assert summarise(five)["val_correct/t/mean"] == 0.2


def test_all_is_over_samples_not_over_tags():
    records = [record("a", acc=1, tag="x")] + [record(f"b{i}", acc=0, tag="y") for i in range(3)]
    metrics = summarise(records)
    assert (metrics["val_correct/x/mean"], metrics["val_correct/y/mean"], metrics["val_correct/all/mean"]) == (
        1,
        0,
        0.25,
    )


def test_partly_right_is_not_correct_but_counts_in_the_mean():
    metrics = summarise([record("a", acc=0.5), record("b", acc=1)])
    assert metrics["val_correct/t/mean"] == 0.5
    assert metrics["val-core/t/acc/mean@1"] == 0.75


def test_bootstrap_numbers():
    acc = np.array([1.0, 0, 0, 0])
    assert bootstrap(acc, 2, np.max) == pytest.approx(0.453, abs=5e-4)
    assert bootstrap(acc, 4, np.max) == pytest.approx(0.687, abs=5e-4)
    assert bootstrap(acc, 4, np.min) == pytest.approx(0.003, abs=5e-4)
    assert majority(["A", "A", "B", "C"], np.array([1.0, 1, 0, 0]), 4) == pytest.approx(0.646, abs=5e-4)


def test_names_and_values_for_four_samples():
    metrics = summarise(
        [record(index=i, acc=float(i == 0), length=10 + i, finish="length" if i == 3 else "stop") for i in range(4)]
    )
    assert metrics == {
        "val_correct/t/mean": 0.25,
        "val_correct/all/mean": 0.25,
        "val-core/t/acc/mean@4": 0.25,
        "val-core/t/acc/best@2/mean": pytest.approx(0.453, abs=5e-4),
        "val-core/t/acc/best@4/mean": pytest.approx(0.687, abs=5e-4),
        "val-core/t/acc/maj@2/mean": 0,  # nobody has a prediction
        "val-core/t/acc/maj@4/mean": 0,
        "val-aux/t/std@4": pytest.approx(math.sqrt(3) / 4),
        "val-aux/t/worst@2/mean": pytest.approx(1 / 16, abs=0.02),
        "val-aux/t/worst@4/mean": pytest.approx(0.003, abs=5e-4),
        "val-aux/t/pass@2": 0.5,
        "val-aux/t/pass@4": 1,
        "val-aux/t/response_length/mean": 11.5,
        "val-aux/t/clip_ratio": 0.25,
        "val-aux/t/failed": 0,
    }


def test_one_sample_per_prompt_has_only_mean_at_1():
    names = {name for name in summarise([record("a"), record("b")]) if "@" in name}
    assert names == {"val-core/t/acc/mean@1"}


def test_sizes_of_draws():
    assert [draw_sizes(n) for n in (2, 4, 5, 8, 9)] == [[2], [2, 4], [2, 4, 5], [2, 4, 8], [2, 4, 8, 9]]


def test_pass_at_is_unbiased():
    assert pass_at(4, 1, 2) == 0.5
    assert pass_at(4, 0, 4) == 0 and pass_at(4, 4, 1) == 1


def test_votes_without_prediction_share_one_wrong_answer():
    assert majority([None, None, None, "A"], np.array([1.0, 1, 1, 0]), 4) == 0
    assert majority(["A", "A"], np.array([1.0, 1]), 2) == 1


def test_order_changes_nothing():
    records = [
        record(str(p), i, acc=float((p * 7 + i * 3) % 4 == 0), pred="AB"[i % 2], tag="xy"[p % 2])
        for p in range(6)
        for i in range(4)
    ]
    shuffled = list(records)
    random.Random(0).shuffle(shuffled)
    assert summarise(shuffled) == summarise(records)


def test_failed_samples_are_left_out_and_counted(caplog):
    records = [
        record("a", 0, acc=1),
        record("a", 1, acc=None, failed=True),
        record("b", 0, acc=0, tag="u", failed=True),
    ]
    with caplog.at_level(logging.WARNING):
        metrics = summarise(records)
    assert (metrics["val_correct/t/mean"], metrics["val-aux/t/failed"], metrics["val-core/t/acc/mean@2"]) == (1, 1, 1)
    assert math.isnan(metrics["val_correct/u/mean"]) and metrics["val-aux/u/failed"] == 1
    assert metrics["val_correct/all/mean"] == 1
    assert "tag u: none of 1 samples" in caplog.text


def test_samples_file_is_complete_or_absent(tmp_path):
    target = tmp_path / "deep" / "val_0.jsonl"
    write_samples(target, [record("ä"), record("b", acc=None)])
    lines = [json.loads(line) for line in target.read_text("utf-8").splitlines()]
    assert [line["uid"] for line in lines] == ["ä", "b"]
    assert set(lines[0]) >= {
        "uid",
        "tag",
        "id",
        "index",
        "prompt",
        "answer",
        "pred",
        "gold",
        "acc",
        "score",
        "reason",
        "length",
    }

    def broken():
        yield record("new")
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        write_samples(target, broken())
    assert len(target.read_text("utf-8").splitlines()) == 2


def test_the_table_shows_the_same_samples_at_every_step():
    records = [record(str(i)) for i in range(20)]
    columns, first = sample_table(records, 3)
    assert columns == ["tag", "id", "prompt", "answer", "pred", "gold", "score"]
    assert len({row[1] for row in first}) == 3
    columns, again = sample_table(records[::-1], 3, step=2)
    assert columns[0] == "step" and again == [["2", *row] for row in first]


def checks(history: ValidationHistory, *rows: tuple[float, float | None]) -> list[list[str]]:
    return [
        history.update(step, {"val_correct/all/mean": value, "val_correct/t/mean": value}, reward)
        for step, (value, reward) in enumerate(rows)
    ]


def best(folder) -> dict:
    return json.loads((folder / "best.json").read_text("utf-8"))


def test_the_best_step_of_each_tag_and_its_checkpoint(tmp_path):
    history = ValidationHistory(tmp_path)
    history.update(0, {"val_correct/all/mean": 0.2, "val_correct/a/b/mean": math.nan, "val-aux/t/failed": 9}, None)
    assert best(tmp_path) == {"all": {"step": 0, "val_correct": 0.2, "checkpoint": None}}
    history.update(4, {"val_correct/all/mean": 0.5, "val_correct/a/b/mean": 0.1}, 0.3)
    (tmp_path / "global_step_4").mkdir()
    history.write()
    history.update(8, {"val_correct/all/mean": 0.5, "val_correct/a/b/mean": 0.2}, 0.4)
    assert best(tmp_path) == {
        "all": {"step": 4, "val_correct": 0.5, "checkpoint": "global_step_4"},  # the first of equal ones
        "a/b": {"step": 8, "val_correct": 0.2, "checkpoint": None},
    }
    (tmp_path / "global_step_4").rmdir()  # by retention
    history.write()
    assert best(tmp_path)["all"]["checkpoint"] is None


FALLING = [(0.2, None), (0.6, 0.3), (0.5, 0.4), (0.4, 0.5), (0.3, 0.6)]


def test_accuracy_that_falls_while_the_score_rises_gives_one_warning(tmp_path):
    given = checks(ValidationHistory(tmp_path, 2), *FALLING)
    assert [len(each) for each in given] == [0, 0, 0, 1, 0]
    assert given[3] == [
        "step 3: val_correct/all/mean fell in 2 checks in a row, 0.600 -> 0.400, while the training score rose to "
        "0.500; raise actor_rollout_ref.rollout.n or the KL coefficient, or go back to step 1, the best one (best.json)"
    ]
    assert [len(each) for each in checks(ValidationHistory(tmp_path, 3), *FALLING)] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "rows",
    [
        [(0.6, 0.3), (0.5, 0.3), (0.4, 0.3)],  # the score does not rise
        [(0.6, 0.3), (0.5, 0.4), (0.5, 0.5)],  # standing still is no fall
        [(0.6, 0.3), (0.5, 0.4), (0.55, 0.5), (0.5, 0.6)],  # not in a row
        [(0.6, None), (0.5, None), (0.4, 0.5)],  # nothing to compare with
        [(0.6, 0.3), (math.nan, 0.4), (0.4, 0.5)],
    ],
)
def test_no_warning(tmp_path, rows):
    assert not any(checks(ValidationHistory(tmp_path, 2), *rows))
    assert not any(checks(ValidationHistory(tmp_path), *FALLING))


@pytest.mark.parametrize("saved_after", range(1, 5))
def test_history_resumes_exactly(tmp_path, saved_after):
    straight = ValidationHistory(tmp_path / "a", 2)
    expected = checks(straight, *FALLING)
    broken = ValidationHistory(tmp_path / "b", 2)
    found = checks(broken, *FALLING[:saved_after])
    state = json.loads(json.dumps(broken.state_dict()))
    broken.update(99, {"val_correct/all/mean": 1.0}, 0.0)  # a step that the resume undoes
    resumed = ValidationHistory(tmp_path / "b", 2)
    resumed.load_state_dict(state)
    for step, (value, reward) in list(enumerate(FALLING))[saved_after:]:
        found.append(resumed.update(step, {"val_correct/all/mean": value, "val_correct/t/mean": value}, reward))
    assert found == expected and best(tmp_path / "b") == best(tmp_path / "a")
    assert resumed.state_dict() == straight.state_dict()
