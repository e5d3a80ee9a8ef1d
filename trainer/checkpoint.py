"""Checkpoints that are whole or absent.

    <run>/global_step_4/
        actor/…             every rank's shard (written by the engines)
        trainer.json        step, data cursor, controllers, metrics of the step, configuration fingerprint
        config/resolved.yaml
        hf_model/…          on request: loads with transformers
        manifest.json       size of every file above
        COMPLETE            last; without it the folder is not a checkpoint

A save goes to a temporary folder, is flushed to disk, and takes its name by one rename. A load takes the
newest folder whose marker is there and whose files have the sizes of the manifest.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

PREFIX = "global_step_"


def save(run_dir: Path, step: int, state: dict[str, Any], write: Callable[[Path], None], keep: int | None) -> Path:
    """Write checkpoint `step`; `write(folder)` adds the engines' files.

    Keeps this one and the `keep - 1` whole ones before it (None: all). What is damaged is left for people to see.
    """
    final = run_dir / f"{PREFIX}{step}"
    partial = run_dir / f".partial_{PREFIX}{step}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    (partial / "trainer.json").write_text(json.dumps(state, indent=1))
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    manifest = {str(path.relative_to(partial)): path.stat().st_size for path in files}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1))
    (partial / "COMPLETE").touch()
    for path in [*files, partial / "manifest.json", partial / "COMPLETE"]:
        _flush(path)
    for folder in {path.parent for path in files} | {partial}:
        _flush(folder)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)
    _flush(run_dir)
    # verl's name for "the newest step"; for people and scripts, never trusted by `find`.
    (run_dir / "latest_checkpointed_iteration.txt").write_text(str(step))
    if keep is not None:
        older = [path for number, path in checkpoints(run_dir) if number < step and problem(path) is None]
        for path in older[keep - 1 :]:
            shutil.rmtree(path)
    return final


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything that carries a checkpoint's name, newest first."""
    found = [path for path in run_dir.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(((int(path.name.removeprefix(PREFIX)), path) for path in found), reverse=True)


def problem(folder: Path) -> str | None:
    """Why the folder is no complete checkpoint; None if it is one."""
    if not (folder / "COMPLETE").exists():
        return "the COMPLETE marker is missing (the save was interrupted)"
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        return f"manifest.json cannot be read ({error})"
    for name, size in manifest.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, expected {size}"
    return None


def find(run_dir: Path, mode: str, path: str | None) -> Path | None:
    """The checkpoint to resume from. `auto` skips damaged ones with a warning; `resume_path` must be whole."""
    if mode == "disable":
        return None
    if mode == "resume_path":
        reason = problem(Path(path)) if Path(path).is_dir() else "no such folder"
        if reason:
            raise ValueError(
                f"got trainer.resume_from_path={path}: {reason}; expected a complete checkpoint folder; "
                "name another one, or use trainer.resume_mode=auto to take the newest complete one"
            )
        return Path(path)
    for _, folder in checkpoints(run_dir):
        reason = problem(folder)
        if reason is None:
            return folder
        log.warning("checkpoint %s is damaged: %s; trying the previous one", folder, reason)
    return None


def abandon_after(run_dir: Path, step: int) -> list[Path]:
    """Rename checkpoints of later steps: a run that goes on from `step` writes those steps anew."""
    abandoned = []
    for number, path in checkpoints(run_dir):
        if number > step:
            target = path.with_name(f"abandoned_{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            abandoned.append(path.rename(target))
    return abandoned


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "trainer.json").read_text())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
