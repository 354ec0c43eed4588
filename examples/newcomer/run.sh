#!/usr/bin/env bash
# What a new user would try first, as the documents say it: 37 tasks on a CPU, with models of a few kB.
#
#   bash examples/newcomer/run.sh [--run-dir DIR]
#
# A line for each task: its name, seconds, ok or FAILED with the place of its log; the count at the end. Exit code 1 if
# one failed. Code and lists are taken out of the documents: one that is wrong fails here. Later tasks use what earlier
# ones wrote. What each task is: docs/measurements/newcomer.md.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
REPOSITORY=$PWD
WORK=runs/newcomer
case "${1:-}" in
    '') ;;
    --run-dir) WORK=${2:?--run-dir needs a directory} ;;
    *) echo "usage: bash examples/newcomer/run.sh [--run-dir DIR]" >&2; exit 2 ;;
esac
if [ -e "$WORK" ]; then echo "$WORK exists; choose another --run-dir, or remove it" >&2; exit 2; fi
mkdir -p "$WORK/logs" && cd "$WORK" || exit 2
[ ! -d "$REPOSITORY/.venv" ] || export PATH="$REPOSITORY/.venv/bin:$PATH"
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

block() { # block FILE TEXT: the code blocks of a document that contain TEXT
    awk -v text="$2" '/^```/ { if (inside && index(code, text)) printf "%s", code; inside = !inside; code = ""; next }
                      inside { code = code $0 "\n" }' "$REPOSITORY/docs/$1" | grep .
}
said() { grep -qF -- "$1" "$2" || { echo "'$1' is not in $2"; return 1; }; }
says() { local text=$1; shift; "$@" 2>&1 | tee out.txt && said "$text" out.txt; }
refused() { "$@" > out.txt 2>&1; [ $? = 2 ] && cat out.txt; }
SMALL=(--grpo-prompts-per-step 8 --grpo-group-size 4 --micro-batch-size 32 --rl-max-new-tokens 8)
SMALL+=(--lr 5e-4 --train-iters 2)
QUICK=(--config sorting-model.yaml --rl-prompts-per-eval 8 --rl-samples-per-eval-prompt 2)
RL=("${QUICK[@]}" --perform-rl-step --pretrained-checkpoint warm/checkpoints "${SMALL[@]}")
HF=(--perform-rl-step --load-hf tiny --seq-length 256 "${SMALL[@]}")

