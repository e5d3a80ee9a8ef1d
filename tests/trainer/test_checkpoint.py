import logging
from pathlib import Path

import pytest

from trainer import checkpoint


def _save(run_dir: Path, step: int, keep: int | None = None) -> Path:
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "rank_0.pt").write_bytes(bytes([step]) * 1000)

    return checkpoint.save(run_dir, step, {"step": step}, write, keep)


def test_a_checkpoint_is_found_read_and_the_newest_wins(tmp_path):
    _save(tmp_path, 9)
    newest = _save(tmp_path, 10)  # by number, not by text
    assert checkpoint.find(tmp_path, "auto", None) == newest
    assert checkpoint.read_state(newest) == {"step": 10}
    assert checkpoint.find(tmp_path, "disable", None) is None
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"


def test_only_the_last_n_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        _save(tmp_path, step, keep=2)
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [4, 3]


@pytest.mark.parametrize(
    "damage,text",
    [
        (lambda folder: (folder / "actor" / "rank_0.pt").write_bytes(b"x" * 500), "has 500 bytes, expected 1000"),
        (lambda folder: (folder / "actor" / "rank_0.pt").unlink(), "rank_0.pt is missing"),
        (lambda folder: (folder / "COMPLETE").unlink(), "COMPLETE marker is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_a_word_and_the_previous_one_used(tmp_path, caplog, damage, text):
    previous = _save(tmp_path, 3)
    damage(_save(tmp_path, 4))
    with caplog.at_level(logging.WARNING):
        assert checkpoint.find(tmp_path, "auto", None) == previous
    assert text in caplog.text and "trying the previous one" in caplog.text


def test_going_on_from_an_earlier_step_keeps_its_own_checkpoints(tmp_path):
    """Checkpoints of an abandoned branch must not push out the new ones, nor be resumed from."""
    for step in (2, 4, 6):
        _save(tmp_path, step)
    assert [path.name for path in checkpoint.abandon_after(tmp_path, 2)] == [
        "abandoned_global_step_6",
        "abandoned_global_step_4",
    ]
    assert _save(tmp_path, 3, keep=1).exists()
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [3]


def test_retention_counts_whole_checkpoints_only(tmp_path):
    _save(tmp_path, 4)
    (_save(tmp_path, 6) / "COMPLETE").unlink()
    _save(tmp_path, 7, keep=2)
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [7, 6, 4]


def test_a_named_checkpoint_must_be_whole(tmp_path):
    folder = _save(tmp_path, 4)
    assert checkpoint.find(tmp_path, "resume_path", str(folder)) == folder
    (folder / "actor" / "rank_0.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has 0 bytes, expected 1000.*resume_mode=auto"):
        checkpoint.find(tmp_path, "resume_path", str(folder))
    with pytest.raises(ValueError, match="no such folder"):
        checkpoint.find(tmp_path, "resume_path", str(tmp_path / "nowhere"))


def test_an_interrupted_save_leaves_nothing_under_a_checkpoints_name(tmp_path):
    def interrupted(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 5, {}, interrupted, None)
    assert checkpoint.checkpoints(tmp_path) == []
    assert _save(tmp_path, 5).exists()  # the leftover does not disturb the next try
