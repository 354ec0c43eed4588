#!/bin/bash
# InfiR2's first RL stage: Qwen2.5-7B after its FP8 fine-tuning, answers of up to 8k tokens, 4 nodes x 8 GPUs.
#
#   NODE_RANK=0 MASTER_ADDR=node0 bash examples/infir2_fp8_7b/stage1.sh        # on every node, after prepare.sh
#
# MODEL is a Hugging Face directory or name. README.md tells more; --rehearse tries everything on a CPU.
FAMILY=qwen2
source "$(dirname "$0")/../launch.sh"
after prepare.sh
NNODES=${NNODES:-4}
MODEL=${MODEL:-$RUNS/infir2_fp8_7b/prepare/hf}

launch --config examples/infir2_fp8_7b/rl.yaml --load-hf "$MODEL" --run-dir "$RUN_DIR" \
    --rl-max-new-tokens 8192 --rl-temperature 1.0 "$@"
