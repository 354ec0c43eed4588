#!/usr/bin/env bash
# Set up .venv and run every test.
#
#   bash tests/run.sh [pytest arguments]     bash tests/run.sh --long     also the tests that take minutes
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/setup.sh test
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
ruff check .
lint-imports --no-cache
python -m megatron_rl.config.reference --check
exec python -m pytest "$@"
