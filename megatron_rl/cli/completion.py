"""``megatron-rl completion bash|zsh``: a script for tab completion that starts no process itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.cli import COMMANDS
from megatron_rl.cli.first_run import FirstRun
from megatron_rl.cli.options import Ranks
from megatron_rl.config.flags import flags_of
from megatron_rl.config.no_effect import no_effect
from megatron_rl.config.rl_config import all_spellings

_FOR_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def main(words: Sequence[str]) -> int:
    """Write the script; 2 if ``words`` name no shell that there is one for."""
    if list(words) not in (["bash"], ["zsh"]):
        sys.stderr.write("usage: source <(megatron-rl completion bash)    or zsh\n")
        return 2
    values: dict[str, str] = {}
    own = {text: (flag, True) for flag in (*flags_of(FirstRun), *flags_of(Ranks)) for text in flag.spellings}
    for text, (flag, _) in (own | all_spellings()).items():
        known = flag.choices if flag.names_of is None else flag.names_of.names()
        values[f"--{text}"] = " ".join(map(str, known))
    values |= {f"--{text}": "" for text in no_effect()}
    cases = "\n".join(f'    *:{text}:*) words="{known}" ;;' for text, known in values.items() if known)
    script = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").replace("@commands@", " ".join(COMMANDS))
    script = script.replace("@values@", cases).replace("@flags@", " ".join(values))
    sys.stdout.write(_FOR_ZSH + script if words[0] == "zsh" else script)
    return 0
