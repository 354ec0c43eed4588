#!/usr/bin/env bash
# A language model learns to use two tools over several turns by RL, in minutes, on a CPU.
#
#   bash examples/agent_tools/run.sh [--via step|endpoint|verifiers] [--sandbox] [--seed N] [--run-dir DIR]
#
# Asked `12 fig+7 nut`, it should search for the price of figs, then of nuts, have Python print `12*37+7*45`, and say 759.
# 1. A supervised warm start on demonstrations of which most guess, at once or after the searches. 2. GRPO, reward 1 for
# the right number: the tools win. Calls are in Hermes form, as Qwen's and many others are: docs/environments.md.
#
# With --via endpoint the second stage's samples are led by a plain OpenAI client (environments/shop/harness.py), which
# calls the model at the run's own endpoint; with --via verifiers by a package of that library (shop_vf.py). Either has
# the same tokens for the same seeds, in more time.
#
# With --sandbox the second stage runs the model's Python as it stands, each program in a sandbox of its own
# (docs/sandbox.md); else `python` knows `print` of sums and products, and answers ? to anything else.
set -euo pipefail
cd "$(dirname "$0")/../.."
usage() { echo "usage: bash examples/agent_tools/run.sh [--via step|endpoint|verifiers] [--sandbox] [--seed N] [--run-dir DIR]" >&2; exit 2; }
VIA=step SANDBOX=false SEED=1 RUN_DIR=runs/agent_tools
while [ $# -gt 0 ]; do
    case "$1" in
        --via) VIA=${2:-}; shift 2 || usage ;;
        --sandbox) SANDBOX=true; shift ;;
        --seed) SEED=${2:-}; shift 2 || usage ;;
        --run-dir) RUN_DIR=${2:-}; shift 2 || usage ;;
        *) echo "unknown argument: $1" >&2; usage ;;
    esac
done
EXTRAS=()
case "$VIA" in
    step) WAY=shop ;;
    endpoint) WAY=megatron_rl_environments.shop.harness:ShopHarness EXTRAS=(agents) ;;
    verifiers) WAY=verifiers EXTRAS=(verifiers) ;;
    *) usage ;;
esac
case "$SEED" in ''|*[!0-9]*) echo "--seed needs a number of 0 or more, got '$SEED'" >&2; exit 2 ;; esac
[ -n "$RUN_DIR" ] || { echo "--run-dir needs a directory" >&2; exit 2; }
if [ -e "$RUN_DIR" ]; then echo "$RUN_DIR exists; choose another --run-dir, or remove it" >&2; exit 2; fi

bash tools/setup.sh "${EXTRAS[@]}"
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE
mkdir -p "$RUN_DIR"
python examples/agent_tools/make_tokenizer.py "$RUN_DIR/tokenizer"
# Another seed draws other questions and demonstrations. The name is part of the samples' seeds: it is the same by
# either way.
echo "- {environment: shop, args: {seed: $SEED}}" > "$RUN_DIR/warm_start.yaml"
ARGS="{seed: $SEED, sandbox: $SANDBOX}"
if [ "$VIA" = verifiers ]; then
    ARGS="{package: examples/agent_tools/shop_vf.py, args: {shop: $ARGS}, test_args: {split: test}}"
fi
echo "- {environment: $WAY, name: shop, args: $ARGS}" > "$RUN_DIR/environments.yaml"

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
    --tokenizer-model "$RUN_DIR/tokenizer" --make-vocab-size-divisible-by 16 --seq-length 96
    --use-distributed-optimizer --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --seed "$SEED" "${PRECISION[@]}"
)
echo "== 1. supervised warm start: most demonstrations guess, some use the tools =="
torchrun --standalone --nproc-per-node="$NPROC" train_rl.py "${COMMON[@]}" \
    --langrl-env-config "$RUN_DIR/warm_start.yaml" --train-iters 900 --global-batch-size 32 --micro-batch-size 16 \
    --lr 4e-3 --min-lr 4e-4 --lr-warmup-iters 20 --weight-decay 0.01 \
    --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 270 \
    --log-interval 100 --run-dir "$RUN_DIR/warm_start"

echo "== 2. GRPO over up to six turns: reward 1 for the right number, 0 otherwise =="
exec torchrun --standalone --nproc-per-node="$NPROC" train_rl.py "${COMMON[@]}" \
    --langrl-env-config "$RUN_DIR/environments.yaml" --perform-rl-step \
    --pretrained-checkpoint "$RUN_DIR/warm_start/checkpoints" \
    --grpo-group-size 16 --grpo-prompts-per-step 16 --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.28 \
    --rl-max-new-tokens 24 --micro-batch-size 64 --train-iters 40 --lr 6e-4 --min-lr 2e-4 \
    --lr-decay-style linear --lr-warmup-iters 5 --eval-interval 10 --rl-prompts-per-eval 64 \
    --rl-samples-per-eval-prompt 8 --run-dir "$RUN_DIR"
