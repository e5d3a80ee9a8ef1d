"""Scoring in processes: hanging and dying answers, custom functions, shaping, no process left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from trainer.prompts.row import Message, Row
from trainer.reward import CustomSpec, DomainSpec, OverlongSpec, RewardManager, RewardResult
from trainer.reward.custom import as_result
from trainer.reward.overlong import overlong_penalty

ROOT = Path(__file__).parents[2]
TOWER = r"\boxed{9^{9^{9^{9}}}!}"  # keeps the library busy until it is killed


HANG = """
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        while solution_str == "hang":
            pass
        return 1
"""


def row(gold: str = "5", tag: str = "math_rule", domain: str = "math_rule", **fields) -> Row:
    return Row("17", tag, domain, (Message("user", "?"),), ground_truth=gold, **fields)


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(entry.name))
    return found


def results(futures: list[Future[RewardResult]], seconds: float = 60) -> list[RewardResult]:
    return [future.result(timeout=seconds) for future in futures]


def write(folder: Path, code: str) -> str:
    path = folder / "my_reward.py"
    path.write_text(textwrap.dedent(code), encoding="utf-8")
    return str(path)


def test_scores_from_the_main_thread_and_from_a_worker_thread():
    with RewardManager({"math_rule": DomainSpec(score_map=(-1, 1))}, num_workers=1) as manager:
        third = row(r"\frac{1}{3}")
        seen = []
        thread = threading.Thread(
            target=lambda: seen.append(manager.submit(r"\boxed{1/3}", third, response_length=9).result(30))
        )
        thread.start()
        thread.join()
        here = manager.submit(r"\boxed{\frac13}", third, response_length=9).result(30)
        wrong = manager.submit(r"\boxed{2}", third, response_length=9).result(30)
    assert [(r.score, r.acc, r.reason) for r in (*seen, here, wrong)] == [(1, 1, "correct")] * 2 + [(-1, 0, "wrong")]


def test_twenty_hanging_answers_are_bounded_and_leave_the_pool_whole(tmp_path):
    path = write(tmp_path, HANG)
    before = set(children_of(os.getpid()))
    own = row(domain="custom")
    with RewardManager({}, CustomSpec(path, timeout_s=0.5), num_workers=4) as manager:
        hanging = results([manager.submit("hang", own, response_length=1) for _ in range(20)])
        assert manager.submit("good", own, response_length=1).result(30).acc == 1
        deadline = time.monotonic() + 10
        while len(set(children_of(os.getpid())) - before) != 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(set(children_of(os.getpid())) - before) == 4
        metrics = manager.take_metrics()
    assert {(r.score, r.acc, r.reason, r.failed) for r in hanging} == {(0.0, 0.0, "timeout", False)}
    assert metrics["reward/custom/timeouts"] == 20 and metrics["reward/custom/failed"] == 0
    assert metrics["reward/custom/queue_max"] >= 16
    assert set(children_of(os.getpid())) == before


def test_a_power_tower_is_cut_off_and_the_next_good_answer_is_right():
    with RewardManager({"math_rule": DomainSpec(timeout_s=0.5)}, num_workers=1) as manager:
        texts = (TOWER, r"\boxed{5}", TOWER, r"\boxed{5}")
        verdicts = results([manager.submit(text, row(), response_length=1) for text in texts])
    assert [(r.acc, r.reason) for r in verdicts] == [(0, "timeout"), (1, "correct")] * 2


def test_deep_nesting_and_towers_end_within_the_limit():
    nested = "(" * 3000 + "5" + ")" * 3000
    with RewardManager({"math_rule": DomainSpec(timeout_s=10)}, num_workers=2) as manager:
        deep = manager.submit(f"\\boxed{{{nested}}}", row(), response_length=1)
        tower = manager.submit(r"\boxed{10^{10^{10^{10}}}}", row(), response_length=1)
        assert deep.result(15).acc == 1
        assert tower.result(15).acc == 0


def test_no_scoring_process_survives_a_killed_parent(tmp_path):
    code = f"""
        import sys, time
        from trainer.prompts import Message, Row
        from trainer.reward import CustomSpec, RewardManager
        row = Row("1", "t", "custom", (Message("user", "?"),))
        manager = RewardManager({{}}, CustomSpec({write(tmp_path, HANG)!r}, timeout_s=600), num_workers=2)
        manager.submit("good", row, response_length=1).result()
        manager.submit("hang", row, response_length=1)
        time.sleep(0.5)
        print("busy", flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout.readline() == b"busy\n"
        workers = children_of(parent.pid)
        assert len(workers) == 2
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_custom_functions_of_every_form(tmp_path):
    path = write(
        tmp_path,
        """
        import os, sys

        async def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0):
            print("noise on stdout")
            if solution_str == "die":
                os._exit(0)
            if solution_str == "env":
                return {"score": float("torch" in sys.modules), "devices": os.environ["CUDA_VISIBLE_DEVICES"]}
            extra = {"x": extra_info["x"], "tag": data_source, "own": Own()}
            return {"score": 1 + bonus, "acc": solution_str == ground_truth, **extra}

        class Own:
            def __str__(self):
                return "own"
        """,
    )
    custom = CustomSpec(path, reward_kwargs={"bonus": 2})
    with RewardManager({}, custom, num_workers=1) as manager:
        own = row("5", tag="mine", domain="custom", extra={"extra_info": {"x": 4}})
        assert len(manager._pools) == 1  # the function replaces every scorer
        right, dead, env = results([manager.submit(t, own, response_length=1) for t in ("5", "die", "env")])
    assert (right.score, right.acc, dict(right.extra)) == (3, 1, {"x": 4, "tag": "mine", "own": "own"})
    assert (dead.failed, dead.reason) == (True, "worker_died")
    assert (env.score, env.extra["devices"]) == (0, "")


def test_custom_exceptions_stop_or_mask(tmp_path):
    path = write(tmp_path, "def f(data_source, solution_str, ground_truth, extra_info):\n    return 1 / 0\n")
    own = row(domain="custom")
    with RewardManager({}, CustomSpec(path, "f"), num_workers=1) as manager:
        error = manager.submit("5", own, response_length=1).exception(30)
    assert isinstance(error, ValueError)
    assert "row '17' of tag 'math_rule'" in str(error) and "ZeroDivisionError: division by zero" in str(error)
    with RewardManager({}, CustomSpec(path, "f", on_error="mask"), num_workers=1) as manager:
        masked = manager.submit("5", own, response_length=1).result(30)
        assert manager.take_metrics()["reward/custom/failed"] == 1
    assert masked.failed and masked.acc is None and "ZeroDivisionError" in masked.extra["error"]


def test_custom_for_one_domain_only(tmp_path):
    path = write(tmp_path, "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.25\n")
    with RewardManager({}, CustomSpec(path, domains=("ifeval",)), num_workers=1) as manager:
        own = manager.submit("5", row(domain="ifeval"), response_length=1).result(30)
        math = manager.submit("5", row(), response_length=1).result(30)
        with pytest.raises(ValueError, match="got a row of domain 'poetry', which has no scorer"):
            manager.submit("5", row(domain="poetry"), response_length=1)
    assert (own.score, own.acc, math.score) == (0.25, 0.25, 1)


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("x = 1\ndef f(a):\n    return a\n", "g", r"expected one of \['f'\]"),
        ("x = 1\n", "x", "a int; expected a function"),
        ("\ndef f(data_source, solution_str):\n    return 1\n", "f", r"my_reward.py:2 f\(data_source, solution_str\)"),
    ],
)
def test_custom_mistakes_show_at_start(tmp_path, code, name, message):
    with pytest.raises(ValueError, match=message):
        RewardManager({}, CustomSpec(write(tmp_path, code), name), num_workers=1)
    with pytest.raises(ValueError, match="expected an existing python file"):
        RewardManager({}, CustomSpec(str(tmp_path / "none.py")), num_workers=1)


