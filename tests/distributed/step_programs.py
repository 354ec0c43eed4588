"""Single steps of several ranks in unusual circumstances; run on every rank by the distributed tests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.algorithms import StepRewards
from megatron_rl.algorithms.batch import Sample
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.inference.engine import Engine
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.inference.staged import StagedEngine
from megatron_rl.loop import rl_step
from megatron_rl.models.gpt import rollout_mode
from megatron_rl.platform import current_platform
from megatron_rl.platform.collectives import broadcast_json
from megatron_rl.platform.groups import initialize, shut_down
from megatron_rl.rollout import conversations
from megatron_rl.rollout.rollouter import Rollouter
from megatron_rl.run.progress import Progress
from megatron_rl.run.reporting import sequence_advantages
from megatron_rl.run.rl import RLRun
from megatron_rl.signals import StopRequest
from megatron_rl.supervised import supervised_step
from megatron_rl.types import Branch, Grade, RolloutGroup
from tests.distributed.programs import REPORTED, STEPS, join, save_weights, toy_config
from tests.support.tiny import tiny_config
from tests.support.tokens import correction
from tests.support.toy import toy_run, toy_tokenizer
from tests.unit.rollout.test_rollouter import ScriptedEngine, make_requests

FEW = (5,)
"""Ids of samples: fewer than there are ranks."""


def odd_batches(folder: str, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Per variant, one after the other: a usual step, ``FEW`` samples, none, samples whose every token is rejected, one
    of NaN, a usual step.

    Weights go to ``folder`` after each.
    """
    groups = join(tensor_size=1)
    reports = {}
    for name, changes in variants.items():
        run = toy_run(toy_config(groups, changes), groups)
        samples, rewards = roll_out(run)
        few = [sample for sample in samples if sample.sample_id in FEW]
        poison = torch.zeros_like(rewards.rewards).index_fill(0, torch.tensor(FEW[:1]), math.nan)
        poisoned = replace(rewards, rewards=rewards.rewards + poison)
        foreign = [replace(sample, inference_logprobs=sample.inference_logprobs - 9) for sample in samples]
        stages = {
            "usual": samples, "few": few, "none": [], "rejected": foreign, "poisoned": few[:1], "after": samples,
        }  # fmt: skip
        rejecting = replace(run.trainer, objective=replace(run.trainer.objective, correction=correction("masked_is")))
        reports[name] = {}
        for stage, kept in stages.items():
            updates = run.batches.updates(kept, batch_size=64, seed=1)
            trainer = rejecting if stage == "rejected" else run.trainer
            outcome = trainer.step(updates, poisoned if stage == "poisoned" else rewards)
            with rollout_mode(run.policy, run.optimization.wrapped):
                save_weights(Path(folder) / f"{name}.{stage}.pt", run)
            reports[name][stage] = {
                "micro_batches": [len(update) for update in updates],
                "applied": outcome.applied_updates,
                "skipped": outcome.skipped_updates,
                "metrics": {key: outcome.metrics[key] for key in REPORTED if key in outcome.metrics},
            }
        run.closing.close()
    shut_down()
    return reports


def train_again(folder: str, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, float]]]:
    """Per variant, the metrics of two steps on one rollout's samples: no rollout gathers parameters between them."""
    groups = join(tensor_size=1)
    reports = {}
    for name, changes in variants.items():
        run = toy_run(toy_config(groups, changes), groups)
        samples, rewards = roll_out(run)
        updates = run.batches.updates(samples, batch_size=64, seed=1)
        steps = [run.trainer.step(updates, rewards).metrics for _ in range(2)]
        reports[name] = [{key: step[key] for key in REPORTED if key in step} for step in steps]
        with rollout_mode(run.policy, run.optimization.wrapped):
            save_weights(Path(folder) / f"{name}.pt", run)
        run.closing.close()
    shut_down()
    return reports


def roll_out(
    run: RLRun, change: Callable[[RolloutGroup], RolloutGroup] = lambda group: group
) -> tuple[Sequence[Sample], StepRewards]:
    """This rank's samples of the first step, from changed groups, and the rewards of all."""
    requests = run.collector.requests_of_this_rank(run.source.draw(run.config.algorithm.grpo_prompts_per_step))
    with rollout_mode(run.policy, run.optimization.wrapped):
        rollouts = run.collector.rollouter.run(requests, seed=1, policy_version=0)
    return run.samples.build(list(map(change, rollouts.groups)), [request.index for request in requests], 0)


