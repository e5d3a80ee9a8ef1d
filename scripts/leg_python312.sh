#!/usr/bin/env bash
# Optional test leg: the suite on Python 3.12 with megatron-core 0.19.2, the newest line we support.
#   bash scripts/leg_python312.sh DIRECTORY [pytest arguments]
# Makes a virtual environment in DIRECTORY if there is none (about 6 GB: torch comes as the CUDA build; some minutes).
# PYTHON312 names the interpreter where `python3.12` on PATH does not start.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${1:?usage: bash scripts/leg_python312.sh DIRECTORY [pytest arguments]}"
shift

if ! "$venv/bin/python" -c 'import importlib.metadata as m; assert m.version("megatron-core") == "0.19.2"' 2>/dev/null; then
  echo "== making $venv"
  "${PYTHON312:-python3.12}" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check "torch==2.13.0" "megatron-core==0.19.2"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check -e "$root[dev]"
fi
cd "$root"
exec env OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest "$@"
