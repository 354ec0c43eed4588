"""What every rank of `test_hugging_face_ranks` runs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.checkpoint.layout import commit, temporary_directory
from megatron_rl.checkpoint.run_state import ModelFacts, RunState, architecture_of, write_run_state
from megatron_rl.checkpoint.tensors import fingerprints, save_tensors
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.families import read_model
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from tests.support.hugging_face import batch_of, hf_run, loaded_policy, packed_logits
from tests.support.tiny import single_thread


def on_ranks(
    tensor_size: int, directories: list[str], folder: str, stages: int = 1, expert_size: int = 1, cut: int | None = None
) -> list[dict[str, Any]]:
    """Load each directory, write this rank's logits beside it, and make a checkpoint of the model."""
    single_thread()
    changes: dict[str, object] = {"tensor_model_parallel_size": tensor_size, "sequence_parallel": True}
    if cut is not None:
        changes |= {"expert_model_parallel_size": expert_size, "expert_tensor_parallel_size": cut}
    reports, groups = [], None
    for index, directory in enumerate(directories):
        config = hf_run(Path(directory), int(os.environ["WORLD_SIZE"]), **changes)
        sizes = {"pipeline_model_parallel_size": stages, "expert_model_parallel_size": expert_size}
        config = replace(config, parallel=replace(config.parallel, **sizes))
        groups = groups or initialize(config.parallel, current_platform())
        model = read_model(directory)
        policy, read = loaded_policy(config, model.architecture.vocab_size)
        logits = packed_logits(policy, batch_of(model.architecture.vocab_size))
        torch.save(logits, Path(folder) / f"logits.{index}.{groups.rank}.pt")
        _save_checkpoint(Path(folder) / f"checkpoints.{index}", config, policy, groups)
        parameters = {name: parameter.numel() for name, parameter in policy.named_parameters()}
        reports.append({"read": read, "parameters": parameters, "rows": policy.padded_vocab_size,
                        "fingerprints": fingerprints(policy, groups)})  # fmt: skip
    shut_down()
    return reports


def _save_checkpoint(root: Path, config: RLConfig, policy: PolicyModel, groups: ParallelGroups) -> None:
    target = temporary_directory(root, 1)
    target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    save_tensors(target, policy, None)
    if groups.is_main:
        state = RunState(step=1, model=ModelFacts(architecture_of(config.architecture())))
        write_run_state(target, state)
        commit(root, 1)
    dist.barrier()
