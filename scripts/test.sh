#!/usr/bin/env bash
# The fast test suite, in its own .venv: no network beside pip, no GPU needed (tests that need one say so and skip).
# More arguments go to pytest, e.g. scripts/test.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/_venv.sh
venv cpu dev
export OMP_NUM_THREADS=1
if [ $# -eq 0 ]; then
    set -- -m "not slow" -n 2
fi
exec python -m pytest -q "$@"
