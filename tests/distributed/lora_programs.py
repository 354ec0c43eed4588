"""A LoRA run on several ranks: an update, a checkpoint, one more update. `test_lora.py` goes on with it elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import run_state_of
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.run.weights import Start, start_weights
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import update
from tests.distributed.layout_programs import whole
from tests.support.hugging_face import batch_of
from tests.support.lora import move_b
from tests.support.tiny import VOCABULARY, single_thread, tiny_config, tiny_policy


def lora_config(folder: str | Path, world_size: int, **changes: Any) -> RLConfig:
    """With a large epsilon in Adam, which does not blow rounding up to a visible step."""
    return tiny_config(world_size, lora_rank=4, save=str(folder), adam_eps=1e-4, lr=1e-3, bf16=False, **changes)


def begin_or_go_on(config: RLConfig, groups: ParallelGroups) -> tuple[PolicyModel, Start, CheckpointManager]:
    policy, checkpoints = tiny_policy(config), CheckpointManager(Path(config.checkpoint.save), 0, groups)
    return policy, start_weights(config, policy, checkpoints, groups), checkpoints


def train(policy: PolicyModel, start: Start, groups: ParallelGroups) -> None:
    """One update on the same two sequences everywhere."""
    scorer = Scorer(policy, groups, 1.0)

    def loss(output: torch.Tensor, batch: Any) -> Any:
        return -scorer.select(output, batch).current_logprobs.sum(), torch.tensor(32), {}

    update(start.optimization, [batch_of(VOCABULARY, (20, 12))], scorer.forward, loss)


def adapters(policy: PolicyModel, groups: ParallelGroups) -> dict[str, torch.Tensor]:
    """Of this rank's experts and layers, gathered over its tensor-parallel ranks."""
    found = whole(policy, groups, lambda parameter: parameter.data)
    return {name: values for name, values in found.items() if ".adapter." in name}


def save_between_two_updates(folder: str, cases: Mapping[str, Mapping[str, Any]]) -> None:
    """Checkpoints under ``folder/case``; what the second update made goes to ``folder/case.RANK.pt``."""
    single_thread()
    world_size, groups = int(os.environ["WORLD_SIZE"]), None
    for name, changes in cases.items():
        config = lora_config(Path(folder) / name, world_size, **changes)
        groups = groups or initialize(config.parallel, current_platform())
        policy, start, checkpoints = begin_or_go_on(config, groups)
        move_b(policy, groups)
        start.optimization.reload_main_parameters()
        train(policy, start, groups)
        state = run_state_of(config, policy, [0], step=1, has_optimizer=True, origin=start.origin)
        checkpoints.save(state, policy, start.optimization)
        start.optimization.schedule.set_step(1)
        train(policy, start, groups)
        torch.save(adapters(policy, groups), Path(folder) / f"{name}.{groups.rank}.pt")
    shut_down()
