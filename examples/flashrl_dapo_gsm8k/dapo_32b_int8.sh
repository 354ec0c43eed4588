#!/bin/bash
# DAPO on DAPO-Math-17k, Qwen2.5-32B, int8 rollouts, TIS with cap 8; 2 nodes x 8 GPUs.
# SkyRL's run_dapo_repro_flashrl_32b_int8.sh.
#
#   bash examples/flashrl_dapo_gsm8k/dapo_32b_int8.sh           on every node
FAMILY=qwen2
source "$(dirname "$0")/../launch.sh"
NNODES=${NNODES:-2}
MODEL=${MODEL:-Qwen/Qwen2.5-32B}
HERE=examples/flashrl_dapo_gsm8k
launch --config $HERE/common.yaml --config $HERE/int8.yaml --config $HERE/dapo_32b.yaml \
    --load-hf "$MODEL" --run-dir "$RUN_DIR" "$@"
