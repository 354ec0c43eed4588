"""Everything that can be found wrong before a model is built, all of it reported together.

The configuration's own rules are `megatron_rl.config.validate`'s; here are the files, names and ports it
mentions. No process group is needed: `--check` calls this, and rank 0 of every launch.
"""

from __future__ import annotations

from megatron_rl.callbacks import Callback
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.flags import flags_of
from megatron_rl.config.rl_config import RLConfig, all_flags
from megatron_rl.environments.child import run_in_children
from megatron_rl.errors import ConfigError, Problem, collecting, shorten
from megatron_rl.registry import Registry
from megatron_rl.run.preflight import inputs, machine, models, starts

_OF_RL = frozenset(flag.name for flag in flags_of(AlgorithmConfig))


def preflight(config: RLConfig, is_run: bool = True) -> list[Problem]:
    """Return all problems; of a model that is only asked, no ``is_run``, without environments and directories."""
    config, wrong = extension_problems(config)
    with collecting(wrong, "--callbacks"):
        callback_classes(config)
    tokenizer, problems = inputs.tokenizer_problems(config)
    return [
        *(machine.output_problems(config) if is_run else ()),
        *problems,
        *(inputs.environment_problems(config, tokenizer) if is_run else ()),
        *starts.checkpoint_problems(config, tokenizer),
        *starts.adapter_problems(config),
        *inputs.hugging_face_problems(config, tokenizer),
        *models.critic_problems(config, tokenizer),
        *models.teacher_problems(config, tokenizer),
        *wrong,
        *machine.quantization_problems(config),
        *machine.attention_problems(config),
        *machine.graph_problems(config),
        *(Problem(line.split()[0], line) for line in machine.determinism_lines(config, kept=False)),
        *machine.service_problems(config),
    ]


def extension_problems(config: RLConfig) -> tuple[RLConfig, list[Problem]]:
    """Find what is wrong with extensions that flags name, called once, and the configuration without those.

    Those of files outside the library run in a process of their own, as environments do: a crash there ends no check.
    """
    skipped = frozenset() if config.training.perform_rl_step else _OF_RL
    flags = {flag.name: flag for flag in all_flags() if flag.names_of and flag.name not in skipped}
    own = [name for name in flags if ":" in (config.value(name) or "")]
    problems: list[Problem] = []
    for name in (name for name in flags if name in _OF_RL and name not in own):
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


def callback_classes(config: RLConfig) -> list[type[Callback]]:
    """Import the classes of `--callbacks`; ``ConfigError`` if one is none."""
    names, registry = config.logging.callbacks, Registry[type]("callback", "megatron_rl", "")  # only users have some
    found = [registry.get(name) if ":" in name else None for name in names]
    for name, kind in zip(names, found, strict=True):
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise ConfigError([f"{shorten(name)} is no subclass of megatron_rl.Callback; write file.py:Class"])
    return found
