#!/usr/bin/env bash
# A language model learns to reason by RL, from nothing, in minutes, on two ranks.
#
#   bash examples/quickstart/run.sh [--seed N] [--run-dir DIR]
#
# Sets up .venv, then: 1. a supervised warm start that leaves a bad habit, 2. GRPO that corrects it,
# 3. a table and an HTML report. With GPUs the same commands use NCCL, bf16 and CUDA.
set -euo pipefail
cd "$(dirname "$0")/../.."

usage() { echo "usage: bash examples/quickstart/run.sh [--seed N] [--run-dir DIR]" >&2; exit 2; }
SEED=1
RUN_DIR=runs/quickstart
while [ $# -gt 0 ]; do
    case "$1" in
        --seed) SEED=${2:-}; shift 2 || usage ;;
        --run-dir) RUN_DIR=${2:-}; shift 2 || usage ;;
        *) echo "unknown argument: $1" >&2; usage ;;
    esac
done
case "$SEED" in ''|*[!0-9]*) echo "--seed needs a number of 0 or more, got '$SEED'" >&2; exit 2 ;; esac
[ -n "$RUN_DIR" ] || { echo "--run-dir needs a directory" >&2; exit 2; }

bash tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
python examples/quickstart/prepare.py --run-dir "$RUN_DIR" --seed "$SEED"

NPROC=${NPROC:-2}
# Two ranks on two cores: a thread each, and no rank spins while it waits for the other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE
PRECISION=()
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    PRECISION=(--bf16)
    GPUS=$(python -c 'import torch; print(torch.cuda.device_count())')
    [ "$NPROC" -le "$GPUS" ] || NPROC=$GPUS
fi

MODEL=(
    --num-layers 3 --hidden-size 64 --ffn-hidden-size 192
    --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --disable-bias-linear --add-qkv-bias --untie-embeddings-and-output-weights
    --init-method-std 0.125 --embedding-init-method-std 0.5
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$RUN_DIR/tokenizer" --make-vocab-size-divisible-by 16
    --seq-length 64
)
COMMON=(
    --langrl-env-config "$RUN_DIR/environments.yaml"
    --use-distributed-optimizer --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --seed "$SEED" "${PRECISION[@]}"
)

now() { date +%s.%N; }
STARTED=$(now)
echo "== 1. supervised warm start: chains first, then a bad habit (most answers without a chain, slips) =="
torchrun --standalone --nproc-per-node="$NPROC" train_rl.py "${MODEL[@]}" "${COMMON[@]}" \
    --train-iters 1500 --global-batch-size 32 --micro-batch-size 16 \
    --lr 4e-3 --min-lr 4e-4 --lr-warmup-iters 20 --weight-decay 0.01 \
    --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 450 \
    --log-interval 100 --run-dir "$RUN_DIR/warm_start"

WARM=$(now)
echo "== 2. GRPO from that checkpoint: reward 1 for the right number, 0 otherwise =="
torchrun --standalone --nproc-per-node="$NPROC" train_rl.py "${MODEL[@]}" "${COMMON[@]}" \
    --perform-rl-step --pretrained-checkpoint "$RUN_DIR/warm_start/checkpoints" \
    --grpo-group-size 16 --grpo-prompts-per-step 16 --grpo-iterations 1 \
    --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.28 --grpo-kl-beta 0.0 \
    --rl-temperature 1.0 --rl-max-new-tokens 44 --micro-batch-size 64 \
    --train-iters 80 --lr 8e-4 --min-lr 2.4e-4 --lr-decay-style linear --lr-warmup-iters 5 --weight-decay 0.0 \
    --eval-interval 20 --rl-prompts-per-eval 256 --rl-samples-per-eval-prompt 8 \
    --save-interval 40 --run-dir "$RUN_DIR"

python examples/quickstart/summarise.py --run-dir "$RUN_DIR" --times "$STARTED" "$WARM" "$(now)"
