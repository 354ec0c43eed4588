#!/usr/bin/env bash
# A language model learns to call a tool by RL over two turns, in minutes, on a CPU.
#
#   bash examples/calculator/run.sh [--seed N] [--run-dir DIR]
#
# 1. A supervised warm start on demonstrations of which most guess: `37*46=` gets `#1712`, and only some call the
#    calculator: `<37*46>`, read `=1702,`, say `#1702`. 2. GRPO, reward 1 for the right number: the calls win.
set -euo pipefail
cd "$(dirname "$0")/../.."
usage() { echo "usage: bash examples/calculator/run.sh [--seed N] [--run-dir DIR]" >&2; exit 2; }
SEED=1 RUN_DIR=runs/calculator
while [ $# -gt 0 ]; do
    case "$1" in
        --seed) SEED=${2:-}; shift 2 || usage ;;
        --run-dir) RUN_DIR=${2:-}; shift 2 || usage ;;
        *) echo "unknown argument: $1" >&2; usage ;;
    esac
done
case "$SEED" in ''|*[!0-9]*) echo "--seed needs a number of 0 or more, got '$SEED'" >&2; exit 2 ;; esac
[ -n "$RUN_DIR" ] || { echo "--run-dir needs a directory" >&2; exit 2; }
if [ -e "$RUN_DIR" ]; then echo "$RUN_DIR exists; choose another --run-dir, or remove it" >&2; exit 2; fi

bash tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE
mkdir -p "$RUN_DIR"
python examples/quickstart/make_tokenizer.py "$RUN_DIR/tokenizer" '0123456789+-*=,#<>?'

NPROC=${NPROC:-2}
PRECISION=()
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    PRECISION=(--bf16)
    GPUS=$(python -c 'import torch; print(torch.cuda.device_count())')
    [ "$NPROC" -le "$GPUS" ] || NPROC=$GPUS
fi
COMMON=(
    --num-layers 3 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4
    --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --add-qkv-bias
    --untie-embeddings-and-output-weights --init-method-std 0.125 --embedding-init-method-std 0.5
    --tokenizer-model "$RUN_DIR/tokenizer" --make-vocab-size-divisible-by 16 --seq-length 64
    --langrl-env-config examples/calculator/environments.yaml
    --use-distributed-optimizer --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --seed "$SEED" "${PRECISION[@]}"
)
echo "== 1. supervised warm start: most demonstrations guess, some call the calculator =="
torchrun --standalone --nproc-per-node="$NPROC" train_rl.py "${COMMON[@]}" \
    --train-iters 1200 --global-batch-size 32 --micro-batch-size 16 \
    --lr 4e-3 --min-lr 4e-4 --lr-warmup-iters 20 --weight-decay 0.01 \
    --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 400 \
    --log-interval 100 --run-dir "$RUN_DIR/warm_start"

echo "== 2. GRPO over two turns: reward 1 for the right number, 0 otherwise =="
exec torchrun --standalone --nproc-per-node="$NPROC" train_rl.py "${COMMON[@]}" \
    --perform-rl-step --pretrained-checkpoint "$RUN_DIR/warm_start/checkpoints" \
    --grpo-group-size 16 --grpo-prompts-per-step 16 --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.28 \
    --rl-max-new-tokens 16 --micro-batch-size 64 --train-iters 40 --lr 8e-4 --min-lr 2.4e-4 \
    --lr-decay-style linear --lr-warmup-iters 5 --eval-interval 10 --rl-prompts-per-eval 128 \
    --rl-samples-per-eval-prompt 8 --run-dir "$RUN_DIR"
