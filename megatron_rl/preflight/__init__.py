"""Everything that can be found wrong before a model is built, all of it reported together.

The configuration's own rules are `megatron_rl.config.validate`'s; here are the files, names and ports it
mentions. No process group is needed: `--check` calls this, and rank 0 of every launch.
"""

from __future__ import annotations

from megatron_rl.config import RLConfig
from megatron_rl.preflight.algorithms import algorithm_problems
from megatron_rl.preflight.attention import attention_problems
from megatron_rl.preflight.checkpoints import (
    checkpoint_problems,
    first_weights,
    reference_weights,
    resumes,
    run_to_continue,
    wants_reference,
)
from megatron_rl.preflight.environments import environment_problems
from megatron_rl.preflight.hugging_face import hugging_face_problems
from megatron_rl.preflight.output import output_problems
from megatron_rl.preflight.quantization import quantization_problems
from megatron_rl.preflight.services import backend_problems, service_problems
from megatron_rl.preflight.text import open_tokenizer, tokenizer_problems

__all__ = [
    "backend_problems", "first_weights", "open_tokenizer", "preflight", "reference_weights", "resumes",
    "run_to_continue", "wants_reference",
]  # fmt: skip


def preflight(config: RLConfig) -> list[str]:
    """One line for every problem: what, why, what instead."""
    tokenizer, problems = tokenizer_problems(config)
    return [
        *output_problems(config),
        *problems,
        *environment_problems(config, tokenizer),
        *checkpoint_problems(config, tokenizer),
        *hugging_face_problems(config, tokenizer),
        *algorithm_problems(config),
        *quantization_problems(config),
        *attention_problems(config),
        *service_problems(config),
    ]
