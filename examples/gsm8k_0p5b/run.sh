#!/bin/bash
# GRPO of Qwen2.5-0.5B-Instruct on GSM8K, one GPU: the first run with a real model.
#
#   bash examples/gsm8k_0p5b/run.sh [--quick] [flags]                  model and data from the Hugging Face hub
#   MODEL=/models/Qwen2.5-0.5B-Instruct DATA=/data/gsm8k bash ...      a directory or a GGUF file; train.jsonl and test.jsonl
#   FORM=strict bash ...                                               a number counts only after ####, as in verl
#
# --quick: two small steps of LoRA adapters and their evaluations on a CPU, in at most ten minutes.
FAMILY=qwen2
GPUS_PER_NODE=${GPUS_PER_NODE:-1}
source "$(dirname "$0")/../launch.sh"
NNODES=${NNODES:-1}
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
FORM=${FORM:-last}
QUICK=() FLAGS=()
for word in "$@"; do
    if [ "$word" = --quick ]; then
        QUICK=(--no-bf16 --lora-rank 16 --lr 1e-4 --lr-warmup-iters 0
               --grpo-prompts-per-step 2 --grpo-group-size 4 --global-batch-size 8 --rl-max-new-tokens 96
               --seq-length 512 --rl-sequence-packing-bin-size 512 --train-iters 2 --eval-interval 2 --save-interval 2)
    else
        FLAGS+=("$word")
    fi
done
case "$FORM" in
    strict) STRICT=true ;;
    last) STRICT=false ;;
    *) echo "FORM is last or strict, got '$FORM'" >&2; exit 2 ;;
esac
ENVIRONMENTS=examples/environments/gsm8k_$FORM.yaml
if [ -n "${DATA:-}" ]; then
    for file in train test; do
        [ -f "$DATA/$file.jsonl" ] || { echo "DATA needs a directory with train.jsonl and test.jsonl, got '$DATA'" >&2; exit 2; }
    done
fi
if [ -n "${DATA:-}" ] || [ "${#QUICK[@]}" -gt 0 ]; then
    ENVIRONMENTS=$RUN_DIR/environments.yaml PROBLEMS=1319
    [ "${#QUICK[@]}" -eq 0 ] || PROBLEMS=4
    mkdir -p "$RUN_DIR"
    {
        printf -- '- environment: gsm8k\n  eval_prompts: %s\n  eval_samples: 1\n  args:\n    strict: %s\n' $PROBLEMS $STRICT
        [ -z "${DATA:-}" ] || printf "    path: '%s'\n    test_path: '%s'\n" "$(realpath "$DATA")"/{train,test}.jsonl
    } > "$ENVIRONMENTS"
fi
launch --config examples/gsm8k_0p5b/grpo.yaml --load-hf "$MODEL" --run-dir "$RUN_DIR" \
    --langrl-env-config "$ENVIRONMENTS" "${QUICK[@]}" "${FLAGS[@]}"
