#!/usr/bin/env bash
# Optional test leg: our weight bridge against NVIDIA's Megatron-Bridge, on the CPU.
#   bash scripts/leg_megatron_bridge.sh DIRECTORY [pytest arguments]
# Makes a virtual environment in DIRECTORY if there is none (Python 3.12, about 6 GB, some minutes) and runs the tests
# that need the package; without TransformerEngine, which engines/megatron/megatron_bridge.py stands in for.
# Speed of the package alone: DIRECTORY/bin/python benchmarks/megatron_bridge_baseline.py --tp 2
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${1:?usage: bash scripts/leg_megatron_bridge.sh DIRECTORY [pytest arguments]}"
shift

# Megatron-Bridge 0.6 takes transformers up to 5.12.1 only, below what this project asks for: hence its own
# environment. Its metadata also asks for loggers, vision and CUDA kernels; converting weights needs these alone.
packages=(
  "torch==2.13.0" "megatron-core==0.19.2" "transformers==5.12.1" "safetensors>=0.6,<1" "numpy>=2,<3"
  "accelerate" "datasets" "einops" "hydra-core>=1.3.4,<1.4" "omegaconf>=2.3,<2.4" "peft>=0.18.1" "pyyaml" "regex"
  "rich>=13.9" "six" "tqdm" "pytest>=8.3" "pytest-timeout>=2.3"
)
if ! "$venv/bin/python" -c 'import importlib.metadata as m; assert m.version("megatron-bridge") == "0.6.2"' 2>/dev/null; then
  echo "== making $venv"
  "${PYTHON312:-python3.12}" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check "${packages[@]}"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps "megatron-bridge==0.6.2"
fi
cd "$root"
exec env OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest tests/engines/test_megatron_bridge.py "$@"
