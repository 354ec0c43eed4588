"""What a model's parameters are in a parallel layout; run on every rank by `test_global_names.py`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.stored import load_weights
from megatron_rl.checkpoint.tensors import weights_fingerprint
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import initialize, shut_down
from megatron_rl.run.reporting import active_parameters, parameter_norm
from tests.support.tiny import SHAPES, single_thread, tiny_config, tiny_policy


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
