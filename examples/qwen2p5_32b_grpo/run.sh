#!/bin/bash
# Qwen2.5-32B, GRPO with DAPO's clipping on DAPO-Math-17k: 8 nodes x 8 GPUs, tensor-parallel size 8.
#
# The flags are those of Megatron-LM's own Qwen2.5-32B example. Flags without a meaning here are listed, with the reason,
# when the run starts; docs/flags.md has them all. TP, PP (pipeline stages) and CP (ranks that share a sequence) choose
# the layout, docs/scaling.md says which. Rollouts over stages have neither Transformer Engine's layers nor CUDA graphs
# yet: with PP above 1 the script does without.
#
# Start it on every node:
#
#   CHECKPOINT=/models/Qwen2.5-32B RUN_DIR=/runs/qwen32b \
#   NNODES=8 NODE_RANK=0 MASTER_ADDR=node0 bash examples/qwen2p5_32b_grpo/run.sh
#
# CHECKPOINT is a Hugging Face directory (config.json, *.safetensors, tokenizer) or a directory of checkpoints, of this
# project or of Megatron-LM in its format torch; the latter need TOKENIZER, a directory or a name on the hub. The same
# command goes on with a run that was stopped. Further flags are passed on and win: `run.sh --train-samples 65536`.
# `python train_rl.py --check --check-world-size 64` with the flags below checks them on one machine without a GPU.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

NNODES=${NNODES:-8}
NODE_RANK=${NODE_RANK:-0}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}

TP=${TP:-8}
PP=${PP:-1}
CP=${CP:-1}
CHECKPOINT=${CHECKPOINT:-checkpoints/qwen2p5_32b}
RUN_DIR=${RUN_DIR:-runs/qwen2p5_32b_grpo}
ENV_CONFIG=${ENV_CONFIG:-examples/qwen2p5_32b_grpo/environments.yaml}
WANDB_PROJECT=${WANDB_PROJECT:-megatron-rl}
WANDB_EXP_NAME=${WANDB_EXP_NAME:-qwen2p5_32b_grpo}
SEED=${SEED:-42}
MAX_SEQ_LENGTH=${MAX_SEQ_LENGTH:-12000}

MODEL=(
    --use-mcore-models
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 27648
    --num-attention-heads 40
    --group-query-attention
    --num-query-groups 8
    --max-position-embeddings 131072
    --position-embedding-type rope
    --use-rotary-position-embeddings
    --rotary-percent 1.0
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --tokenizer-type HuggingFaceTokenizer
    --make-vocab-size-divisible-by 128
)

if [ "$PP" -gt 1 ]; then
    LAYERS=(--transformer-impl local)
else
    LAYERS=(--transformer-impl transformer_engine --enable-cuda-graph)
fi

KERNELS=(
    "${LAYERS[@]}"
    --attention-backend flash
    --bf16
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --no-masked-softmax-fusion
    --te-rng-tracker
    --recompute-granularity selective
    --recompute-activations
)

PARALLEL=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
    --sequence-parallel
    --use-distributed-optimizer
    --data-parallel-random-init
    --distributed-timeout-minutes 60
    --initialize-socket-comms
)

RL=(
    --perform-rl-step
    --langrl-env-config "$ENV_CONFIG"
    --env-config "$ENV_CONFIG"
    --langrl-inference-server-type inplace_megatron
    --grpo-prompts-per-step 64
    --grpo-group-size 16
    --grpo-iterations 1
    --grpo-clamp-eps-lower 0.2
    --grpo-clamp-eps-upper 0.28
    --grpo-kl-beta 0.0
    --grpo-entropy-term-weight 0.0
    --grpo-default-temperature 1.0
    --calculate-per-token-loss
    --rl-use-sequence-packing
    --rl-sequence-packing-algo fifo
    --rl-offload-optimizer-during-inference
    --rl-prompts-per-eval 32
    --inference-max-seq-length "$MAX_SEQ_LENGTH"
    --inference-max-batch-size 32
    --inference-dynamic-batching-buffer-size-gb 20
    --inference-dynamic-batching-num-cuda-graphs 1
    --inference-dynamic-batching-unified-memory-level 1
)

TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1024
    --seq-length "$MAX_SEQ_LENGTH"
    --train-samples 48828125
    --seed "$SEED"
    --optimizer adam
    --lr 1e-6
    --lr-warmup-samples 0
    --weight-decay 0.0
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --adam-eps 1e-8
    --eval-interval 20
    --empty-unused-memory-level 2
    --mock-data
    --num-workers 2
    --no-create-attention-mask-in-dataloader
    --data-cache-path "$RUN_DIR/data_cache"
)

if [ -f "$CHECKPOINT/config.json" ]; then
    START=(--load-hf "$CHECKPOINT" --tokenizer-model "${TOKENIZER:-$CHECKPOINT}")
else
    START=(--pretrained-checkpoint "$CHECKPOINT" --tokenizer-model "${TOKENIZER:-unsloth/Qwen2.5-32B}")
fi

CHECKPOINTS=(
    "${START[@]}"
    --resume
    --save "$RUN_DIR/checkpoints"
    --load "$RUN_DIR/checkpoints"
    --finetune
    --save-interval 20
    --save-retain-interval 120
    --ckpt-format torch_dist
)

LOGGING=(
    --run-dir "$RUN_DIR"
    --tensorboard-dir "$RUN_DIR/tensorboard"
    --tensorboard-log-interval 1
    --wandb-project "$WANDB_PROJECT"
    --wandb-exp-name "$WANDB_EXP_NAME"
    --log-interval 1
    --log-progress
    --log-throughput
    --log-params-norm
    --log-num-zeros-in-grad
    --log-straggler
    --disable-straggler-on-startup
    --straggler-minmax-count 16
    --log-timers-to-tensorboard
    --log-memory-to-tensorboard
    --timing-log-level 1
    --timing-log-option minmax
)

torchrun \
    --nnodes "$NNODES" \
    --node-rank "$NODE_RANK" \
    --nproc-per-node "$GPUS_PER_NODE" \
    --master-addr "$MASTER_ADDR" \
    --master-port "$MASTER_PORT" \
    train_rl.py \
    "${MODEL[@]}" \
    "${KERNELS[@]}" \
    "${PARALLEL[@]}" \
    "${RL[@]}" \
    "${TRAINING[@]}" \
    "${CHECKPOINTS[@]}" \
    "${LOGGING[@]}" \
    "$@"
