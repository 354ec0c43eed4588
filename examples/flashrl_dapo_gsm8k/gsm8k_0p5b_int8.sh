#!/bin/bash
# DAPO on GSM8K, Qwen2.5-0.5B-Instruct, int8 rollouts; 4 GPUs.
# SkyRL's run_dapo_gsm8k_flashrl_0.5b_int8.sh.
#
#   bash examples/flashrl_dapo_gsm8k/gsm8k_0p5b_int8.sh
FAMILY=qwen2
GPUS_PER_NODE=${GPUS_PER_NODE:-4}
source "$(dirname "$0")/../launch.sh"
NNODES=${NNODES:-1}
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
HERE=examples/flashrl_dapo_gsm8k
launch --config $HERE/common.yaml --config $HERE/int8.yaml --config $HERE/gsm8k_0p5b.yaml \
    --load-hf "$MODEL" --run-dir "$RUN_DIR" "$@"
