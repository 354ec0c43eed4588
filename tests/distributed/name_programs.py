"""What a model's parameters are in a parallel layout; run on every rank by `test_global_names.py`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import RunState
from megatron_rl.checkpoint.stored import load_weights
from megatron_rl.checkpoint.tensors import weights_fingerprint
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import initialize, shut_down
from megatron_rl.run.reporting import active_parameters, parameter_norm
from megatron_rl.trainer.optimizer import Optimization
from tests.support.tiny import SHAPES, single_thread, tiny_config, tiny_policy
from tests.support.torch_format import write_ours


def models(parallel: dict[str, int], shapes: list[str], **changes: object) -> dict[str, Any]:
    """Of each shape: bits of this rank's parameters added up, fingerprint and norm of the whole model."""
    single_thread()
    found = {}
    configs = {name: tiny_config(int(os.environ["WORLD_SIZE"]), **{**SHAPES[name], **changes}) for name in shapes}
    sizes = {"expert_tensor_parallel_size": None} | parallel
    configs = {name: replace(one, parallel=replace(one.parallel, **sizes)) for name, one in configs.items()}
    groups = initialize(configs[shapes[0]].parallel, current_platform())
    for name, config in configs.items():
        policy = tiny_policy(config)
        found[name] = {
            "parameters": {
                given: [parameter.view(torch.int32).sum().item(), parameter.numel()]
                for given, parameter in policy.named_parameters()
            },
            "fingerprint": weights_fingerprint(policy, groups),
            "norm": parameter_norm(policy, groups),
            "active": active_parameters(policy, groups),
        }
    shut_down()
    return found


def loaded(parallel: dict[str, int], shape: dict[str, Any], directories: list[str]) -> list[int]:
    """Fingerprints of a model that takes its weights from each of ``directories``."""
    single_thread()
    config = tiny_config(int(os.environ["WORLD_SIZE"]), **shape, **parallel)
    groups = initialize(config.parallel, current_platform())
    found = []
    for directory in directories:
        policy = tiny_policy(config, seed=2)
        load_weights(Path(directory), policy, groups)
        found.append(weights_fingerprint(policy, groups))
    shut_down()
    return found


def resumed(parallel: dict[str, int], shape: dict[str, Any], folder: str) -> None:
    """Writes an earlier version's checkpoint after two updates, resumes from it, and writes what it has then."""
    single_thread()
    config = tiny_config(int(os.environ["WORLD_SIZE"]), use_distributed_optimizer=True, **shape, **parallel)
    groups = initialize(config.parallel, current_platform())
    policies = [tiny_policy(config, seed) for seed in (1, 2)]
    first, second = (Optimization(policy, config) for policy in policies)
    for seed in (1, 2):
        first.zero_grad()
        for parameter in policies[0].parameters():
            generator = torch.Generator().manual_seed(seed)
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        assert first.step().applied
    first.schedule.go_to(finished_steps=2)
    state = RunState(step=2)
    before = write_ours(Path(folder, "before"), state, first, groups)
    CheckpointManager(Path(folder), 0, groups).resume(before, policies[1], second)
    write_ours(Path(folder, "after"), state, second, groups)
    shut_down()
