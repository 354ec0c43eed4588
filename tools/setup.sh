#!/usr/bin/env bash
# Make .venv and install the project with pinned versions. A second call with nothing changed takes no time.
#
#   bash tools/setup.sh [extra ...]        extras: test, te
#
# PYTHON=python3.12 picks the interpreter; TORCH="" keeps a torch that is already importable from it (for
# example in an NGC container, with VENV_FLAGS=--system-site-packages).
set -euo pipefail
cd "$(dirname "$0")/.."

pick_python() {
    for candidate in "${PYTHON:-}" python3.12 python3.11 python3; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or 3.12 is needed; none of PYTHON, python3.12, python3.11, python3 is one." >&2
    exit 1
}

extras=$(IFS=,; echo "$*")
wanted=$(cat setup.py constraints.txt | cksum; echo "$extras")
if [ -x .venv/bin/python ] && [ "$(cat .venv/.installed-"${extras:-base}" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
[ -x .venv/bin/python ] || "$(pick_python)" -m venv ${VENV_FLAGS:-} .venv
echo "installing into .venv (about a minute) ..." >&2
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
# torch first and alone: on a machine without a GPU nothing later may replace it by a CUDA build.
TORCH=${TORCH-$(grep '^torch==' constraints.txt)}
[ -z "$TORCH" ] || pip install "$TORCH"
# A CUDA build of torch brings the triton that fits it.
brought='^torch=='
.venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null && brought='^(torch|triton)=='
grep -Ev "$brought" constraints.txt > .venv/constraints.txt
pip install --constraint .venv/constraints.txt --editable ".${extras:+[$extras]}"
echo "$wanted" > .venv/.installed-"${extras:-base}"
