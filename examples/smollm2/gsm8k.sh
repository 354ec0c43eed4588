#!/usr/bin/env bash
# SmolLM2-135M-Instruct on GSM8K: first supervised on the worked solutions, then GRPO. Under ten minutes on an H200, days on a laptop.
#
#   bash examples/smollm2/gsm8k.sh [--quick] [--data DIR] [--seed SEED] [--run-dir DIR] [flags of the GRPO run]
#
# --data is a directory with train.jsonl and test.jsonl as published; without it they come from the Hugging Face hub.
# --quick takes a few steps of few samples, to see that all of it runs. The same command goes on with a run that was stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."

usage() { sed -n '4p' "$0" | cut -c5- >&2; exit 2; }
RUN_DIR=runs/smollm2/gsm8k_sft DATA= SEED=1 FORM=0 FLAGS=()
SFT=(--train-iters 350 --global-batch-size 64 --micro-batch-size 64 --lr-warmup-iters 10)       # three epochs
GRPO=(--train-iters 200 --grpo-prompts-per-step 32 --grpo-group-size 16 --micro-batch-size 64 --lr-warmup-iters 5
      --rl-max-new-tokens 200 --inference-max-batch-size 512
      --eval-interval 50 --rl-prompts-per-eval 1319 --rl-samples-per-eval-prompt 2)
while [ $# -gt 0 ]; do
    case "$1" in
        --data) DATA=${2:-}; shift 2 || usage ;;
        --seed) SEED=${2:-}; shift 2 || usage ;;
        --run-dir) RUN_DIR=${2:-}; shift 2 || usage ;;
        --quick)
            FORM=0.1  # so that even an untrained model has rewards that differ
            SFT=(--train-iters 2 --global-batch-size 4 --micro-batch-size 4)
            GRPO=(--train-iters 2 --grpo-prompts-per-step 4 --grpo-group-size 8 --micro-batch-size 4 --rl-max-new-tokens 64
                  --eval-interval 2 --rl-prompts-per-eval 4 --rl-samples-per-eval-prompt 1)
            shift ;;
        -h|--help) usage ;;
        *) FLAGS+=("$1"); shift ;;
    esac
done
[[ "$SEED" =~ ^[0-9]+$ ]] || { echo "--seed needs a number of 0 or more, got '$SEED'" >&2; exit 2; }
[ -z "$DATA" ] || [ -d "$DATA" ] || { echo "--data needs a directory with train.jsonl and test.jsonl, got '$DATA'" >&2; exit 2; }
[ -n "$RUN_DIR" ] || { echo "--run-dir needs a directory" >&2; exit 2; }

. examples/smollm2/model.sh
PRECISION=()
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    PRECISION=(--bf16)
fi

mkdir -p "$RUN_DIR"
cat > "$RUN_DIR/environments.yaml" <<YAML
- environment: gsm8k
  args:
    strict: true  # a number counts only after ####
    format_reward: $FORM
YAML
if [ -n "$DATA" ]; then
    DATA=$(realpath "$DATA")
    printf "    path: '%s/train.jsonl'\n    test_path: '%s/test.jsonl'\n" "$DATA" "$DATA" >> "$RUN_DIR/environments.yaml"
fi
COMMON=(--langrl-env-config "$RUN_DIR/environments.yaml" --seq-length 512 --clip-grad 1.0 --seed "$SEED" --resume)

torchrun --standalone --nproc-per-node "${NPROC:-1}" train_rl.py "${COMMON[@]}" "${SFT[@]}" "${PRECISION[@]}" \
    --load-hf "$MODEL" --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --weight-decay 0.01 \
    --log-interval 25 --run-dir "$RUN_DIR/sft"
torchrun --standalone --nproc-per-node "${NPROC:-1}" train_rl.py "${COMMON[@]}" "${GRPO[@]}" "${PRECISION[@]}" --perform-rl-step \
    --pretrained-checkpoint "$RUN_DIR/sft/checkpoints" --rl-share-prompts --grpo-kl-beta 0.0 \
    --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.28 --lr 1e-5 --lr-decay-style constant --weight-decay 0.0 \
    --save-interval 50 --keep-last 1 --run-dir "$RUN_DIR" "${FLAGS[@]}"
