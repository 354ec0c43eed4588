"""The rollout engine on pipeline stages: every stage runs the same schedulers, with the cache of its own layers.

    lane 0   s0 ─► s1 ─► draw        s0 ─► s1 ─► draw
    lane 1         s0 ─► s1 ─► draw        s0 ─► s1 ─► draw       a decode step of each lane goes through the stages

A lane is a `RolloutEngine` with its share of the rows and of the cache. There are as many lanes as stages, so each
stage works on one lane while the others are on other stages. Hidden states go from stage to stage, ids from the last to
the first; before a host read the last stage sends all drawn tokens to the others. So all stages take the same decisions
in the same order without further communication.

Expert-parallel copies of the model advance their lanes together: the one with fewer passes runs dummy passes through
the experts of its stage, without messages to other stages (see `passes.Passes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_rl.inference.batch_state import DecodeText
from megatron_rl.inference.engine import Engine, EngineLoad, EngineOptions, EngineStatistics
from megatron_rl.inference.graphs import drop_unequal_graphs, possible_graphs
from megatron_rl.inference.guides import Grammars
from megatron_rl.inference.kv_cache import split_options
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.collectives import StageMessages
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.types import Completed, Completion, Request, RolloutGroup


class StagedEngine(Engine):
    """Advances one lane after the other."""

    def __init__(
        self, policy: PolicyModel, options: EngineOptions, stop_token_ids: ListOf[int], decode_text: DecodeText,
        groups: ParallelGroups, grammars: Grammars | None = None,
    ) -> None:  # fmt: skip
        sizes = split_options(policy, possible_graphs(options, policy, groups), groups.pipeline_group.size())
        messages = StageMessages(groups, policy.device, in_flight=2 * len(sizes))
        self.lanes = [
            RolloutEngine(policy, size, stop_token_ids, decode_text, groups, messages, grammars) for size in sizes
        ]
        self.max_batch_size = sum(lane.max_batch_size for lane in self.lanes)
        self.kv_format = self.lanes[0].kv_format
        for lane in self.lanes:
            lane.cache.format = self.kv_format
        self._next = deque(self.lanes)
        self._shares_experts = groups.shares_experts
        if self._shares_experts:
            drop_unequal_graphs([lane.runner for lane in self.lanes], self.max_batch_size, groups.lockstep_group)
        self._lane_of: dict[tuple[int, int], RolloutEngine] = {}

    def begin(self, seed: int, policy_version: int) -> None:
        self.abort()
        self._lane_of.clear()
        self._next = deque(self.lanes)
        for lane in self.lanes:
            lane.begin(seed, policy_version)

    def submit(self, request: Request) -> None:
        """See `Engine.submit`. Later turns of a conversation go to the lane that caches the earlier ones.

        Raises:
            EngineError: see `EngineOptions.check`.
        """
        # Each sample of a harness has a lane of its own; the samples of other requests share one.
        conversation = request.index, 0 if request.place.call is None else request.place.first_sample
        lane = self._lane_of.get(conversation) if request.place.turn else None
        lane = lane or min(self.lanes, key=lambda lane: lane.expected_tokens)
        lane.submit(request)
        self._lane_of[conversation] = lane

    def cancel(self, calls: Collection[int]) -> None:
        for lane in self.lanes:
            lane.cancel(calls)

    @property
    def statistics(self) -> EngineStatistics:
        """Sum over all lanes."""
        return sum((lane.statistics for lane in self.lanes), EngineStatistics())

    @property
    def has_unfinished(self) -> bool:
        return any(lane.has_unfinished for lane in self.lanes)

    def unfinished_tokens(self, wanted: Callable[[Request], bool]) -> list[tuple[Request, tuple[int, ...]]]:
        """See `Engine`. Skips lanes within a step, whose sequences count tokens that are not drawn yet."""
        return [shown for lane in self.lanes if not lane.is_paused for shown in lane.unfinished_tokens(wanted)]

    def load(self) -> EngineLoad:
        return EngineLoad(*map(sum, zip(*(lane.load() for lane in self.lanes), strict=True)))

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        return [tensor for lane in self.lanes for tensor in lane.cache_tensors]

    def forget_graphs(self) -> None:
        for lane in self.lanes:
            lane.forget_graphs()

    @torch.inference_mode()
    def step(self) -> list[Completed]:
        """Advance lanes until one has finished its step. The others stay paused, so that the pipeline is full.

        Collective over the lockstep group of expert-parallel copies, which advance the same lanes.
        """
        while self._shares_experts or self.has_unfinished:
            if self._shares_experts or self._next[0].has_unfinished:
                complete = self._next[0].advance()
                if complete is not None:  # its next step comes first
                    return complete
            self._next.rotate(-1)
        return []

    @torch.inference_mode()
    def interrupt(self) -> list[Request]:
        finished = [replace(request, so_far=completions) for request, completions in self._end_steps()]
        return finished + [request for lane in self.lanes for request in lane.interrupt()]

    @torch.inference_mode()
    def abort(self) -> None:
        self._end_steps()
        for lane in self.lanes:
            lane.abort()

    def _end_steps(self) -> list[Completed]:
        """Finish paused steps, so that no message remains for the next rollout; return the completed requests."""
        complete: list[Completed] = []
        while any(lane.is_paused for lane in self.lanes):
            if self._next[0].is_paused:
                complete += self._next[0].advance() or []
            self._next.rotate(-1)
        return complete


@dataclass(frozen=True)
class StagedRouting:
    """Converts recorded experts between this stage's layers and all layers of the model."""

    own: tuple[int, ...]
    """Indices of this stage's layers in the model, in the order of `Completion.routing`."""
    layers: int
    """Number of layers of the model."""
    groups: ParallelGroups

    def whole(self, group: RolloutGroup) -> RolloutGroup:
        """Return ``group`` with the experts of all layers; collective over the model copy.

        A collective over the stages would deadlock: between host reads the last stage is ahead of the others.
        """

        def gathered(routing: torch.Tensor) -> torch.Tensor:
            every = routing.new_zeros(routing.shape[0], self.layers, routing.shape[2])
            if self.groups.tensor_group.rank() == 0:  # the others have the same
                every[:, list(self.own)] = routing
            dist.all_reduce(every.view(torch.uint8), group=self.groups.model_group)  # a byte is of one stage
            return every

        return _changed(group, gathered)

    def part(self, group: RolloutGroup) -> RolloutGroup:
        """Return ``group`` with only the experts of this stage's layers."""
        return _changed(group, lambda routing: routing[:, list(self.own)])


def _changed(group: RolloutGroup, change: Callable[[torch.Tensor], torch.Tensor]) -> RolloutGroup:
    if any(completion.routing is None for rollout in group.rollouts for completion in rollout.completions):
        return group

    def changed(completion: Completion) -> Completion:
        return replace(completion, routing=change(completion.routing))

    rollouts = []
    for rollout in group.rollouts:
        branches = tuple(replace(branch, completion=changed(branch.completion)) for branch in rollout.branches)
        rollouts.append(replace(rollout, completion=changed(rollout.completion), branches=branches))
    return replace(group, rollouts=tuple(rollouts))
