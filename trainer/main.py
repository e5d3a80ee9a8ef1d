"""The one command:  python3 -m trainer.main key=value …

    python3 -m trainer.main model_engine=megatron actor_rollout_ref.model.path=… data.train_files=… …
    python3 -m trainer.main --dry-run …            all checks and a size summary, starts nothing
    python3 -m trainer.main --check-data …         reads the data, prints and writes its report, starts nothing
    python3 -m trainer.main --cfg resolved …       the resolved tree as YAML
    python3 -m trainer.main --explain KEY          type, default and meaning of one key

Exit status: 0 done, 1 the run failed, 2 the configuration or the data is wrong, 3 answers can no longer be scored (the
run can be resumed), 130 interrupted.
"""

from __future__ import annotations

import logging
import signal
import sys

from trainer.config import ConfigErrors, Loaded, load_config, size_summary, to_yaml

log = logging.getLogger("trainer")


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        loaded = load_config(sys.argv[1:] if argv is None else argv)
    except ConfigErrors as errors:
        sys.stderr.write(f"{errors}\n")
        return 2
    for notice in loaded.notices:
        log.warning(notice)
    if loaded.action == "run":
        return run(loaded)
    if loaded.action == "check-data":
        return check_data(loaded)
    text = {
        "dry-run": lambda: size_summary(loaded),
        "cfg": lambda: to_yaml(loaded.config),
        "explain": lambda: loaded.text,
    }
    sys.stdout.write(text[loaded.action]() + "\n")
    return 0


def check_data(loaded: Loaded) -> int:
    """The data report, and nothing else."""
    from trainer.build import report_data

    try:
        sys.stdout.write(report_data(loaded.config) + "\n")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def run(loaded: Loaded) -> int:
    """Build, fit, and close whatever happens. torch and ray are imported only from here on."""
    from trainer.build import build
    from trainer.cluster import WorkerFailed
    from trainer.reward import ScoringStopped

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds through `finally`, so workers end too
    trainer = None
    try:
        trainer = build(loaded)
        trainer.fit()
    except WorkerFailed as error:
        log.error("the run stopped: %s", error)
        return 1
    except ScoringStopped as error:
        log.error("the run stopped: %s; it goes on from %s", error, trainer.save_before_stopping())
        return 3
    except ValueError as error:
        if trainer is not None:
            raise
        sys.stderr.write(f"{error}\n")  # data, tokenizer, checkpoint: for people, no traceback
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if trainer is not None:
            trainer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
