#!/bin/bash
# GRPO of Qwen2.5-0.5B-Instruct on GSM8K, one GPU: the first run with a real model.
#
#   bash examples/gsm8k_0p5b/run.sh                                        model and data from the Hugging Face hub
#   MODEL=/models/Qwen2.5-0.5B-Instruct bash examples/gsm8k_0p5b/run.sh    a local directory
FAMILY=qwen2
GPUS_PER_NODE=${GPUS_PER_NODE:-1}
source "$(dirname "$0")/../launch.sh"
NNODES=${NNODES:-1}
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
launch --config examples/gsm8k_0p5b/grpo.yaml --load-hf "$MODEL" --run-dir "$RUN_DIR" "$@"
