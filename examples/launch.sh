#!/bin/bash
# What the recipes' scripts share. A script says its model's FAMILY, sources this, sets its defaults and calls
#
#   launch FLAGS... "$@"          torchrun train_rl.py FLAGS, or with one of these among them:
#       --check, --estimate       one process without a GPU, for the recipe's own number of ranks
#       --rehearse                every stage with a tiny random model on two CPU ranks; flags behind it win
#
# RUN_DIR, MODEL, CHECKPOINT, NNODES and GPUS_PER_NODE come from the environment, paths relative to the repository.
# On several nodes the script is started on each, with NODE_RANK, and MASTER_ADDR (the first node) alike on all.
set -euo pipefail
RECIPE=$(basename "$(cd "$(dirname "$0")" && pwd)")
SCRIPT=$(basename "$0" .sh)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v torchrun > /dev/null || export PATH="$PWD/.venv/bin:$PATH"

asks_for() {  # FLAG WORDS...: whether it is among them
    local word
    for word in "${@:2}"; do [ "$word" != "$1" ] || return 0; done
    return 1
}

RUNS=${RUNS:-runs} REHEARSES=
if asks_for --rehearse "$@"; then  # before the script's defaults, which give way
    REHEARSES=yes RUNS=${REHEARSALS:-runs/rehearsal} NNODES=1 GPUS_PER_NODE=2
    WORK=$RUNS/$RECIPE/$SCRIPT.rehearsal
    MODEL=$WORK/model CHECKPOINT=$WORK/model RUN_DIR=$RUNS/$RECIPE/$SCRIPT
    export CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
    rm -rf "${WORK:?}" "${RUN_DIR:?}"
    mkdir -p "$WORK"
    STAGES=${STAGES_OF_ALL:-$WORK/stages}
    python examples/rehearsal/prepare.py model "$FAMILY" "$WORK/model"
fi
RUN_DIR=${RUN_DIR:-$RUNS/$RECIPE/$SCRIPT}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}

after() {  # SCRIPT: a rehearsal begins with that one of the recipe, and starts from what it leaves
    [ -n "$REHEARSES" ] || return 0
    STAGES_OF_ALL=$STAGES bash "examples/$RECIPE/$1" --rehearse
    unset MODEL CHECKPOINT
}

stage() {  # NAME COMMAND...: run it; a rehearsal notes the seconds
    if [ -z "$REHEARSES" ]; then "${@:2}"; return; fi
    echo "== rehearsal of $RECIPE: $SCRIPT: $1 =="
    local began=$SECONDS
    "${@:2}"
    printf '%s\t%s\t%s\n' "$SCRIPT" "$1" $((SECONDS - began)) >> "$STAGES"
}

start() {  # FLAGS...: on all ranks of this node
    local meeting=(--standalone)  # on one node any free port does
    if [ "$NNODES" -gt 1 ]; then
        meeting=(--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}")
    fi
    torchrun --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" "${meeting[@]}" train_rl.py "$@"
}

launch() {
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    # As every start of ours has it unless it is configured; here it can be seen and changed.
    [ -n "${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF=expandable_segments:True
    if [ -n "$REHEARSES" ]; then
        rehearse "$@"
    elif asks_for --check "$@" || asks_for --estimate "$@"; then
        python train_rl.py --check-world-size $((NNODES * GPUS_PER_NODE)) "$@"
    else
        start "$@"
    fi
}

rehearse() {  # FLAGS...: train, export the last checkpoint, evaluate it
    local flags
    python examples/rehearsal/prepare.py flags "$WORK" "$@"
    mapfile -d '' flags < "$WORK/flags"
    stage train start "${flags[@]}"
    [ -z "${STAGES_OF_ALL:-}" ] || return 0  # another script goes on
    stage export python tools/checkpoint/convert_torch_dist_to_hf.py --input-dir "$RUN_DIR" --output-dir "$WORK/hf"
    stage evaluate start "${flags[@]}" --eval-only --load "$RUN_DIR/checkpoints" --run-dir "$WORK/evaluation"
    table
}

table() {  # of a rehearsal, at its end
    [ -z "$REHEARSES" ] || [ -n "${STAGES_OF_ALL:-}" ] || python examples/rehearsal/prepare.py table "$STAGES" "$RUNS/$RECIPE"
}
