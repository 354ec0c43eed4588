#!/bin/bash
# GSM8K's whole test split, greedily and once at temperature 1, on each checkpoint that a pattern names: one table and
# one curve, in bf16 whatever the rollouts ran in. FlashRL's eval_gsm8k.sh; 1 GPU.
#
#   bash examples/flash_rl_gsm8k/eval.sh 'runs/flash_rl_gsm8k/w8a8-TIS-2/checkpoints/*'      into its evaluation/
FAMILY=qwen2
GPUS_PER_NODE=${GPUS_PER_NODE:-1}
if [ $# -gt 0 ] && [[ $1 != --* ]]; then
    CHECKPOINTS=$1 RUN_DIR=${RUN_DIR:-${1%%/checkpoints*}/evaluation}
    shift
fi
source "$(dirname "$0")/../launch.sh"
NNODES=${NNODES:-1}
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
SETTINGS=(--config examples/flash_rl_gsm8k/gsm8k.yaml)

if [ -n "$REHEARSES" ]; then  # first a run that there is something to evaluate of
    launch "${SETTINGS[@]}" --load-hf "$MODEL" --run-dir "$RUN_DIR" "$@"
    mapfile -d '' flags < "$WORK/flags"
    stage "every checkpoint" start "${flags[@]}" --eval-only --load "$RUN_DIR/checkpoints/*" --run-dir "$WORK/all"
    table
else
    : "${CHECKPOINTS:?give the pattern of the checkpoints, in quotes}"
    launch "${SETTINGS[@]}" --hf-config "$MODEL" --tokenizer-model "$MODEL" --eval-only --load "$CHECKPOINTS" \
        --run-dir "$RUN_DIR" "$@"
fi
