#!/usr/bin/env bash
# Run the tests: bash scripts/test.sh [pytest arguments]
#   bash scripts/test.sh                       the default set, a few minutes on 2 cores
#   bash scripts/test.sh -m "slow or not slow" everything that needs no special hardware
cd "$(dirname "$0")/.."
source scripts/venv.sh dev
# One test file a worker, one thread a process: the tests start processes of their own.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONHASHSEED=0 # both workers must name the parametrised tests alike
exec python -m pytest -n 2 --dist loadfile "$@"
