"""The teacher's own configuration: its shape, in the policy's parallel layout."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.config.model import ModelConfig, expert_problems, shape_problems
from megatron_rl.config.parallel import context_problems, expert_parallel_problems, parallel_problems, pipeline_problems
from megatron_rl.config.precision import QuantizationConfig
from megatron_rl.config.rl_config import RLConfig, resolve
from megatron_rl.config.rollout import length_problems
from megatron_rl.config.rules import broken_rules
from megatron_rl.config.teacher import TeacherConfig
from megatron_rl.errors import Problem
from megatron_rl.families import read_model

_POLICYS_OWN = {
    "rl_router_replay": False, "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None,
    "recompute_modules": None,
}  # fmt: skip
"""What the policy's experts were is nothing to the teacher's, and nothing is recomputed without a backward pass."""
_RULES = (
    parallel_problems, context_problems, pipeline_problems, expert_parallel_problems, shape_problems, expert_problems,
    length_problems,
)  # fmt: skip
"""Of what a model's layout and positions allow."""


def teacher_of(config: RLConfig, world_size: int) -> RLConfig:
    """Of a resolved configuration with a teacher: the same run with the teacher in the policy's place.

    Raises:
        ConfigError: its ``config.json`` cannot be read, or is of no known family.
    """
    settings = read_model(config.teacher.rl_teacher_load_hf).architecture.settings()
    settings["group_query_attention"] = True  # megatron ignores the number of groups without it
    if settings["num_experts"] is None:  # dense layers lie on every rank that the policy's experts are shared by
        settings |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    plain = replace(config, model=ModelConfig(), quantization=QuantizationConfig(), teacher=TeacherConfig(), typed={})
    return resolve(plain.with_values(**settings | _POLICYS_OWN), world_size)


def layout_problems(config: RLConfig) -> list[Problem]:
    """Why the teacher cannot have the layout and lengths of a resolved configuration; raises as `teacher_of`."""
    if not config.wants_teacher:
        return []
    size = config.model_parallel_size  # a fault of the number of ranks is the policy's too
    known = {problem.text for problem in broken_rules(config, size, _RULES)}
    name = f"--rl-teacher-load-hf {config.teacher.rl_teacher_load_hf}"
    return [
        Problem("--rl-teacher-load-hf", f"{name}: of this teacher {problem.text}")
        for problem in broken_rules(teacher_of(config, size), size, _RULES)
        if problem.text not in known
    ]