doctor() { megatron-rl doctor; }
own_environment() {
    block tutorial.md 'class Sorting' > sorting.py &&
    block tutorial.md '- environment: sorting:Sorting' > sorting.yaml &&
    block tutorial.md 'num-layers: 2' | sed 's#runs/sorting/##' > sorting-model.yaml &&
    python "$REPOSITORY/examples/quickstart/make_tokenizer.py" tokenizer 0123456789= &&
    says '600 agree' python -m megatron_rl.environments test sorting:Sorting && megatron-rl new parity &&
    PYTHONPATH=environments says 'gold answers    ok' python -m megatron_rl.environments test parity:Parity
}
supervised_start() {
    megatron-rl train --nproc 1 "${QUICK[@]}" --train-iters 100 --global-batch-size 32 --micro-batch-size 32 \
        --lr 2e-3 --lr-warmup-iters 20 --run-dir warm
}
grpo_two_ranks() { megatron-rl train --nproc 2 "${RL[@]}" --train-iters 4 --save-interval 2 --run-dir grpo; }
stop_and_resume() {
    local words=(megatron-rl train --nproc 1 "${RL[@]}" --train-iters 120 --lr 1e-4 --run-dir stopped) before
    setsid "${words[@]}" > first.txt 2>&1 & local pid=$!
    until grep -q '^step  *2/' first.txt; do kill -0 $pid || { cat first.txt; return 1; }; sleep 0.1; done
    kill -INT $pid && wait $pid || return 1
    before=$(wc -l < stopped/metrics.jsonl) && [ "$before" -lt 120 ] && "${words[@]}" --resume &&
        said '"step": 120,' stopped/metrics.jsonl
}
five_mistakes() {
    refused megatron-rl check "${RL[@]}" --run-dir never --lr -1 --seq-length 0 --grpo-group-size 0 \
        --micro-batch-size 0 --rl-policy-loss nothing.py:Loss && said '5 problem(s)' out.txt &&
        for word in --lr --seq-length --grpo-group-size --micro-batch-size nothing.py; do
            said "$word" out.txt || return 1; done
}
estimate() { says 'MiB a rank' megatron-rl estimate "${RL[@]}" --check-world-size 8; }
own_data_set() {
    for n in $(seq 40); do echo "{\"question\": \"$n+3\", \"sum\": $((n + 3))}"; done > sums.jsonl
    block environments.md 'path: sums.jsonl' > sums.yaml && block environments.md 'def right(' > rewards.py &&
    python "$REPOSITORY/examples/quickstart/make_tokenizer.py" digits &&
    megatron-rl train --nproc 1 "${QUICK[@]}" --perform-rl-step "${SMALL[@]}" --tokenizer-model digits \
        --langrl-env-config sums.yaml --run-dir sums
}
own_loss() {
    block extending.md '# mine.py' > mine.py
    megatron-rl train --nproc 1 "${RL[@]}" --rl-policy-loss mine.py:Reinforce --run-dir loss
}
own_advantage() {
    megatron-rl train --nproc 1 "${RL[@]}" --rl-advantage mine.py:Bounded --rl-advantage-args limit=0.3 \
        --run-dir advantage
}
compare_runs() { says rl_policy_loss megatron-rl compare loss advantage && [ -s compare.html ]; }
report() { rm -f grpo/report.html; megatron-rl report grpo && said 'pass@1' grpo/report.html; }
evaluate() {
    megatron-rl eval "${QUICK[@]}" --load grpo/checkpoints --run-dir evaluated &&
        said 'pass@1' evaluated/evaluation.json
}
evaluate_all() {
    megatron-rl eval "${QUICK[@]}" --load 'grpo/checkpoints/*' --run-dir all && said '"step": 2,' all/metrics.jsonl &&
    said '"step": 4,' all/metrics.jsonl
}
from_hugging_face() {
    python "$REPOSITORY/examples/rehearsal/prepare.py" model qwen2 tiny &&
    head -n 4 "$REPOSITORY/environments/gsm8k/sample.jsonl" > train.jsonl &&
    tail -n 2 "$REPOSITORY/environments/gsm8k/sample.jsonl" > test.jsonl &&
    echo "- {environment: gsm8k, args: {path: train.jsonl, test_path: test.jsonl}}" > gsm8k.yaml &&
    megatron-rl train --nproc 1 "${HF[@]}" --langrl-env-config gsm8k.yaml --run-dir hf
}
to_hugging_face() {
    megatron-rl export --input-dir hf/checkpoints --output-dir exported &&
    python -c 'from transformers import AutoModelForCausalLM as M; print(M.from_pretrained("exported").dtype)'
}
chat() { printf 'What is 2+3?\nAnd 4+5?\n/exit\n' | megatron-rl chat hf --max-new-tokens 8 --temperature 0; }
generate() {
    printf '402137=\n999000=\n' > prompts.txt
    megatron-rl generate grpo --prompts prompts.txt --output answers.jsonl --temperature 0 --max-new-tokens 8 &&
    [ "$(grep -c '"completion"' answers.jsonl)" = 2 ]
}
chat_control() {
    echo "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}[{{ voice }}]" > template.jinja
    megatron-rl train --nproc 1 "${HF[@]}" --langrl-env-config gsm8k.yaml --chat-template template.jinja \
        --chat-template-kwargs '{"voice": "loud"}' --system-prompt 'Answer in one line.' --run-dir chats &&
    says '[system] Answer in one line. [user]' grep -rhFm1 '[loud]' chats/rollouts
}
eight_bits() { megatron-rl train --nproc 1 "${RL[@]}" --rl-rollout-quantization int8 --run-dir int8; }
ppo() {
    megatron-rl train --nproc 1 "${RL[@]}" --rl-advantage gae --grpo-group-size 1 --run-dir ppo &&
        said critic/vf_loss ppo/metrics.jsonl
}
slurm_script() { # of a job of 2 nodes x 8 GPUs: srun would start them, this one asks --check
    mkdir bin && printf '#!/bin/sh\necho node0\n' > bin/scontrol
    printf '#!/bin/sh\nwhile [ "$1" != train_rl.py ]; do shift; done; shift\n' > bin/srun
    echo 'exec megatron-rl check --check-world-size 16 "$@"' >> bin/srun
    chmod +x bin/* && PATH="$PWD/bin:$PATH" SLURM_JOB_NODELIST=nodes MODEL=tiny RUN_DIR=slurm \
        bash "$REPOSITORY/examples/slurm/train.sbatch" --langrl-env-config gsm8k.yaml
}
words_of_trl() {
    refused megatron-rl check --model tiny --learning-rate 1e-6 --num-generations 8 &&
    for flag in --data --lr --grpo-group-size; do said "$flag" out.txt || return 1; done
}
python_api() {
    cat > api.py <<'PYTHON'
import megatron_rl

flags = {"config": "sorting-model.yaml", "rl_prompts_per_eval": 8, "rl_samples_per_eval_prompt": 2}
rl = {"perform_rl_step": True, "pretrained_checkpoint": "warm/checkpoints", "grpo_prompts_per_step": 8,
      "grpo_group_size": 4, "eval_interval": 2, "micro_batch_size": 32, "rl_max_new_tokens": 8, "lr": 5e-4,
      "train_iters": 2}
summary = megatron_rl.train({**flags, **rl, "run_dir": "api"})
print(summary.status, summary.updates, summary.evaluation["after"])
megatron_rl.evaluate({**flags, "load": summary.run_dir / "checkpoints", "run_dir": "api-evaluated"})
print(megatron_rl.generate(summary.run_dir, ["402137="], temperature=0))
PYTHON
    python api.py
}

one_line() { # as TRL has a reward, and a built-in one
    for n in $(seq 40); do echo "{\"question\": \"What is $n plus 3?\", \"answer\": \"$((n + 3))\"}"; done > plain.jsonl
    block cli.md 'def brief(' > trl_reward.py &&
    megatron-rl train --model tiny --data plain.jsonl --reward exact trl_reward.py:brief=0.2 --nproc 1 --train-iters 2 \
        --rl-max-new-tokens 8 --grpo-prompts-per-step 2 --run-dir one && said 'brief' one/metrics.jsonl
}
adapters() {
    megatron-rl train --model tiny --data plain.jsonl --reward trl_reward.py:brief --nproc 1 --train-iters 1 \
        --rl-max-new-tokens 8 --grpo-prompts-per-step 2 --lora-rank 8 --run-dir lora &&
        megatron-rl export --input-dir lora/checkpoints --output-dir peft --format peft &&
        said '"r": 8' peft/adapter_config.json
}
serve() {
    megatron-rl serve tiny --port 0 --token-file token > serve.txt 2>&1 & local pid=$! address
    until address=$(grep -oE 'http://[0-9.:]+/v1' serve.txt); do
        kill -0 $pid || { cat serve.txt; return 1; }; sleep 0.5
    done
    says '"choices"' curl -s "$address/chat/completions" -H "Authorization: Bearer $(cat token)" \
        -d '{"model": "tiny", "messages": [{"role": "user", "content": "2 + 3?"}], "max_tokens": 4}'
    local verdict=$?; kill -INT $pid && wait $pid; return $verdict
}
replay() { says 'the same, log-probs within' megatron-rl replay one --step 2 --group 0 --sample 1; }
translate() {
    printf 'from trl import GRPOConfig\nargs = GRPOConfig(learning_rate=1e-6, num_generations=8)\n' > trl_args.py
    printf 'actor_rollout_ref:\n  rollout: {n: 8}\n' > verl.yaml
    says 'grpo-group-size: 8' megatron-rl convert trl_args.py && says 'grpo-group-size: 8' megatron-rl convert verl.yaml
}
dynamic_sampling() {
    megatron-rl train --nproc 1 "${RL[@]}" --rl-dynamic-sampling --run-dir dynamic &&
        said training/groups_started dynamic/metrics.jsonl
}
tools() { # a chat template that shows tools; no answer is right, so the run ends with 3
    block environments.md 'class Prices' > prices.py && echo '- environment: prices.py:Prices' > prices.yaml &&
    says '176 agree' megatron-rl test prices.py:Prices || return 1
    echo "{{ tools | tojson }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}" > tools.jinja
    megatron-rl train --nproc 1 "${HF[@]}" --seq-length 1024 --langrl-env-config prices.yaml \
        --chat-template tools.jinja --rl-tool-call-parser hermes --run-dir tools
    [ $? = 3 ] && said grade/prices/tool_calls tools/metrics.jsonl
}
two_seeds() {
    megatron-rl train --nproc 1 "${RL[@]}" --rl-policy-loss mine.py:Reinforce --seed 2 --run-dir loss2 &&
        says 'seed' megatron-rl compare loss loss2
}
flat() { # flat NAME BODY WORDS ..: a run with a reward function of this body: exit code 3, and a line that says WORDS
    local name=$1 code
    printf 'def reward(completion, row):\n    %s\n' "$2" > "$name.py"
    sed "s/rewards.py:right/$name.py:reward/" sums.yaml > "$name.yaml"
    megatron-rl train --nproc 1 "${QUICK[@]}" --perform-rl-step "${SMALL[@]}" --tokenizer-model digits \
        --langrl-env-config "$name.yaml" --run-dir "$name" > out.txt 2>&1
    code=$?; cat out.txt; [ $code = 3 ] && said 'reward variance' out.txt && said "$3" out.txt
}
flat_reward() { flat flat 'return 0.0' 'every reward was 0'; } # a grader that gives every completion 0
too_hard() { # sums of 40 digits, which no completion of 8 tokens holds
    flat hard 'return float(str(row["sum"] * 10**40) in completion)' 'every reward was 0'
}
too_easy() { flat easy 'return float(len(completion) >= 0)' 'the tasks are too easy'; } # every completion is right
live_report() { # of a run that goes on: its status, and its curves after more steps
    local words=(megatron-rl train --nproc 1 "${RL[@]}" --train-iters 100000 --eval-interval 2 --run-dir live)
    setsid "${words[@]}" > live.txt 2>&1 & local pid=$!
    until [ -s live/report.html ]; do kill -0 $pid || { cat live.txt; return 1; }; sleep 0.5; done
    said '"status":"running"' live/report.html && said 'of 100000' live/report.html && megatron-rl report live &&
        said '"status":"running"' live/report.html
    local verdict=$?; kill -INT $pid && wait $pid; return $verdict
}
wandb_offline() {
    megatron-rl train --nproc 1 "${RL[@]}" --wandb-project newcomer --wandb-mode offline --run-dir offline &&
        ls offline/wandb/wandb/offline-run-*/run-*.wandb
}

TASKS=(doctor own_environment supervised_start grpo_two_ranks stop_and_resume five_mistakes estimate
    own_data_set own_loss own_advantage compare_runs report evaluate evaluate_all from_hugging_face to_hugging_face chat
    generate chat_control eight_bits ppo slurm_script words_of_trl python_api
    one_line adapters serve replay translate dynamic_sampling tools two_seeds flat_reward
    too_hard too_easy live_report wandb_offline)
passed=0 began=$SECONDS
for task in "${TASKS[@]}"; do
    start=$SECONDS verdict=ok
    "$task" > "logs/$task.txt" 2>&1 < /dev/null && passed=$((passed + 1)) || verdict="FAILED: $WORK/logs/$task.txt"
    printf '%-18s %4d s  %s\n' "$task" $((SECONDS - start)) "$verdict"
done
echo "$passed of ${#TASKS[@]} tasks in $((SECONDS - began)) s"
[ "$passed" = ${#TASKS[@]} ]