def test_return_values_are_brought_to_one_form():
    mixed = [as_result(v) for v in (1.0, {"score": 0, "acc": 0}, {"score": 1, "acc": 1, "x": 2}, True, -1)]
    assert [r.score for r in mixed] == [1, 0, 1, 1, -1]
    assert [r.acc for r in mixed] == [1, 0, 1, 1, None]
    assert dict(mixed[2].extra) == {"x": 2}
    for bad in (float("nan"), float("inf"), {"acc": 1}, None, "1"):
        with pytest.raises(ValueError, match="expected"):
            as_result(bad)


@pytest.mark.parametrize(("length", "penalty"), [(1, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1)])
def test_overlong_penalty(length, penalty):
    spec = OverlongSpec(enable=True, len=4, penalty_factor=1.0, max_resp_len=20)
    assert overlong_penalty(spec, length) == penalty
    assert overlong_penalty(OverlongSpec(), length) == 0 and overlong_penalty(None, length) == 0


def test_shaping_reaches_the_score_and_never_the_accuracy():
    spec = OverlongSpec(enable=True, len=4, penalty_factor=1.0, max_resp_len=20)
    with RewardManager({"math_rule": DomainSpec(score_map=(-1, 1))}, num_workers=1, overlong=spec) as manager:
        texts = [(r"\boxed{5}", 18), (r"\boxed{6}", 20), (r"\boxed{5}", 3)]
        futures = [manager.submit(text, row(), response_length=length) for text, length in texts]
        shaped = results(futures)
    assert [r.score for r in shaped] == [0.5, -2, 1]
    assert [r.acc for r in shaped] == [1, 0, 1]
    assert [r.extra["overlong_penalty"] for r in shaped] == [-0.5, -1, 0]


def test_refused_settings():
    with pytest.raises(ValueError, match="without max_resp_len"):
        RewardManager({}, num_workers=1, overlong=OverlongSpec(enable=True, len=4))
    with pytest.raises(ValueError, match=r"got rewards\.math_rule\.answers; expected one of"):
        RewardManager({"math_rule": DomainSpec(options={"answers": "x"})}, num_workers=1)
    with pytest.raises(
        ValueError, match=r"got rewards.math_rule.answer='x'; expected one of \['rules', 'last_number'\]"
    ):
        RewardManager({"math_rule": DomainSpec(options={"answer": "x"})}, num_workers=1)
    with pytest.raises(ValueError, match="num_workers=0"):
        RewardManager({}, num_workers=0)


def test_closing_ends_waiting_answers_and_refuses_new_ones():
    manager = RewardManager({"math_rule": DomainSpec(timeout_s=600)}, num_workers=1)
    manager.submit("5", row(), response_length=1).result(30)
    waiting = [manager.submit(TOWER, row(), response_length=1) for _ in range(3)]
    time.sleep(0.1)
    started = time.monotonic()
    manager.close()
    assert time.monotonic() - started < 5
    assert waiting[0].result(1).failed
    with pytest.raises(RuntimeError, match="closed before"):
        waiting[2].result(1)
    with pytest.raises(RuntimeError, match="closed"):
        manager.submit("5", row(), response_length=1)
    manager.close()
