#!/bin/bash
# InfiR2's two conversions before RL: the fine-tuned checkpoint as a Hugging Face directory, and that in power-of-two FP8.
#
#   SFT=/checkpoints/InfiR2_SFT_FP8_stg2 ORIGIN=Qwen/Qwen2.5-7B bash examples/infir2_fp8_7b/prepare.sh
#
# SFT holds checkpoints of this project or is one of them, ORIGIN is the model that was fine-tuned (config.json, tokenizer).
# stage1.sh starts from RUN_DIR/hf; RUN_DIR/hf_fp8 is for other engines: rollouts here quantise the weights in place.
FAMILY=qwen2
source "$(dirname "$0")/../launch.sh"
SFT=${SFT:-checkpoints/InfiR2_SFT_FP8_stg2}
ORIGIN=${ORIGIN:-Qwen/Qwen2.5-7B}
if [ -n "$REHEARSES" ]; then
    SFT=$WORK/sft ORIGIN=$MODEL
    stage "a checkpoint" python tools/checkpoint/convert.py --loader hf --load-dir "$MODEL" --saver core --save-dir "$SFT" --bf16
fi

stage "to Hugging Face" python tools/checkpoint/convert_torch_dist_to_hf.py \
    --input-dir "$SFT" --output-dir "$RUN_DIR/hf" --origin-hf-dir "$ORIGIN"
stage "to FP8" python tools/checkpoint/bf16_cast_fp8.py \
    --input-bf16-hf-path "$RUN_DIR/hf" --output-fp8-hf-path "$RUN_DIR/hf_fp8" --force-pow-2-scale True
table
