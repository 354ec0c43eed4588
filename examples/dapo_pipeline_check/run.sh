#!/usr/bin/env bash
# The whole pipe on real competition math, on a CPU: DAPO prompts in, graded completions out, three GRPO steps, AIME.
#
#   bash examples/dapo_pipeline_check/run.sh [--dapo FILE] [--aime FILE] [--run-dir DIR]
#
# The model is tiny and random: it solves nothing, and every reward is -1. What is shown is that data, chat template,
# tokenizer, graders, server, training and evaluation fit together, with every count. Without FILEs the data sets
# come from the Hugging Face hub; without a network:
#
#   bash examples/dapo_pipeline_check/run.sh --dapo environments/dapo/sample.jsonl --aime environments/aime/sample.jsonl
set -euo pipefail
HERE=$PWD
cd "$(dirname "$0")/../.."
usage() { echo "usage: bash examples/dapo_pipeline_check/run.sh [--dapo FILE] [--aime FILE] [--run-dir DIR]" >&2; exit 2; }
DAPO='' AIME='' RUN_DIR=runs/dapo_pipeline_check
while [ $# -gt 0 ]; do
    case "$1" in
        --dapo) DAPO=${2:-}; shift 2 || usage ;;
        --aime) AIME=${2:-}; shift 2 || usage ;;
        --run-dir) RUN_DIR=${2:-}; shift 2 || usage ;;
        *) echo "unknown argument: $1" >&2; usage ;;
    esac
done
# files are the caller's, wherever this is called from
absolute() { case "$1" in '' | /*) echo "$1" ;; *) echo "$HERE/$1" ;; esac; }
DAPO=$(absolute "$DAPO") AIME=$(absolute "$AIME")
bash tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE
mkdir -p "$RUN_DIR"
python examples/dapo_pipeline_check/make_tokenizer.py "$RUN_DIR/tokenizer"
{
    echo "- agent_type: DAPOAgent"
    echo "  weight: 1.0"
    # of a few rows the usual 256th would be none
    if [ -n "$DAPO" ]; then echo "  agent_args: {path: '${DAPO//\'/\'\'}', held_out: 8}"; fi
    echo "- agent_type: AIMEAgent"
    echo "  weight: 0.0"
    echo "  evaluation_only: true"
    if [ -n "$AIME" ]; then echo "  agent_args: {path: '${AIME//\'/\'\'}'}"; fi
} > "$RUN_DIR/environments.yaml"

exec torchrun --standalone --nproc-per-node="${NPROC:-2}" train_rl.py \
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --swiglu --disable-bias-linear \
    --normalization RMSNorm --tokenizer-model "$RUN_DIR/tokenizer" --seq-length 1024 \
    --perform-rl-step --langrl-env-config "$RUN_DIR/environments.yaml" \
    --grpo-prompts-per-step 4 --grpo-group-size 4 --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.28 \
    --rl-keep-zero-variance-groups --rl-max-new-tokens 64 --micro-batch-size 4 --train-iters 3 --lr 1e-4 \
    --use-distributed-optimizer --eval-interval 3 --rl-prompts-per-eval 4 --rl-samples-per-eval-prompt 2 \
    --run-dir "$RUN_DIR" --resume
