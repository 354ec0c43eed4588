# [NAME [CAP]] before the flags, as FlashRL's scripts take them: what the run is called, and the cap of truncated
# importance sampling (TIS), -1 for none. Sourced.
NAME=$(basename "$0" .sh) CAP=-1
if [ $# -gt 0 ] && [[ $1 != --* ]]; then NAME=$1; shift; fi
if [ $# -gt 0 ] && [[ $1 != --* ]]; then CAP=$1; shift; fi
CORRECTION=(--rl-correction none)
if [ "$CAP" != -1 ]; then CORRECTION=(--rl-correction token_tis --rl-correction-cap "$CAP"); fi
RUN_DIR=${RUN_DIR:-${RUNS:-runs}/flash_rl_gsm8k/$NAME}
