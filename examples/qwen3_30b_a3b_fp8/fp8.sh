#!/bin/bash
# DAPO on Qwen3-30B-A3B (128 experts) with fp8 in training and rollouts, blocks of 128 x 128: 2 nodes x 8 GPUs.
#
#   NODE_RANK=0 MASTER_ADDR=node0 bash examples/qwen3_30b_a3b_fp8/fp8.sh            # on every node
#
# MODEL is a Hugging Face directory or name. The same command goes on with a run that was stopped. README.md tells more.
FAMILY=qwen3_moe
source "$(dirname "$0")/../launch.sh"
NNODES=${NNODES:-2}
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B-Base}

launch --config examples/qwen3_30b_a3b_fp8/dapo.yaml --load-hf "$MODEL" --run-dir "$RUN_DIR" \
    --fp8-format e4m3 --fp8-recipe blockwise --rl-rollout-quantization fp8_block --rl-train-backward quantized \
    --grpo-prompts-per-step 128 --rl-oversampling 384 --train-iters 1000 --eval-interval 10 "$@"
