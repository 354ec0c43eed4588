"""What the distributed tests run on every rank: small training runs, reported as plain numbers.

A program runs all its variants in one process: starting Python and megatron takes longer than they do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.build import Run
from megatron_rl.checkpoint import CheckpointManager
from megatron_rl.config import RLConfig
from megatron_rl.inference.sampler import sample_seed
from megatron_rl.loop import rl_step, supervised_step
from megatron_rl.models import rollout_mode
from megatron_rl.parallel import ParallelGroups, initialize, shut_down
from megatron_rl.parallel.collectives import gather_json
from megatron_rl.platform import current_platform
from megatron_rl.trainer import optimizer
from megatron_rl.types import Sample
from tests.support.tiny import single_thread, tiny_config
from tests.support.toy import toy_run

STEPS = 3
FEW = (5,)
"""Ids of samples: fewer than there are ranks."""
REPORTED = ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "actor/lr", "train/loss")


def train_variants(folder: str, tensor_size: int, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Per variant: completions before training, metrics of every step; weights go to ``folder``."""
    groups = join(tensor_size)
    reports = {}
    for name, changes in variants.items():
        run = toy_run(toy_config(groups, changes), groups)
        save_weights(Path(folder) / f"{name}.before.pt", run)
        completions = {} if "perform_rl_step" in changes else complete(run)
        step = supervised_step if "perform_rl_step" in changes else rl_step
        metrics = [step(run, number + 1).metrics for number in range(STEPS)]
        with rollout_mode(run.policy, run.optimization.wrapped):  # all parameters gathered
            save_weights(Path(folder) / f"{name}.after.pt", run)
        run.rollouter.close()
        reports[name] = {
            **completions,
            "metrics": [{key: row[key] for key in REPORTED if key in row} for row in metrics],
        }
    shut_down()
    return reports


