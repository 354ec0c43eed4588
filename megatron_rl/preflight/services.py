"""Ports and accounts."""

from __future__ import annotations

import netrc
import os
import socket
from typing import get_args

from megatron_rl.config import RLConfig
from megatron_rl.metrics.wandb import Mode, wandb_mode


def service_problems(config: RLConfig) -> list[str]:
    """What the run needs of the machine and does not find."""
    return [*backend_problems(config), *_port(config), *_wandb(config)]


def backend_problems(config: RLConfig) -> list[str]:
    """A communication library that this machine cannot use; with --check-world-size the run is for other machines."""
    training, backend = config.training, config.parallel.distributed_backend
    if backend != "nccl" or (training.check and training.check_world_size is not None):
        return []
    from megatron_rl.platform import current_platform  # brings torch, which most checks need not wait for

    if current_platform().is_cuda:
        return []
    return ["--distributed-backend nccl, and there is no CUDA device here; use auto, which is gloo on the CPU"]


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
    mode = wandb_mode(logging.wandb_mode)
    if logging.wandb_project is None:
        return []
    if mode not in get_args(Mode):
        return [f"WANDB_MODE={mode} is not {', '.join(get_args(Mode))}; set one of them, or give --wandb-mode"]
    if mode != "online":
        return []
    if os.environ.get("WANDB_API_KEY") or _netrc_knows_wandb():
        return []
    return [
        "--wandb-mode or WANDB_MODE online needs an API key and there is none; set WANDB_API_KEY, run 'wandb login', "
        "or use --wandb-mode offline"
    ]


def _netrc_knows_wandb() -> bool:
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
