"""The command line: wrong input ends with one line that says what to change."""

from __future__ import annotations

import argparse
import sys

from bridge.cli import convert, plan


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m bridge", description="Hugging Face <-> Megatron-Core weights, without building a model."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    plan.add_command(commands)
    convert.add_command(commands)
    args = parser.parse_args(arguments)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"bridge {args.command}: {error}", file=sys.stderr)
        return 1
    return 0
