#!/bin/bash
# DAPO on Qwen2.5-32B, bf16 rollouts; 4 nodes x 8 GPUs. FlashRL's dapo_qwen32b_bf16.sh.
#
#   bash examples/flash_rl_gsm8k/dapo_32b_bf16.sh                    on every node; without TIS
#   bash examples/flash_rl_gsm8k/dapo_32b_bf16.sh bf16-TIS-8 8       with TIS, cap 8
FAMILY=qwen2
source "$(dirname "$0")/name_and_cap.sh"
source "$(dirname "$0")/../launch.sh"
NNODES=${NNODES:-4}
MODEL=${MODEL:-Qwen/Qwen2.5-32B}
launch --config examples/flash_rl_gsm8k/dapo_32b.yaml "${CORRECTION[@]}" --load-hf "$MODEL" --run-dir "$RUN_DIR" "$@"
