#!/bin/bash
# DAPO on Qwen3-30B-A3B (128 experts) with fp8 in rollouts and bf16 in training: 2 nodes x 8 GPUs.
#
#   NODE_RANK=0 MASTER_ADDR=node0 bash examples/qwen3_30b_a3b_fp8/fp8_rollouts.sh   # on every node
#
# MODEL is a Hugging Face directory or name. The same command goes on with a run that was stopped. README.md tells more.
FAMILY=qwen3_moe
source "$(dirname "$0")/../launch.sh"
NNODES=${NNODES:-2}
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B-Base}

launch --config examples/qwen3_30b_a3b_fp8/dapo.yaml --load-hf "$MODEL" --run-dir "$RUN_DIR" \
    --rl-rollout-quantization fp8_block \
    --grpo-prompts-per-step 32 --rl-oversampling 96 --train-iters 500 --eval-interval 5 "$@"
