"""Dynamic sampling: which groups are kept, when it ends, and what waits for the next step."""

import json
from dataclasses import replace

import pytest
import torch

from tests.trainer.credit_bench import one
from trainer.rollout.group_filter import HARD_LIMIT, DynamicSampling, FilterOptions, groups_of, judge, metric_value
from trainer.rollout.scored_state import from_json, to_json

PREFIX = "training/filter_groups"


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0, 1, 0, 0], "kept"),
        ([0.25, 0.5], "kept"),
        ([1, 1, 1], "all_right"),
        ([0, 0, 0, 0], "all_wrong"),
        ([0.5, 0.5], "flat"),
        ([1], "all_right"),
        ([0], "all_wrong"),
        ([], "flat"),
    ],
)
def test_verdicts(values, verdict):
    assert judge(values, FilterOptions()) == verdict


def test_optional_limits():
    values = [1, 0, 0, 0]  # mean .25, deviation .5
    assert judge(values, FilterOptions(std_threshold=0.49, mean_low=0.2, mean_high=0.3)) == "kept"
    for tighter in (dict(std_threshold=0.5), dict(mean_low=0.25), dict(mean_high=0.25)):
        assert judge(values, FilterOptions(**tighter)) == "flat"


class Data:
    """An endless file of prompts; `accs` says how the answers of prompt i come out."""

    def __init__(self, *accs, version=0, shaped=None):
        self.accs, self.next, self.version, self.shaped = accs, 0, version, shaped
        self.asked = []

    def __call__(self, count):
        self.asked.append(count)
        scored = []
        for number in range(self.next, self.next + count):
            for index, acc in enumerate(self.accs[number % len(self.accs)]):
                score = acc if self.shaped is None else self.shaped[index]
                scored.append(one(str(number), score, acc, index=index, version=self.version))
        self.next += count
        return scored


GOOD, RIGHT, WRONG = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]


def uids(scored):
    return [group[0].item.uid for group in groups_of(scored)]


def values(metrics):
    return {name.removeprefix(f"{PREFIX}/"): metric.value for name, metric in metrics.items() if metric.value}


def test_rounds_go_on_until_there_are_enough_groups_in_data_order():
    data = Data(GOOD, RIGHT, WRONG, GOOD, [0.5, 0.5], GOOD)
    used, metrics = DynamicSampling(FilterOptions(), num_groups=2, prompts_per_round=3).collect(data, version=0)
    assert data.asked == [3, 3]
    assert uids(used) == ["0", "3"] and len(used) == 4
    assert values(metrics) == {
        "train/num_gen_batches": 2,
        "kept": 3,
        "evicted_all_correct": 1,
        "evicted_all_wrong": 1,
        "evicted_flat": 1,
        "surplus": 1,
    }
    assert all(metric.kind == "count" for metric in metrics.values())


def test_the_raw_metric_decides_not_the_shaped_reward():
    data = Data([0.0] * 4, shaped=[-1, -1, -1.5, -2])
    with pytest.raises(RuntimeError, match="1 as all wrong"):
        DynamicSampling(FilterOptions(max_rounds=1), 1, 1).collect(data, 0)


def test_a_reward_that_never_varies_ends_with_counts():
    data = Data(RIGHT)
    with pytest.raises(RuntimeError, match=r"got 0 groups .* in 3 rounds of 4 prompts \(12 dropped as all right, 0 as"):
        DynamicSampling(FilterOptions(max_rounds=3), 4, 4).collect(data, 0)
    assert data.asked == [4] * 3


@pytest.mark.parametrize("limit", [0, -1, 1000])
def test_no_limit_is_still_a_limit(limit):
    data = Data(WRONG)
    with pytest.raises(RuntimeError, match=f"in {HARD_LIMIT} rounds"):
        DynamicSampling(FilterOptions(max_rounds=limit), 1, 1).collect(data, 0)


def test_evicted_groups_fill_the_step_when_asked_to():
    options = FilterOptions(max_rounds=2, on_exhausted="fill_unfiltered")
    used, metrics = DynamicSampling(options, 3, 2).collect(Data(RIGHT, GOOD, WRONG, WRONG), 0)
    assert uids(used) == ["1", "0", "2"]
    assert values(metrics)["filled"] == 2 and values(metrics)["train/num_gen_batches"] == 2
    with pytest.raises(RuntimeError, match="expected 5"):  # four prompts cannot fill five groups
        DynamicSampling(options, 5, 2).collect(Data(RIGHT), 0)


def test_samples_that_do_not_count_are_not_judged():
    def generate(count):
        return [one("0", acc=1.0), one("0", acc=0.0, failed=True), one("1", acc=1.0), one("1", acc=0.0, length=0)]

    with pytest.raises(RuntimeError, match="2 dropped as all right"):
        DynamicSampling(FilterOptions(max_rounds=1), 1, 2).collect(generate, 0)


def test_surplus_is_discarded_by_default():
    sampling, data = DynamicSampling(FilterOptions(), 1, 3), Data(GOOD)
    assert uids(sampling.collect(data, 0)[0]) == ["0"]
    assert uids(sampling.collect(data, 1)[0]) == ["3"]


def test_surplus_is_carried_over_and_survives_a_checkpoint():
    options = FilterOptions(carry_over=True)
    sampling, data = DynamicSampling(options, 2, 3), Data(GOOD)
    first, _ = sampling.collect(data, 0)
    resumed = DynamicSampling(options, 2, 3)
    resumed.load_state_dict(json.loads(json.dumps(sampling.state_dict())))
    data.version = 1
    second, metrics = resumed.collect(data, 1)
    assert uids(first) == ["0", "1"] and uids(second) == ["2", "3"]
    assert [each.sample.weight_version for each in second] == [0, 0, 1, 1]
    assert values(metrics) == {"train/num_gen_batches": 1, "kept": 3, "surplus": 2}
    third, metrics = resumed.collect(data, 2)  # two groups wait: nothing has to be generated
    assert uids(third) == ["4", "5"] and metrics["train/num_gen_batches"].value == 0


def test_stored_groups_that_are_too_old_are_dropped():
    sampling, data = DynamicSampling(FilterOptions(carry_over=True, max_staleness=2), 1, 2), Data(GOOD)
    sampling.collect(data, 0)
    assert uids(sampling.collect(data, 2)[0]) == ["1"]
    sampling.collect(data, 2)  # generates 2, 3 by version 0, keeps 3
    used, metrics = sampling.collect(data, 3)
    assert uids(used) == ["4"] and values(metrics)["stale"] == 1


def test_a_metric_of_the_scorer():
    each = one(extra={"strict": 0.5, "note": "text"})
    assert metric_value(each, "strict") == 0.5
    for name in ("seq_reward", "note"):
        with pytest.raises(ValueError, match=rf"metric={name}.*\['acc', 'strict'\]"):
            metric_value(each, name)


def test_scored_samples_come_back_from_json():
    routes = torch.tensor([[[0, 3]], [[-1, 2]]], dtype=torch.int16)
    each = one("q#1", 0.5, acc=1.0, extra={"n": 1}, routes=routes, cases=({"in": "1"},), origin=("a.jsonl", 3))
    each = replace(each, routable=False)
    back = from_json(json.loads(json.dumps(to_json(each))))
    assert back == each and torch.equal(back.sample.routes, routes) and back.sample.routes.dtype == torch.int16
    assert from_json(to_json(one())) == one()
