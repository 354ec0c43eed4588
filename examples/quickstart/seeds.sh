#!/usr/bin/env bash
# The quickstart on several seeds, and a table of what came out.
#
#   bash examples/quickstart/seeds.sh [--seeds "1 2 3"] [--run-dir DIR]
set -euo pipefail
cd "$(dirname "$0")/../.."
SEEDS="1 2 3 4 5 6 7 8"
RUN_DIR=runs/seeds
while [ $# -gt 0 ]; do
    case "$1" in
        --seeds) SEEDS=$2; shift 2 ;;
        --run-dir) RUN_DIR=$2; shift 2 ;;
        *) echo "usage: bash examples/quickstart/seeds.sh [--seeds \"1 2 3\"] [--run-dir DIR]" >&2; exit 2 ;;
    esac
done
mkdir -p "$RUN_DIR"
for seed in $SEEDS; do
    echo "seed $seed ..."
    bash examples/quickstart/run.sh --seed "$seed" --run-dir "$RUN_DIR/seed_$seed" > "$RUN_DIR/seed_$seed.log" 2>&1 \
        || { tail -n 20 "$RUN_DIR/seed_$seed.log"; exit 1; }
done
.venv/bin/python examples/quickstart/seeds_table.py --run-dir "$RUN_DIR" --seeds $SEEDS
