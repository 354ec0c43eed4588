"""The process in which a user's extensions are imported and called: `extensions` names what did not come back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron_rl.config import RLConfig
from megatron_rl.config.rl_config import all_flags
from megatron_rl.environments.loading_child import Report, main
from megatron_rl.errors import Problem, collecting, shorten


def call(
    report: Report, values: Mapping[str, Any], fields: Collection[str], skip: Collection[str]
) -> dict[str, list[str]]:
    """Of each of the ``fields`` but those to ``skip``: the problems of the extension that it names."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    config, found = RLConfig().with_values(**values), {}
    for flag in (flag for flag in all_flags() if flag.name in fields and flag.name not in skip):
        problems: list[Problem] = []
        spelling = f"--{flag.name.replace('_', '-')}"
        who = f"{spelling} {shorten(values[flag.name])}"
        with collecting(problems):
            for part in values[flag.name].split("+") if flag.name == "rl_correction" else [values[flag.name]]:
                report(flag.name, who, f"{part} was imported")
                with collecting(problems, spelling):
                    flag.names_of.get(part.strip())
            if not problems:
                report(flag.name, who, "it was called on four tokens")
                import torch  # which a file that hangs need not wait for

                from megatron_rl.preflight.trial import call_once

                call_once(config, flag.name, "cuda" if torch.cuda.is_available() else "cpu")
        found[flag.name] = [str(problem) for problem in problems]
    return found


if __name__ == "__main__":
    main({"call": call})
