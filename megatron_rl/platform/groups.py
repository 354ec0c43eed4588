"""Start torch.distributed and megatron's groups, hand them out by name, and seed their random numbers."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_rl.config.parallel import KernelConfig, ParallelConfig
from megatron_rl.families import Parameter
from megatron_rl.platform import Platform
from megatron_rl.platform.cuda import environment_for
from megatron_rl.platform.megatron import use_trainable_memory_buffer


@dataclass(frozen=True)
class ExpertGroups:
    """The groups that share the experts of this rank's layers."""

    parallel: dist.ProcessGroup
    """Ranks that share the experts of each layer: equally many each."""
    tensor: dist.ProcessGroup
    """Ranks that share each of their experts, as those of `ParallelGroups.tensor_group` share the other linears."""
    whole: dist.ProcessGroup
    """Ranks that hold the experts of all layers once (expert, expert tensor and pipeline parallel)."""
    data: dist.ProcessGroup
    """Ranks that hold the same experts, or the same parts of them."""


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's place in the job. Groups are named after what they split.

    With 2 tensor-parallel ranks, 2 pipeline stages and 2 replicas, Megatron's order is

        rank      0  1  2  3  4  5  6  7
        tensor    0  1  0  1  0  1  0  1
        replica   0  0  1  1  0  0  1  1
        stage     0  0  0  0  1  1  1  1

    Context-parallel ranks come between tensor-parallel ones and replicas: in `rollout_group` those of one training
    replica are neighbours.
    """

    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    """The stages of one copy of the model, in the order of its layers."""
    context_group: dist.ProcessGroup
    """Ranks that hold the same weights and train on the same samples, each on its share of every sequence."""
    data_group: dist.ProcessGroup
    """The training replicas: ranks that hold the same weights and train on different samples."""
    rollout_group: dist.ProcessGroup
    """The rollout replicas: ranks that hold the same weights and generate different samples. Context-parallel ranks,
    which share the samples that they train on, are among them."""
    model_group: dist.ProcessGroup
    """Ranks that hold one copy of the model (tensor and pipeline parallel)."""
    experts: ExpertGroups
    lockstep_group: dist.ProcessGroup
    """Ranks whose forward and backward passes go together: a copy of the model, and whoever shares experts with it."""
    loss_group: dist.ProcessGroup
    """Training replicas and their stages, one context-parallel rank of each: a sum over it of what the last stages know
    of a loss tells all ranks."""
    ring: tuple[dist.ProcessGroup, dist.ProcessGroup] | None
    """From the stage before, and to the one after, the first stage being after the last; None with one stage."""

    @property
    def rank(self) -> int:
        """Index in the job."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """Index among the ranks of this machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def part_of(self, parameter: Parameter) -> int:
        """Return which part of a parameter this rank has, from 0."""
        return (self.experts.tensor if parameter.is_of_an_expert else self.tensor_group).rank()

    @property
    def rollout_rank(self) -> int:
        """Index in `rollout_group`."""
        return self.rollout_group.rank()

    @property
    def rollout_size(self) -> int:
        """Number of ranks in `rollout_group`."""
        return self.rollout_group.size()

    @property
    def stage(self) -> int:
        """Index in `pipeline_group`."""
        return self.pipeline_group.rank()

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and talks to the user."""
        return self.rank == 0

    @property
    def leads_model(self) -> bool:
        """True on the one rank of a model copy that talks to the environments."""
        return self.model_group.rank() == 0

    @property
    def shares_experts(self) -> bool:
        """Other copies of the model run some of its tokens through their experts: passes must be equally many."""
        return self.lockstep_group.size() > self.model_group.size()

    def model_leader(self) -> int:
        """Return global rank of this model copy's leader: the source of its broadcasts."""
        return dist.get_global_rank(self.model_group, 0)


def initialize(config: ParallelConfig, platform: Platform, kernels: KernelConfig | None = None) -> ParallelGroups:
    """Join the job torchrun started (or be a job of one rank) and build megatron's groups.

    torchrun keeps its store when it starts a job again: without a prefix of its own for each start, a rank would find
    the address of one that is dead, and wait for it.
    """
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    if platform.is_cuda:
        torch.cuda.set_device(platform.device)
        if kernels is not None and kernels.is_deterministic:
            variables |= environment_for(kernels.batch_invariant_mode)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    asked = config.distributed_backend
    backend = platform.distributed_backend if asked in ("auto", "") else asked
    # Of all groups later than the watchdog of the training loop, which says where each rank waits.
    minutes = config.distributed_timeout_minutes + 1
    timeout = datetime.timedelta(minutes=minutes)
    if "MASTER_PORT" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:  # started without torchrun: one rank, a store in memory, no port to collide on
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.num_virtual_stages_per_pipeline_rank,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        distributed_timeout_minutes=minutes,
    )
    use_trainable_memory_buffer()
    return current_groups()


def current_groups() -> ParallelGroups:
    """Return the groups of an initialised job."""
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    model_group = parallel_state.get_model_parallel_group()
    experts = ExpertGroups(
        parallel=parallel_state.get_expert_model_parallel_group(),
        tensor=parallel_state.get_expert_tensor_parallel_group(),
        whole=parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
        data=parallel_state.get_expert_data_parallel_group(),
    )
    return ParallelGroups(
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=pipeline_group,
        context_group=parallel_state.get_context_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
        rollout_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        model_group=model_group,
        experts=experts,
        # Of the two that a pass needs, the one that contains the other.
        lockstep_group=max(model_group, experts.whole, key=lambda group: group.size()),
        loss_group=_loss_group(),
        ring=_ring(pipeline_group),
    )


@functools.cache
def _loss_group() -> dist.ProcessGroup:
    """megatron has none: the ranks of each tensor-parallel and context-parallel index."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return parallel_state.get_data_parallel_group()
    group = parallel_state.get_tensor_and_context_parallel_group()
    size = group.size()
    made = [_made(range(index, dist.get_world_size(), size)) for index in range(size)]
    return made[group.rank()]


@functools.cache
def _ring(pipeline_group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """A group of its own for each direction: with one for both, NCCL would run a send behind a receive that waits."""
    stages, own = pipeline_group.size(), pipeline_group.rank()
    if stages == 1:
        return None
    stride = dist.get_world_size() // stages  # from a rank of one stage to that of the next
    made = [
        [_made([first + stage * stride, first + (stage + 1) % stages * stride]) for stage in range(stages)]
        for first in range(stride)
    ]
    edges = made[dist.get_rank() % stride]
    return edges[own - 1], edges[own]


def _made(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group that waits as long as the job's; torch's own timeout is shorter."""
    whole = dist.group.WORLD
    return dist.new_group(ranks, timeout=whole._get_backend(whole._device_types[0]).options._timeout)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and megatron's tensor-parallel generators.

    Every rank gets the same seed, from which each weight is drawn by its name. megatron's tracker adds the
    tensor-parallel offset itself.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def shut_down() -> None:
    """Leave the job; safe to call at any time, also after a failed start."""
    if not dist.is_initialized():
        return
    _loss_group.cache_clear()
    _ring.cache_clear()
    with contextlib.suppress(AssertionError, AttributeError):
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
