#!/bin/bash
# Qwen2.5-32B, GRPO with DAPO's clipping on DAPO-Math-17k, pass@32 on AIME 2024: 8 nodes x 8 GPUs, tensor-parallel size 8.
#
#   CHECKPOINT=/models/Qwen2.5-32B RUN_DIR=/runs/qwen32b NODE_RANK=0 MASTER_ADDR=node0 \
#   bash examples/qwen2p5_32b_grpo/run.sh                                                   # on every node
#
# CHECKPOINT is a Hugging Face directory or name, or a directory of checkpoints, of this project or of Megatron-LM; the
# latter take their tokenizer from TOKENIZER. TP, PP (pipeline stages) and CP (ranks that share a sequence) choose the
# layout, docs/scaling.md says which. The same command goes on with a run that was stopped; further flags win.
FAMILY=qwen2
source "$(dirname "$0")/../launch.sh"
NNODES=${NNODES:-8} TP=${TP:-8} PP=${PP:-1} CP=${CP:-1}
CHECKPOINT=${CHECKPOINT:-Qwen/Qwen2.5-32B}

if [ -d "$CHECKPOINT" ] && [ ! -f "$CHECKPOINT/config.json" ]; then
    START=(--pretrained-checkpoint "$CHECKPOINT" --tokenizer-model "${TOKENIZER:-unsloth/Qwen2.5-32B}")
else
    START=(--load-hf "$CHECKPOINT" ${TOKENIZER:+--tokenizer-model "$TOKENIZER"})
fi

launch --config examples/qwen2p5_32b_grpo/grpo.yaml "${START[@]}" --run-dir "$RUN_DIR" \
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" --context-parallel-size "$CP" \
    ${WANDB_PROJECT:+--wandb-project "$WANDB_PROJECT" --wandb-exp-name "${WANDB_EXP_NAME:-qwen2p5_32b_grpo}"} "$@"
