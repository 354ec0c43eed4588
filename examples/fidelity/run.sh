#!/usr/bin/env bash
# Does quantising the rollouts change what is learned? The quickstart task, and a harder one, in every format.
#
#   bash examples/fidelity/run.sh [--quick] [--seeds "1 2 3"] [--settings "easy hard"] [--run-dir DIR] [--jobs N]
#
# Sets up .venv, then trains recipe x correction x seed (a finished run is not repeated) and writes
# DIR/summary.json (easy), DIR/hard.json, DIR/controls.json and DIR/fidelity.html. --quick: minutes, for a look.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
exec python examples/fidelity/study.py "$@"
