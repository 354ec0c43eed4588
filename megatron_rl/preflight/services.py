"""Ports and accounts."""

from __future__ import annotations

import netrc
import os
import socket

from megatron_rl.config import RLConfig


def service_problems(config: RLConfig) -> list[str]:
    """What the run needs of the machine and does not find."""
    return [*_port(config), *_wandb(config)]


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