def branched(folder: str, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Per variant a step on samples every other of which has branches; weights go to ``folder``."""
    groups = join(tensor_size=1)
    reports = {}
    for name, changes in variants.items():
        run = toy_run(toy_config(groups, changes), groups)
        samples, rewards = roll_out(run, with_branches)
        outcome = run.trainer.step(run.batches.updates(samples, batch_size=8, seed=1), rewards)
        with rollout_mode(run.policy, run.optimization.wrapped):
            save_weights(Path(folder) / f"{name}.pt", run)
        reports[name] = {
            "metrics": outcome.metrics,
            "trained": [list(sequence_advantages(batch)) for update in outcome.updates for batch in update],
            "loss tokens": rewards.loss_tokens.tolist(),
        }
        run.closing.close()
    shut_down()
    return reports


def with_branches(group: RolloutGroup) -> RolloutGroup:
    """Every other answer with two branches: behind its first token others of it in reverse, after two prompts."""
    rollouts = list(group.rollouts)
    for index, rollout in list(enumerate(rollouts))[::2]:
        first, *rest = rollout.completion.token_ids
        ids = (*rest[:1:-1], 3)
        other = replace(rollout.completion, token_ids=ids, inference_logprobs=(-2.5,) * len(ids))
        behind = Branch((*group.prompt_ids, first), other)
        rollouts[index] = replace(rollout, branches=(behind, replace(behind, prompt_ids=(5, *group.prompt_ids))))
    return replace(group, rollouts=tuple(rollouts))


def save_while_gathering(folder: str, changes: Mapping[str, Any]) -> list[float]:
    """How far each rank's checkpoint is from the weights of the last update: with overlap they are on their way."""
    groups = join(tensor_size=1)
    run = toy_run(toy_config(groups, changes), groups)
    run.checkpoints = CheckpointManager(Path(folder), 0, groups)
    for step in range(STEPS):
        supervised_step(run, step + 1)
    run.progress.step = STEPS
    run.save(final=True)
    with rollout_mode(run.policy, run.optimization.wrapped):
        current = [parameter.detach().clone() for parameter in run.policy.gpt.parameters()]
    run.checkpoints.start_from_weights(folder, run.policy)
    saved = list(run.policy.gpt.parameters())
    distances = [(a - b).abs().max().item() for a, b in zip(current, saved, strict=True)]
    run.closing.close()
    shut_down()
    return distances


def stop_on_one_rank(stopped_rank: int, **sizes: int) -> dict[str, Any]:
    """A step during which one rank is asked to stop, and the same step afterwards."""
    groups = join(**sizes)
    # One token an engine step: enough steps for the ranks of a copy to ask each other in between.
    run = toy_run(toy_config(groups, {"rl_decode_steps_per_sync": 1}), groups)
    steps, under_way = 0, []
    kind = StagedEngine if groups.pipeline_group.size() > 1 else RolloutEngine
    engine_step, engine_abort = kind.step, kind.abort

    def step_until_asked(engine: Engine) -> list[Any]:
        nonlocal steps
        steps += 1
        if steps == 2 and groups.rank == stopped_rank:
            run.stop.reason = "SIGTERM"
        return engine_step(engine)

    def abort(engine: Engine) -> None:
        under_way.append(any(lane.is_paused for lane in getattr(engine, "lanes", ())))
        engine_abort(engine)

    kind.step, kind.abort = step_until_asked, abort
    before = run.source.state_dict()
    interrupted = rl_step(run, 1)
    after = run.source.state_dict()
    run.stop.reason = ""
    again = rl_step(run, 1)
    run.closing.close()
    shut_down()
    loss = again.metrics["actor/pg_loss"]
    return {"result": interrupted is None, "cursor": before == after, "loss": loss, "under way": any(under_way)}


def one_copy_generates() -> dict[str, int]:
    """A rollout of two model copies that share experts; the second has nothing to generate."""
    groups = join(tensor_size=1)
    groups = replace(groups, lockstep_group=dist.group.WORLD)
    engine = ScriptedEngine(finish_at=[3])

    async def graded(_: str, items: Sequence[Any]) -> list[Grade]:
        return [Grade(1.0)] * len(items)

    rollouter = Rollouter(engine, toy_tokenizer(), groups, graded, StopRequest())
    result = rollouter.run(make_requests(1 - groups.rank), seed=1, policy_version=0)
    rollouter.close()
    shut_down()
    return {"steps": engine.steps, "groups": len(result.groups)}


def slow_grades(max_turns: int) -> int:
    """How often the leader of a copy tells the others of answers, while the engine takes 24 steps."""
    groups, engine, told = join(tensor_size=2), ScriptedEngine(finish_at=[3, 24]), []

    async def graded(_: str, items: Sequence[Any]) -> list[Grade]:
        while engine.steps < 20:
            await asyncio.sleep(0)
        return [Grade(1.0)] * len(items)

    def counted(*given: Any) -> Any:
        told.append(1)
        return broadcast_json(*given)

    conversations.broadcast_json = counted
    settings = conversations.ConversationSettings({"toy": max_turns}, 64)
    rollouter = Rollouter(engine, toy_tokenizer(), groups, graded, StopRequest(), conversations=settings)
    assert len(rollouter.run(make_requests(2), seed=1, policy_version=0).groups) == 2
    rollouter.close()
    shut_down()
    return len(told)


def keep_the_best() -> list[bool]:
    """Whether three evaluations are the best so far, where the second rank sees other figures or none."""
    groups = join(tensor_size=2)
    config = toy_config(groups, {"eval_interval": 1, "keep_best": "val/toy/maj@k"})
    run = SimpleNamespace(config=config, progress=Progress())
    seen = ({"val/toy/maj@k": 0.5}, {"val/toy/maj@k": 0.4}, {"val/toy/maj@k": 0.6})
    others = ({}, {"val/toy/maj@k": 0.9}, {"val/toy/maj@k": 0.1})
    decided = [RLRun.is_best(run, metrics) for metrics in (seen if groups.is_main else others)]
    shut_down()
    return decided


def members(parallel: Mapping[str, int]) -> dict[str, list[int]]:
    """Who is in this rank's groups."""
    groups = initialize(replace(tiny_config().parallel, **parallel), current_platform())
    found = {
        name: dist.get_process_group_ranks(getattr(groups, f"{name}_group"))
        for name in ("context", "data", "rollout", "model", "loss")
    }
    shut_down()
    return found


def place(tensor_size: int) -> dict[str, Any]:
    """Where this rank stands, and who is in its groups."""
    groups = join(tensor_size)
    members = {
        name: dist.get_process_group_ranks(group)
        for name, group in (("tensor", groups.tensor_group), ("data", groups.data_group), ("model", groups.model_group))
    }
    report = members | {
        "indices": [groups.tensor_group.rank(), groups.data_group.rank()],
        "sizes": [groups.tensor_group.size(), groups.data_group.size()],
        "is_main": groups.is_main,
        "leads_model": groups.leads_model,
        "model_leader": groups.model_leader(),
    }
    shut_down()
    return report
