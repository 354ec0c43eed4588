#!/bin/bash
# PPO with a critic on GSM8K, Qwen2.5-0.5B-Instruct, bf16 rollouts; 4 GPUs. FlashRL's gsm8k_qwen0_5b_bf16.sh.
#
#   bash examples/flash_rl_gsm8k/gsm8k_bf16.sh                       without TIS
#   bash examples/flash_rl_gsm8k/gsm8k_bf16.sh bf16-TIS-2 2          with TIS, cap 2
FAMILY=qwen2
GPUS_PER_NODE=${GPUS_PER_NODE:-4}
source "$(dirname "$0")/name_and_cap.sh"
source "$(dirname "$0")/../launch.sh"
NNODES=${NNODES:-1}
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
launch --config examples/flash_rl_gsm8k/gsm8k.yaml "${CORRECTION[@]}" --load-hf "$MODEL" --run-dir "$RUN_DIR" "$@"
