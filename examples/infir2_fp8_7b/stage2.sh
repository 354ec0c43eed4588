#!/bin/bash
# InfiR2's second RL stage: goes on from the first with answers of up to 16k tokens and temperature 1.1, 4 nodes x 8 GPUs.
#
#   NODE_RANK=0 MASTER_ADDR=node0 bash examples/infir2_fp8_7b/stage2.sh        # on every node
#
# START holds the first stage's checkpoints, or is one of them. MODEL is what that stage started from: it says the shape.
FAMILY=qwen2
source "$(dirname "$0")/../launch.sh"
after stage1.sh
NNODES=${NNODES:-4}
MODEL=${MODEL:-$RUNS/infir2_fp8_7b/prepare/hf}
START=${START:-$RUNS/infir2_fp8_7b/stage1/checkpoints}

launch --config examples/infir2_fp8_7b/rl.yaml --hf-config "$MODEL" --pretrained-checkpoint "$START" --run-dir "$RUN_DIR" \
    --rl-max-new-tokens 16384 --rl-temperature 1.1 "$@"
