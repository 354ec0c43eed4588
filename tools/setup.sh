#!/usr/bin/env bash
# Make .venv and install the project with pinned versions. A second call with nothing changed takes no time.
#
#   bash tools/setup.sh [extra ...]        extras: test, te, docs, agents, verifiers, export, evaluate
#
# PYTHON=python3.12 picks the interpreter. One that has everything already (setup.py's versions, on PYTHONPATH too) is
# used as it is: nothing is installed, no network is needed, and .venv/bin only leads to it. INSTALL=1 installs anyway.
# PIP_EXTRA_INDEX_URL with the index of PyTorch's CPU builds (pytorch.org, "Get started") brings a small torch for a
# machine without a GPU; else pip takes the CUDA build, 2.8 GB with its libraries.
# TORCH="" keeps a torch that is already importable (for example in an NGC container, with
# VENV_FLAGS=--system-site-packages) while the rest is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

suitable() {
    for candidate in "${PYTHON:-}" python3.12 python3.11 python3; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            echo "$candidate"
        fi
    done
}

lead_to() {
    mkdir -p .venv/bin
    # The checkout is not installed, so it is put on the path.
    local start="#!/usr/bin/env bash
export PYTHONPATH=$(printf %q "$PWD")\${PYTHONPATH:+:\$PYTHONPATH}
exec $(printf %q "$1")"
    printf '%s "$@"\n' "$start" > .venv/bin/python
    cp .venv/bin/python .venv/bin/python3
    printf '%s -m torch.distributed.run "$@"\n' "$start" > .venv/bin/torchrun
    chmod +x .venv/bin/python .venv/bin/python3 .venv/bin/torchrun
    printf 'export PATH=%q:$PATH\n' "$PWD/.venv/bin" > .venv/bin/activate
    touch .venv/as-it-is
    echo "$1 has everything: nothing is installed" >&2
}

extras=$(IFS=,; echo "$*")
wanted=$(cat setup.py constraints.txt | cksum; echo "$extras")
if [ -x .venv/bin/python ] && [ "$(cat .venv/.installed-"${extras:-base}" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
if [ ! -x .venv/bin/python ] || [ -f .venv/as-it-is ]; then
    mapfile -t found < <(suitable)
    if [ ${#found[@]} = 0 ]; then
        echo "Python 3.11 or 3.12 is needed; none of PYTHON, python3.12, python3.11, python3 is one." >&2
        exit 1
    fi
    for candidate in "${found[@]}"; do
        if [ -z "${INSTALL:-}" ] && "$candidate" tools/has_everything.py "$@" 2>/dev/null; then
            lead_to "$("$candidate" -c 'import sys; print(sys.executable)')"
            exit 0
        fi
    done
    rm -rf .venv
    "${found[0]}" -m venv ${VENV_FLAGS:-} .venv
fi
echo "installing into .venv: some minutes. On Linux pip brings the CUDA build of torch, 2.8 GB with its libraries, unless" >&2
echo "PIP_EXTRA_INDEX_URL has the index of PyTorch's CPU builds (pytorch.org, \"Get started\", CPU)." >&2
pip_install() { .venv/bin/python -m pip --disable-pip-version-check --quiet install --no-compile "$@"; }
# torch first and alone: on a machine without a GPU nothing later may replace it by a CUDA build.
TORCH=${TORCH-$(grep '^torch==' constraints.txt)}
[ -z "$TORCH" ] || pip_install "$TORCH"
# A CUDA build of torch brings the triton that fits it.
brought='^torch=='
.venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null && brought='^(torch|triton)=='
grep -Ev "$brought" constraints.txt > .venv/constraints.txt
pip_install --constraint .venv/constraints.txt --editable ".${extras:+[$extras]}"
# pip would compile 20,000 files with one process. Some packages have files for another Python, which do not compile.
.venv/bin/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1 || true
echo "$wanted" > .venv/.installed-"${extras:-base}"
