"""Extensions that the flags name: imported and called once before a run, where nothing that their files do can end it.

Those of files outside the library have a process for that, as environments have (`environments.child`).
"""

from __future__ import annotations

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.flags import flags_of
from megatron_rl.config.rl_config import RLConfig, all_flags
from megatron_rl.environments.child import run_in_children
from megatron_rl.errors import Problem, collecting

OF_RL = frozenset(flag.name for flag in flags_of(AlgorithmConfig))


def extension_problems(config: RLConfig) -> tuple[RLConfig, list[Problem]]:
    """What is wrong with them, and the configuration with defaults in the place of those that must not be imported."""
    skipped = frozenset() if config.training.perform_rl_step else OF_RL
    flags = {flag.name: flag for flag in all_flags() if flag.names_of and flag.name not in skipped}
    own = [name for name in flags if ":" in (config.value(name) or "")]
    problems: list[Problem] = []
    for name in (name for name in flags if name in OF_RL and name not in own):
        from megatron_rl.run.preflight.trial import call_once  # brings torch, which wrong flags need not wait for

        with collecting(problems):
            call_once(config, name)
    if not own:
        return config, problems
    arguments = {"values": {flag.name: config.value(flag.name) for flag in all_flags()}, "fields": own}
    seconds = config.environment.rl_environment_load_timeout
    answer, failures = run_in_children("megatron_rl.run.preflight.trial", "call_own", arguments, seconds)
    found = {name: [line] for name, line in failures.items()} | (answer.result or {})
    problems += [Problem(f"--{name.replace('_', '-')}", line) for name, lines in found.items() for line in lines]
    problems += [Problem(None, line) for line in answer.problems]
    broken = [name for name in own if found.get(name, answer.result is None)]  # all where the process had no answer
    return config.with_values(**{name: flags[name].default or "none" for name in broken}), problems
