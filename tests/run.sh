#!/usr/bin/env bash
# Set up .venv and run every test.
#
#   bash tests/run.sh [pytest arguments]     bash tests/run.sh --long     also the tests that take minutes
#
# Two processes share the tests, a file each at a time; on a GPU, whose memory they measure, one runs all. -n changes it.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/setup.sh test
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
ruff check .
lint-imports --no-cache
python -m tools.budgets
python -m megatron_rl.config.reference --check
workers=2
[ -e /dev/nvidiactl ] && workers=0
# In the order of their folders: runs of many processes come early, so that no long file is left over at the end.
exec python -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder --durations 20 "$@"
