"""Everything that can be found wrong before a model is built, all of it reported together."""

from __future__ import annotations

import importlib.util
import netrc
import os
import socket
from collections.abc import Callable
from pathlib import Path

from megatron_rl.config import RLConfig
from megatron_rl.environments.config import check_environments, load_environment_specs
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.metrics.rundir import check_usable
from megatron_rl.tokenizer import load_tokenizer


def preflight(config: RLConfig) -> list[str]:
    """One line for every problem with the files, names and ports a configuration mentions.

    The configuration's own rules are `megatron_rl.config.validate`'s; one rank calls this one.
    """
    checks: tuple[Callable[[RLConfig], list[str]], ...] = (
        _run_directory,
        _tokenizer,
        _environments,
        _checkpoints,
        _algorithms,
        _port,
        _wandb,
        _packages,
    )
    return [problem for check in checks for problem in check(config)]


def _run_directory(config: RLConfig) -> list[str]:
    if config.logging.run_dir is None:
        return []  # already reported as a missing flag
    return check_usable(Path(config.logging.run_dir), resume=resumes(config))


def resumes(config: RLConfig) -> bool:
    """Whether the run continues what its own directory holds: asked for, or `--load` names `--save`."""
    checkpoint = config.checkpoint
    if checkpoint.resume:
        return True
    if checkpoint.load is None or checkpoint.save is None or checkpoint.finetune:
        return False
    return Path(checkpoint.load).resolve() == Path(checkpoint.save).resolve()


def _tokenizer(config: RLConfig) -> list[str]:
    if config.tokenizer.tokenizer_model is None:
        return []
    try:
        load_tokenizer(config.tokenizer.tokenizer_model)
    except ConfigError as error:
        return list(error.problems)
    return []


def _environments(config: RLConfig) -> list[str]:
    path = config.environment.langrl_env_config
    if path is None:
        return []
    problems = check_environments(path)
    if problems or not config.training.perform_rl_step:
        return problems
    if all(spec.evaluation_only for spec in load_environment_specs(path)):
        return [f"{path}: every environment is evaluation_only, so there is nothing to train on; add one that is not"]
    return []


def _checkpoints(config: RLConfig) -> list[str]:
    from megatron_rl.checkpoint import architecture_problems, find_checkpoint, list_checkpoints

    checkpoint = config.checkpoint
    wanted = [(checkpoint.pretrained_checkpoint, "--pretrained-checkpoint")]
    if checkpoint.load is not None and not resumes(config):
        wanted.append((checkpoint.load, "--load"))
    if resumes(config) and checkpoint.save is not None and list_checkpoints(Path(checkpoint.save)):
        wanted.append((checkpoint.save, "--resume"))
    problems = []
    for path, flag in wanted:
        if path is None:
            continue
        try:
            directory = find_checkpoint(path)
            problems += [f"{flag}: {line}" for line in architecture_problems(config, directory)]
        except CheckpointError as error:
            problems.append(f"{flag}: {error}")
    return problems


def _algorithms(config: RLConfig) -> list[str]:
    from megatron_rl.algorithms import discovery

    problems = []
    settings = config.algorithm
    for kind, name in (
        ("advantages", settings.rl_advantage),
        ("losses", settings.rl_policy_loss),
        ("corrections", settings.rl_correction),
    ):
        try:
            discovery.get(kind, name)
        except ConfigError as error:
            problems += error.problems
    return problems


def _port(config: RLConfig) -> list[str]:
    port = config.environment.rl_environment_port
    if port == 0:
        return []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return [
                f"--rl-environment-port {port} cannot be used ({error.strerror}); "
                "choose another one, or 0 for any free port"
            ]
    return []


def _wandb(config: RLConfig) -> list[str]:
    logging = config.logging
    if logging.wandb_project is None or logging.wandb_mode != "online":
        return []
    if os.environ.get("WANDB_API_KEY") or _netrc_knows_wandb():
        return []
    return [
        "--wandb-mode online needs an API key and there is none; set WANDB_API_KEY, run 'wandb login', "
        "or use --wandb-mode offline"
    ]


def _netrc_knows_wandb() -> bool:
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _packages(config: RLConfig) -> list[str]:
    if config.kernels.transformer_impl != "transformer_engine":
        return []
    if importlib.util.find_spec("transformer_engine") is None:
        return [
            "--transformer-impl transformer_engine needs Transformer Engine, which is not installed; "
            "run 'pip install megatron-rl[te]' or use --transformer-impl local"
        ]
    return []
