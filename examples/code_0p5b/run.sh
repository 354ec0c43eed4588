#!/usr/bin/env bash
# GRPO of Qwen2.5-Coder-0.5B-Instruct on MBPP, judged by HumanEval: code with unit tests, on a CPU in about an hour.
#
#   bash examples/code_0p5b/run.sh [--full] [--quick] [--data DIR] [--seed SEED] [--run-dir DIR] [flags of train]
#
# MODEL is a name on the Hugging Face hub, a directory or a GGUF file. --data has mbpp.jsonl and humaneval.jsonl as
# published; without it both come from the hub. LoRA of rank 16, with --full all weights. --quick: two small steps.
# The tests of an answer run in the sandbox. At the end five answers before and after training are printed.
set -euo pipefail

usage() { sed -n '4p' "$SCRIPT" | cut -c5- >&2; exit 2; }
SCRIPT=$(realpath "$0")
MODEL=${MODEL:-Qwen/Qwen2.5-Coder-0.5B-Instruct} DATA= SEED=1 RUN_DIR=runs/code_0p5b FULL= QUICK= FLAGS=()
TRAINED=(--lora-rank 16 --lr 1e-4)
SIZE=(--train-iters 8 --grpo-prompts-per-step 8 --grpo-group-size 8 --global-batch-size 64 --rl-max-new-tokens 128
      --eval-interval 8 --rl-prompts-per-eval 64 --rl-eval-max-new-tokens 256)
while [ $# -gt 0 ]; do
    case "$1" in
        --full) TRAINED=(--lr 2e-6) FULL=full_; shift ;;
        --quick)
            SIZE=(--train-iters 2 --grpo-prompts-per-step 4 --grpo-group-size 4 --global-batch-size 16
                  --rl-max-new-tokens 96 --eval-interval 2 --rl-prompts-per-eval 4)
            QUICK=quick_
            shift ;;
        --data) DATA=${2:-}; shift 2 || usage ;;
        --seed) SEED=${2:-}; shift 2 || usage ;;
        --run-dir) RUN_DIR=${2:-}; shift 2 || usage ;;
        -h|--help) usage ;;
        *) FLAGS+=("$1"); shift ;;
    esac
done
[[ "$SEED" =~ ^[0-9]+$ ]] || { echo "--seed needs a number of 0 or more, got '$SEED'" >&2; exit 2; }
if [ -n "$DATA" ]; then
    for file in mbpp humaneval; do
        [ -f "$DATA/$file.jsonl" ] || { echo "--data needs a directory with mbpp.jsonl and humaneval.jsonl, got '$DATA'" >&2; exit 2; }
    done
    DATA=$(realpath "$DATA")
fi
[ -n "$RUN_DIR" ] || { echo "--run-dir needs a directory" >&2; exit 2; }
[ ! -e "$MODEL" ] || MODEL=$(realpath "$MODEL")

cd "$(dirname "$SCRIPT")/../.."
bash tools/setup.sh gguf
export PATH="$PWD/.venv/bin:$PATH"
PRECISION=$(python -c 'import torch; from megatron_rl.platform.device import bf16_speedup
print("--bf16" if torch.cuda.is_available() or bf16_speedup() > 1.2 else "")')

python examples/code_0p5b/prepare.py ${DATA:+--data "$DATA"} --output "$RUN_DIR"
python -m megatron_rl.cli train --nproc "${NPROC:-1}" --config examples/code_0p5b/grpo.yaml --load-hf "$MODEL" \
    --langrl-env-config "$RUN_DIR/environments.yaml" --run-dir "$RUN_DIR/$FULL${QUICK}seed_$SEED" --seed "$SEED" \
    "${TRAINED[@]}" "${SIZE[@]}" $PRECISION "${FLAGS[@]}"
python examples/smollm2/summarise.py --run-dirs "$RUN_DIR/$FULL${QUICK}seed_$SEED"
