"""Where tasks come from and who grades them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Environments, their server and evaluation on them."""

    langrl_env_config: str | None = flag(None, path=True, aliases=("--env-config",), common=True)
    """YAML list of environments and their weights."""
    langrl_inference_server_type: Literal["inplace_megatron", "inplace_megatron_chat"] = flag(
        "inplace_megatron"
    )
    """What generates rollouts; only inplace_megatron, the training model in its own process, is built."""
    rl_prompts_per_eval: int = flag(64, ge=1, le=1_000_000)
    """Prompts of an evaluation, for each environment (Megatron's default: 32)."""
    rl_samples_per_eval_prompt: int = flag(8, ge=1, le=100_000)
    """Completions of each evaluation prompt."""
    rl_environment_port: int = flag(0, ge=0, le=65535)
    """Port of the environment server on loopback; 0 takes any free one."""
    rl_environment_load_timeout: float = flag(300.0, gt=0, le=86_400)
    """Longest time in seconds that an environment may take to be imported, to be set up, or to list a split's tasks."""
    rl_grade_timeout_seconds: float = flag(30.0, ge=0.001, le=86_400)
    """Longest wait for the grades of one group; after it they count as failed."""
    rl_max_failed_share: float = flag(0.05, ge=0, le=1)
    """Stop the run when more than this share of a step's grades failed."""
