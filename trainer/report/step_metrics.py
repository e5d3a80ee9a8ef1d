"""Numbers of one step that no engine and no algorithm reports: lengths, rewards, speed, memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engines.metric import Metric, Metrics

# What shaping adds to a score, under names of its own.
SHAPING = {"overlong_penalty": "reward/overlong_penalty", "length_penalty": "reward/length_penalty"}


def spread(name: str, values: Sequence[float]) -> Metrics:
    """mean, max and min over samples; nothing when there is no sample."""
    if not values:
        return {}
    return {
        f"{name}/mean": Metric("mean", sum(values), len(values)),
        f"{name}/max": Metric("max", max(values)),
        f"{name}/min": Metric("min", min(values)),
    }


def response_metrics(scored: Sequence) -> Metrics:
    """Lengths, end reasons and rewards of a step's samples (`trainer.rollout.scored.Scored`), also per tag."""
    alive = [each for each in scored if each.sample.finish_reason != "abort"]
    valid = [each for each in scored if each.counts]
    metrics: Metrics = {
        "response/aborted_ratio": Metric("mean", len(scored) - len(alive), len(scored)),
        "actor/samples_total": Metric("count", len(scored)),
        "reward/failed": Metric("count", sum(each.result.failed for each in alive)),
        "response_length/clip_ratio": Metric(
            "mean", sum(each.sample.finish_reason == "length" for each in scored), len(scored)
        ),
    }
    metrics |= spread("response_length", [len(each.sample.response_ids) for each in scored])
    metrics |= spread("prompt_length", [len(each.sample.prompt_ids) for each in scored])
    metrics |= spread("critic/score", [each.result.score for each in valid])
    metrics |= _correctness(valid)
    for tag in sorted({each.item.row.tag for each in valid}):
        rows = [each for each in valid if each.item.row.tag == tag]
        metrics[f"reward/{tag}/mean"] = Metric("mean", sum(each.result.score for each in rows), len(rows))
    for key in sorted({key for each in valid for key in each.result.extra}):
        numbers = [each.result.extra[key] for each in valid if isinstance(each.result.extra.get(key), int | float)]
        if numbers:
            metrics[SHAPING.get(key, f"reward/{key}/mean")] = Metric("mean", sum(numbers), len(numbers))
    return metrics


def _correctness(valid: Iterable) -> Metrics:
    groups: dict[str, list[float]] = {}
    for each in valid:
        if each.result.acc is not None:
            groups.setdefault(each.item.uid, []).append(each.result.acc)
    if not groups:
        return {}
    count = len(groups)
    return {
        "group/correct_ratio": Metric("mean", sum(sum(accs) / len(accs) for accs in groups.values()), count),
        "group/all_correct_groups_ratio": Metric("mean", sum(min(accs) >= 1 for accs in groups.values()), count),
        "group/all_wrong_groups_ratio": Metric("mean", sum(max(accs) <= 0 for accs in groups.values()), count),
    }


def step_performance(
    seconds: float, num_tokens: int, devices: int, memory_gb: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """`memory_gb`: (peak, resident now) of every worker process. Throughput is tokens per second and device."""
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / (seconds * devices),
        "perf/max_memory_allocated_gb": max(peak for peak, _ in memory_gb),
        "perf/cpu_memory_used_gb": sum(resident for _, resident in memory_gb),
    }