def odd_batches(folder: str, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Per variant, one after the other: a usual step, ``FEW`` samples, none, one of NaN, a usual step.

    Weights go to ``folder`` after each.
    """
    groups = join(tensor_size=1)
    reports = {}
    for name, changes in variants.items():
        run = toy_run(toy_config(groups, changes), groups)
        samples = roll_out(run)
        few = [sample for sample in samples if sample.sample_id in FEW]
        poisoned = [replace(few_or_not, advantage=math.nan) for few_or_not in few[:1]]
        stages = {"usual": samples, "few": few, "none": [], "poisoned": poisoned, "after": samples}
        reports[name] = {}
        for stage, kept in stages.items():
            updates = run.batches.updates(kept, num_updates=1, seed=1)
            outcome = run.trainer.step(updates)
            with rollout_mode(run.policy, run.optimization.wrapped):
                save_weights(Path(folder) / f"{name}.{stage}.pt", run)
            reports[name][stage] = {
                "micro_batches": [len(update) for update in updates],
                "skipped": outcome.skipped_updates,
                "metrics": {key: outcome.metrics[key] for key in REPORTED if key in outcome.metrics},
            }
        run.rollouter.close()
    shut_down()
    return reports


def save_while_gathering(folder: str, changes: Mapping[str, Any]) -> list[float]:
    """How far each rank's checkpoint is from the weights of the last update: with overlap they are on their way."""
    groups = join(tensor_size=1)
    run = toy_run(toy_config(groups, changes), groups)
    run.checkpoints = CheckpointManager(Path(folder), 0, groups)
    for step in range(STEPS):
        supervised_step(run, step + 1)
    run.progress.step = STEPS
    run.save()
    with rollout_mode(run.policy, run.optimization.wrapped):
        current = [parameter.detach().clone() for parameter in run.policy.gpt.parameters()]
    run.checkpoints.start_from_weights(folder, run.policy)
    saved = list(run.policy.gpt.parameters())
    distances = [(a - b).abs().max().item() for a, b in zip(current, saved, strict=True)]
    run.rollouter.close()
    shut_down()
    return distances


def place(tensor_size: int) -> dict[str, Any]:
    """Where this rank stands, and who is in its groups."""
    groups = join(tensor_size)
    members = {
        name: dist.get_process_group_ranks(group)
        for name, group in (("tensor", groups.tensor_group), ("data", groups.data_group), ("model", groups.model_group))
    }
    report = members | {
        "indices": [groups.tensor_rank, groups.data_rank],
        "sizes": [groups.tensor_size, groups.data_size],
        "is_main": groups.is_main,
        "leads_model": groups.leads_model,
        "model_leader": groups.model_leader(),
    }
    shut_down()
    return report


def stop_on_one_rank(tensor_size: int, stopped_rank: int) -> dict[str, Any]:
    """A step during which one rank is asked to stop, and the same step afterwards."""
    groups = join(tensor_size)
    # One token an engine step: enough steps for the ranks of a copy to ask each other in between.
    run = toy_run(toy_config(groups, {"rl_decode_steps_per_sync": 1}), groups)
    steps = 0
    engine_step = run.rollouter._engine.step

    def step_until_asked() -> list[Any]:
        nonlocal steps
        steps += 1
        if steps == 2 and groups.rank == stopped_rank:
            run.stop.reason = "SIGTERM"
        return engine_step()

    run.rollouter._engine.step = step_until_asked
    before = run.source.state()
    interrupted = rl_step(run, 1)
    after = run.source.state()
    run.stop.reason = ""
    again = rl_step(run, 1)
    run.rollouter.close()
    shut_down()
    return {"result": interrupted is None, "cursor": before == after, "loss": again.metrics["actor/pg_loss"]}


def roll_out(run: Run) -> Sequence[Sample]:
    """This rank's samples of the first step."""
    requests = run.requests_of_this_rank(run.source.draw(run.config.algorithm.grpo_prompts_per_step))
    with rollout_mode(run.policy, run.optimization.wrapped):
        rollouts = run.rollouter.run(requests, seed=1, policy_version=0)
    return run.samples.build(rollouts.groups).samples


def join(tensor_size: int) -> ParallelGroups:
    """Join the job with ``tensor_size`` ranks for a copy of the model."""
    single_thread()
    config = tiny_config(int(os.environ["WORLD_SIZE"]), tensor_model_parallel_size=tensor_size)
    # Several buckets, as in a model of a real size, so that overlapping has something to put in order.
    optimizer.DistributedDataParallelConfig = partial(optimizer.DistributedDataParallelConfig, bucket_size=4_000)
    return initialize(config.parallel, current_platform())


def toy_config(groups: ParallelGroups, changes: Mapping[str, Any]) -> RLConfig:
    """`tiny_config` for this job.

    Adam's epsilon is large: where a gradient is nearly 0, 1e-8 would blow its rounding up to a visible step.
    """
    fixed = {"tensor_model_parallel_size": groups.tensor_size, "adam_eps": 1e-4}
    return tiny_config(groups.world_size, **fixed, **changes)


def complete(run: Run) -> dict[str, Any]:
    """Sampled and greedy answers of all ranks by task: ``{"sampled": {task: [[id, ...], ...]}, ...}``."""
    draws = run.source.draw(run.config.algorithm.grpo_prompts_per_step)
    run.source.load_state({})
    requests = run.requests_of_this_rank(draws)
    greedy = [replace(r, num_samples=1, sampling=replace(r.sampling, greedy=True)) for r in requests]
    answers = {}
    for kind, wanted in (("sampled", requests), ("greedy", greedy)):
        with rollout_mode(run.policy, run.optimization.wrapped):
            result = run.rollouter.run(wanted, sample_seed(1, kind), policy_version=0)
        own = {
            group.source.task.id: [rollout.completion.token_ids for rollout in group.rollouts]
            for group in result.groups
        }
        answers[kind] = {}
        for part in gather_json(own, run.groups.data_group):
            answers[kind] |= part
    return answers


def save_weights(path: Path, run: Run) -> None:
    """Write the logical weights, whatever the tensor-parallel size; collective."""
    tensor_group = run.groups.tensor_group
    whole = {name: gather_whole(p, tensor_group) for name, p in run.policy.gpt.named_parameters()}
    if run.groups.is_main:
        torch.save(whole, path)


@torch.no_grad()
def gather_whole(parameter: torch.nn.Parameter, tensor_group: dist.ProcessGroup) -> torch.Tensor:
    """The unsharded parameter. A rank of a gated MLP holds ``stride`` 2 pieces: of the gate and of the rest."""
    parts = [torch.empty_like(parameter) for _ in range(tensor_group.size())]
    dist.all_gather(parts, parameter.detach().contiguous(), group=tensor_group)
    if not getattr(parameter, "tensor_model_parallel", False):
        assert all(torch.equal(part, parts[0]) for part in parts), "replicas of a parameter differ"
        return parts[0]
    dim, stride = parameter.partition_dim, parameter.partition_stride
    pieces: Sequence[Sequence[torch.Tensor]] = [part.chunk(stride, dim) for part in parts]
    return torch.cat([rank[index] for index in range(stride) for rank in pieces], dim)
