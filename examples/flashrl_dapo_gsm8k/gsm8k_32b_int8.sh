#!/bin/bash
# DAPO on GSM8K, Qwen2.5-32B, int8 rollouts; 2 nodes x 8 GPUs.
# SkyRL's run_dapo_gsm8k_flashrl_32b_int8.sh.
#
#   bash examples/flashrl_dapo_gsm8k/gsm8k_32b_int8.sh          on every node
FAMILY=qwen2
source "$(dirname "$0")/../launch.sh"
NNODES=${NNODES:-2}
MODEL=${MODEL:-Qwen/Qwen2.5-32B}
HERE=examples/flashrl_dapo_gsm8k
launch --config $HERE/common.yaml --config $HERE/int8.yaml --config $HERE/gsm8k_32b.yaml \
    --load-hf "$MODEL" --run-dir "$RUN_DIR" "$@"
