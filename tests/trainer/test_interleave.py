"""Fixed shares of domains in every batch, and a state that is exact with prompts drawn in any number."""

import json
import logging
import random
from collections import Counter

import pytest

from tests.trainer.prompt_bench import rows_of, source, uids
from trainer.prompts import Message, PromptItem, PromptSource, Row
from trainer.prompts.interleave import block_pattern, largest_remainder

SHARES = {"math_rule": 0.5, "code_sandbox": 0.3, "llm_judge": 0.2}
COUNTS = {"math_rule": 40, "code_sandbox": 7, "llm_judge": 3}


def mixed(counts: dict[str, int] = COUNTS, shares: dict[str, float] = SHARES, **options) -> PromptSource:
    rows = [
        Row(str(i), domain, domain, (Message("user", "q"),), "7", origin=("a.jsonl", i + 1))
        for domain, count in counts.items()
        for i in range(count)
    ]
    return source(rows, **{"batch_size": 10, "domain_shares": shares, **options})


def per_domain(items: list[PromptItem]) -> dict[str, int]:
    return dict(Counter(item.row.domain for item in items))


def test_largest_remainder():
    assert largest_remainder(SHARES, 32) == {"math_rule": 16, "code_sandbox": 10, "llm_judge": 6}
    assert largest_remainder({"a": 0.29, "b": 0.71}, 100) == {"a": 29, "b": 71}
    # 3.5 and 1.5: equal remainders, which they are not as floats (0.35 is below, 0.15 nearer to its number)
    assert largest_remainder({"a": 0.35, "b": 0.15, "c": 0.5}, 10) == {"a": 4, "b": 1, "c": 5}
    assert largest_remainder({"b": 0.5, "a": 0.5}, 3) == {"b": 1, "a": 2}
    third = 0.3333333
    assert largest_remainder({"a": third, "b": third, "c": third}, 30) == {"a": 10, "b": 10, "c": 10}
    assert largest_remainder({"a": 1.0, "b": 0}, 5) == {"a": 5, "b": 0}


def test_a_batch_is_mixed_evenly():
    assert block_pattern({"a": 0.5, "b": 0.25, "c": 0.25}, 4) == ["a", "b", "c", "a"]
    half = block_pattern(SHARES, 32)[:16]
    assert Counter(half) == {"math_rule": 8, "code_sandbox": 5, "llm_judge": 3}


def test_every_batch_has_the_same_shares():
    prompts = mixed(batch_size=32)
    for _ in range(20):
        assert per_domain(prompts.next_batch()) == {"math_rule": 16, "code_sandbox": 10, "llm_judge": 6}
    assert prompts.consumed == 640


def test_a_small_domain_wraps_round_alone():
    prompts = mixed()
    items = [item for _ in range(9) for item in prompts.next_batch()]
    assert len({item.uid for item in items}) == 90
    for domain, drawn in {"math_rule": 45, "code_sandbox": 27, "llm_judge": 18}.items():
        of = [item for item in items if item.row.domain == domain]
        assert len(of) == drawn
        for start in range(0, drawn - COUNTS[domain] + 1, COUNTS[domain]):  # whole epochs, each in its own order
            epoch = of[start : start + COUNTS[domain]]
            assert len({item.row.id for item in epoch}) == COUNTS[domain]
            assert {item.uid.rsplit("#")[-1] for item in epoch} == {str(start // COUNTS[domain])}
    assert prompts.epoch == 1 and prompts.state_dict()["domains"]["llm_judge"]["epoch"] == 5


def test_each_domain_has_its_own_order():
    items = mixed({"math_rule": 20, "llm_judge": 20}, {"math_rule": 0.5, "llm_judge": 0.5}).next(40)
    orders = [[item.row.id for item in items if item.row.domain == domain] for domain in ("math_rule", "llm_judge")]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    alone = mixed({"math_rule": 20, "llm_judge": 20, "choice": 9}, {"math_rule": 0.2, "llm_judge": 0.4, "choice": 0.4})
    other = [item.row.id for item in alone.next(100) if item.row.domain == "math_rule"]
    assert other == orders[0]  # whatever else is mixed in


@pytest.mark.parametrize("make", [mixed, lambda: source(rows_of(7))])
def test_prompts_are_the_same_in_any_portions(make):
    whole = [item.uid for item in make().next(120)]
    deal = random.Random(0)
    prompts, found = make(), []
    while len(found) < 120:
        found += [item.uid for item in prompts.next(deal.randint(0, 13))]
    assert found[:120] == whole


@pytest.mark.parametrize("make", [mixed, lambda: source(rows_of(7))])
@pytest.mark.parametrize("drawn", [0, 1, 7, 10, 33, 70])
def test_resuming_equals_an_unbroken_run_after_any_number(make, drawn):
    whole = make()
    whole.next(drawn)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    assert (resumed.consumed, resumed.epoch) == (drawn, whole.epoch)
    expected = uids([whole.next_batch(), whole.next(3), whole.next_batch()])
    assert uids([resumed.next_batch(), resumed.next(3), resumed.next_batch()]) == expected


def test_another_batch_size_continues_every_domain_and_starts_a_new_mix():
    prompts = mixed()
    seen = {item.uid for item in prompts.next(18)}
    resumed = mixed(batch_size=4)
    resumed.load_state_dict(prompts.state_dict())
    batch = resumed.next_batch()
    assert [item.row.domain for item in batch] == ["math_rule", "code_sandbox", "llm_judge", "math_rule"]
    assert seen.isdisjoint(item.uid for item in batch)


def test_the_mix_may_repeat_with_the_generation_batch():
    prompts = mixed(mix_block=4)  # 2, 1.2 and 0.8
    for _ in range(10):
        assert per_domain(prompts.next(4)) == {"math_rule": 2, "code_sandbox": 1, "llm_judge": 1}


def test_other_shares_are_refused_on_resume_or_restart_the_epochs(caplog):
    prompts = mixed()
    prompts.next(45)
    state = prompts.state_dict()
    other = mixed(shares={"math_rule": 0.2, "code_sandbox": 0.4, "llm_judge": 0.4})
    with pytest.raises(ValueError, match=r"got data settings .* data\.domain_interleave_probs"):
        other.load_state_dict(state)
    other.load_state_dict(state, allow_changed_files=True)
    walks = other.state_dict()["domains"]
    assert {name: walk["position"] for name, walk in walks.items()} == dict.fromkeys(COUNTS, 0)
    assert walks["llm_judge"]["epoch"] == state["domains"]["llm_judge"]["epoch"] > 0


def test_a_share_below_one_prompt_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        prompts = mixed({"a": 9, "b": 9}, {"a": 0.99, "b": 0.01})
    assert "no prompt of domain b: its share of 10 prompts is less than one" in caplog.text
    assert per_domain(prompts.next(50)) == {"a": 50} and prompts.epoch == 5
