#!/usr/bin/env bash
# A package of verifiers, or an OpenEnv server, trained on as it is: a few steps of GRPO on two ranks of a CPU.
#
#   bash examples/bridges/run.sh verifiers|openenv [--run-dir DIR]
#
# Both want even digits of a model that has learnt nothing yet: its reward rises from 0.3 to 0.6 (verifiers,
# 10 steps) or 0.95 (OpenEnv, 20 steps).
set -euo pipefail
cd "$(dirname "$0")/../.."
usage() { echo "usage: bash examples/bridges/run.sh verifiers|openenv [--run-dir DIR]" >&2; exit 2; }
KIND=${1:-}
case "$KIND" in verifiers|openenv) shift ;; *) usage ;; esac
RUN_DIR=runs/bridges_$KIND
while [ $# -gt 0 ]; do
    case "$1" in
        --run-dir) RUN_DIR=${2:-}; shift 2 || usage ;;
        *) echo "unknown argument: $1" >&2; usage ;;
    esac
done
[ -n "$RUN_DIR" ] || usage
if [ -e "$RUN_DIR" ]; then echo "$RUN_DIR exists; choose another --run-dir, or remove it" >&2; exit 2; fi

bash tools/setup.sh agents verifiers
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE
mkdir -p "$RUN_DIR"
python examples/quickstart/make_tokenizer.py "$RUN_DIR/tokenizer"

if [ "$KIND" = verifiers ]; then
    ARGS="{package: examples/bridges/digits_vf.py}" STEPS=10 GROUP=4
else
    # OpenEnv's packages exclude ours, so its server has an environment of its own; OPENENV_PYTHON names another
    PYTHON=${OPENENV_PYTHON:-}
    if [ -z "$PYTHON" ]; then
        PYTHON=$PWD/.venv-openenv/bin/python
        [ -x "$PYTHON" ] || python -m venv .venv-openenv
        "$PYTHON" -m pip install --quiet openenv==0.10.0
    fi
    PORT=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    "$PYTHON" -m uvicorn --app-dir examples/bridges digits_openenv:app --port "$PORT" > "$RUN_DIR/server.log" 2>&1 &
    trap 'kill %1' EXIT
    until grep -q "startup complete" "$RUN_DIR/server.log"; do
        kill -0 %1 || { cat "$RUN_DIR/server.log" >&2; exit 1; }
        sleep 0.2
    done
    ARGS="{url: \"http://127.0.0.1:$PORT\"}" STEPS=20 GROUP=8
fi
cat > "$RUN_DIR/environments.yaml" <<YAML
- {environment: $KIND, name: digits, chat_template: examples/bridges/chat.jinja, args: $ARGS}
YAML

torchrun --standalone --nproc-per-node=2 train_rl.py --perform-rl-step \
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm \
    --disable-bias-linear --untie-embeddings-and-output-weights \
    --tokenizer-model "$RUN_DIR/tokenizer" --make-vocab-size-divisible-by 16 --seq-length 64 \
    --langrl-env-config "$RUN_DIR/environments.yaml" --use-distributed-optimizer \
    --grpo-prompts-per-step 4 --grpo-group-size $GROUP --grpo-kl-beta 0.0 --rl-max-new-tokens 8 --micro-batch-size 64 \
    --train-iters $STEPS --lr 1e-2 --eval-interval $STEPS --rl-prompts-per-eval 8 --rl-samples-per-eval-prompt 1 \
    --run-dir "$RUN_DIR"
