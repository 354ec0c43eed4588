"""What the distributed tests run on every rank: small training runs, reported as plain numbers.

A program runs all its variants in one process: starting Python and megatron takes longer than they do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.inference.sampler import sample_seed
from megatron_rl.loop import rl_step
from megatron_rl.models.gpt import rollout_mode
from megatron_rl.platform import current_platform
from megatron_rl.platform.collectives import gather_json
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.run.rl import RLRun
from megatron_rl.supervised import supervised_step
from megatron_rl.trainer import optimizer
from tests.support.tiny import single_thread, tiny_config
from tests.support.toy import toy_run

STEPS, NEW_TOKENS = 2, 20
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
        run.closing.close()
        reports[name] = {
            **completions,
            "sequence_parallel": run.policy.gpt.decoder.layers[0].self_attention.linear_qkv.sequence_parallel,
            "metrics": [{key: row[key] for key in REPORTED if key in row} for row in metrics],
        }
    shut_down()
    return reports


def join(tensor_size: int = 1, stages: int = 1, **changes: Any) -> ParallelGroups:
    """Join the job with ``tensor_size`` x ``stages`` ranks for a copy of the model, and ``changes`` of other sizes."""
    single_thread()
    sizes = {"tensor_model_parallel_size": tensor_size, "pipeline_model_parallel_size": stages}
    config = tiny_config(int(os.environ["WORLD_SIZE"]), **sizes, **changes)
    # Several buckets, as in a model of a real size, so that overlapping has something to put in order.
    optimizer.DistributedDataParallelConfig = partial(optimizer.DistributedDataParallelConfig, bucket_size=4_000)
    return initialize(config.parallel, current_platform())


def toy_config(groups: ParallelGroups, changes: Mapping[str, Any]) -> RLConfig:
    """`tiny_config` for this job, with answers of at most `NEW_TOKENS`.

    Adam's epsilon is large: where a gradient is nearly 0, 1e-8 would blow its rounding up to a visible step.
    """
    stages = groups.pipeline_group.size()
    sizes = {"tensor_model_parallel_size": groups.tensor_group.size(), "pipeline_model_parallel_size": stages}
    short = {} if "perform_rl_step" in changes else {"rl_max_new_tokens": NEW_TOKENS}
    return tiny_config(groups.world_size, adam_eps=1e-4, **sizes, **(short | dict(changes)))


def complete(run: RLRun) -> dict[str, Any]:
    """Sampled and greedy answers of all ranks by task: ``{"sampled": {task: [[id, ...], ...]}, ...}``."""
    draws = run.source.draw(run.config.algorithm.grpo_prompts_per_step)
    run.source.load_state_dict({})
    requests = run.collector.requests_of_this_rank(draws)
    greedy = [replace(r, num_samples=1, sampling=replace(r.sampling, greedy=True)) for r in requests]
    answers = {}
    for kind, wanted in (("sampled", requests), ("greedy", greedy)):
        with rollout_mode(run.policy, run.optimization.wrapped):
            result = run.collector.rollouter.run(wanted, sample_seed(1, kind), policy_version=0)
        own = {
            group.source.task.id: [rollout.completion.token_ids for rollout in group.rollouts]
            for group in result.groups
        }
        answers[kind] = {}
        for part in gather_json(own, run.groups.data_group):
            answers[kind] |= part
    return answers


def save_weights(path: Path, run: RLRun) -> None:
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
