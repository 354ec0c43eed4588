"""--deterministic-mode on one GPU: metrics and gradients of two passes over the same batches are equal to the bit.

Run with: bash tests/run.sh tests/gpu
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch

from megatron_rl.platform.cuda import environment_for
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.update import TrainOutcome
from tests.support.tiny import tiny_config
from tests.support.toy import toy_run
from tests.unit.trainer.test_deterministic import CASES

pytestmark = pytest.mark.gpu
LARGER = {
    "hidden_size": 128, "ffn_hidden_size": 256, "grpo_prompts_per_step": 8, "grpo_group_size": 8, "seq_length": 64,
    "rl_max_new_tokens": 32, "bf16": True, "deterministic_mode": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_for(batch_invariant=False).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("case", CASES)
def test_the_same_batches_give_the_same_bits(one_rank: ParallelGroups, case: str) -> None:
    (metrics, gradients), *others = passes(one_rank, LARGER | CASES[case])
    assert metrics and any(bool(each.any()) for each in gradients)
    for own_metrics, own in others:
        assert own_metrics == metrics
        assert all(torch.equal(a, b) for a, b in zip(own, gradients, strict=True))


def passes(groups: ParallelGroups, flags: dict[str, Any], count: int = 4) -> list[tuple[dict, list[torch.Tensor]]]:
    """Metrics and gradients of ``count`` passes over the batches of one step, at a learning rate of 0."""
    run = toy_run(tiny_config(**flags), groups)
    take = _take(run)
    models = [each for each in (run.optimization, run.critic) if each is not None]
    for group in (group for model in models for group in model.optimizer.param_groups):
        group["lr"] = 0.0
    found = []
    for _ in range(count):
        with run.phases.update():
            outcome = take()
        gradients = [p.main_grad.clone() for m in models for p in m.policy.parameters() if p.requires_grad]
        found.append((outcome.metrics, gradients))
    run.closing.close()
    return found


def _take(run: Any) -> Callable[[], TrainOutcome]:
    """The trainer's part of a step."""
    if not run.config.training.perform_rl_step:
        batches = run.batches.pack(run.source.draw(16), seed=1)
        return lambda: run.trainer.step(batches)
    with closing(run.open_journal(1, seed=1)) as journal, run.phases.rollouts():
        rollouts = run.collector.collect(1, run.progress.policy_version, journal)
    samples, rewards = run.samples.build(rollouts.groups, rollouts.numbers, run.progress.policy_version)
    updates = run.batches.updates(samples, run.config.training.global_batch_size, 1)
    return lambda: run.trainer.step(updates, rewards)
