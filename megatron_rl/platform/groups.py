"""Initialise torch.distributed and megatron's process groups, name them, and seed random numbers."""

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
    """Process groups of the experts in this rank's layers."""

    parallel: dist.ProcessGroup
    """Ranks that divide the experts of each layer among them, equally."""
    tensor: dist.ProcessGroup
    """Ranks that split each expert, like `ParallelGroups.tensor_group` for other linears."""
    whole: dist.ProcessGroup
    """Ranks that hold the experts of all layers once (expert, expert tensor and pipeline parallel)."""
    data: dist.ProcessGroup
    """Ranks with the same experts, or the same parts of them."""


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of this rank, named after what they split.

    With 2 tensor-parallel ranks, 2 pipeline stages and 2 replicas, Megatron's order is

        rank      0  1  2  3  4  5  6  7
        tensor    0  1  0  1  0  1  0  1
        replica   0  0  1  1  0  0  1  1
        stage     0  0  0  0  1  1  1  1

    Context-parallel ranks come between tensor-parallel ones and replicas: consecutive in `rollout_group`.
    """

    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    """Pipeline stages of one model copy, in layer order."""
    context_group: dist.ProcessGroup
    """Ranks with the same weights that train on the same samples, each on its share of every sequence."""
    data_group: dist.ProcessGroup
    """Training replicas: ranks with the same weights that train on different samples."""
    rollout_group: dist.ProcessGroup
    """Rollout replicas: ranks with the same weights that generate different samples, context-parallel ones too."""
    model_group: dist.ProcessGroup
    """Ranks of one model copy (tensor and pipeline parallel)."""
    experts: ExpertGroups
    lockstep_group: dist.ProcessGroup
    """Ranks whose forward and backward passes must match: a model copy, and the ranks that share its experts."""
    loss_group: dist.ProcessGroup
    """Training replicas and their stages, one context-parallel rank of each: summing the last stages' losses over it
    informs all ranks.
    """
    ring: tuple[dist.ProcessGroup, dist.ProcessGroup] | None
    """Groups from the previous and to the next stage, cyclic; None with one stage."""

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
        return self.pipeline_group.rank()

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files and messages."""
        return self.rank == 0

    @property
    def leads_model(self) -> bool:
        """True on the rank of a model copy that communicates with environments."""
        return self.model_group.rank() == 0

    @property
    def shares_experts(self) -> bool:
        """Whether other model copies use this rank's experts, so that numbers of passes must be equal."""
        return self.lockstep_group.size() > self.model_group.size()

    def model_leader(self) -> int:
        """Return the global rank of this model copy's leader, the source of its broadcasts."""
        return dist.get_global_rank(self.model_group, 0)


def initialize(config: ParallelConfig, platform: Platform, kernels: KernelConfig | None = None) -> ParallelGroups:
    """Join the job of torchrun (or create a job of one rank) and build megatron's groups.

    torchrun keeps its store across restarts. Each start uses its own prefix: otherwise a rank would find the address of
    a dead one and wait for it.
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
    # Longer than the training loop's watchdog, which reports where each rank waits.
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
        # A pass needs both; one contains the other.
        lockstep_group=max(model_group, experts.whole, key=lambda group: group.size()),
        loss_group=_loss_group(),
        ring=_ring(pipeline_group),
    )


@functools.cache
def _loss_group() -> dist.ProcessGroup:
    """Create the group for each tensor-parallel and context-parallel index, which megatron lacks."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return parallel_state.get_data_parallel_group()
    group = parallel_state.get_tensor_and_context_parallel_group()
    size = group.size()
    made = [_made(range(index, dist.get_world_size(), size)) for index in range(size)]
    return made[group.rank()]


@functools.cache
def _ring(pipeline_group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """Create one group per direction: with a shared one NCCL would queue a send behind a waiting receive."""
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
    """Create a group with the job's timeout; torch's default is shorter."""
    whole = dist.group.WORLD
    return dist.new_group(ranks, timeout=whole._get_backend(whole._device_types[0]).options._timeout)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and megatron's tensor-parallel generators.

    All ranks use the same seed; weights are drawn by name. megatron's tracker adds the tensor-parallel offset.
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
