"""The rollout engine on pipeline stages: every stage has the same schedulers, and the cache of its own layers.

    lane 0   s0 ─► s1 ─► draw        s0 ─► s1 ─► draw
    lane 1         s0 ─► s1 ─► draw        s0 ─► s1 ─► draw       a decode step of each lane goes through the stages

A lane is a `RolloutEngine` with its share of the rows and of the cache. A stage works on one lane while the others are
on other stages, so as many lanes as stages keep all of them busy. Hidden states go from stage to stage, ids from the
last one to the first; once a burst the last stage tells all what was drawn. With that all stages take the same
decisions in the same order, and nothing else has to be agreed on.

Copies of the model that share experts take the turns of all lanes together: a lane's step begins with one exchange of
how many passes each copy has before it, and whoever has fewer joins in the others' passes with a token that nobody
reads, through the experts of its stage alone and without a message to another stage (see `lockstep`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator
from collections.abc import Sequence as ListOf
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron_rl.inference.engine import Engine, EngineOptions, EngineStatistics
from megatron_rl.inference.graphs import possible_graphs
from megatron_rl.inference.kv_cache import shared_out
from megatron_rl.inference.lockstep import NOTHING, Most, graphs_alike
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.inference.stage_runner import StageRunner
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.stages import StageMessages
from megatron_rl.types import Completed, Request


class StagedEngine(Engine):
    """Takes the turns of the lanes."""

    def __init__(
        self,
        policy: PolicyModel,
        options: EngineOptions,
        stop_token_ids: ListOf[int],
        decode_text: Callable[[ListOf[int]], str],
        groups: ParallelGroups,
    ) -> None:
        sizes = shared_out(policy, possible_graphs(options, policy), groups.pipeline_group.size())
        messages = StageMessages(groups, policy.device, in_flight=2 * len(sizes))
        self.lanes = [Lane(groups, messages, policy, size, stop_token_ids, decode_text) for size in sizes]
        self.max_batch_size = sum(lane.max_batch_size for lane in self.lanes)
        self.kv_numbers = self.lanes[0].kv_numbers
        for lane in self.lanes:
            lane.cache.numbers = self.kv_numbers
        self._turns = deque(self.lanes)
        self._shares_experts = groups.shares_experts
        if self._shares_experts and not graphs_alike(self.lanes[0].runner, self.max_batch_size, groups):
            for lane in self.lanes:
                lane.runner.graphs = None
        self._lane_of: dict[tuple[int, int], Lane] = {}

    def begin(self, seed: int, policy_version: int) -> None:
        self.abort()
        self._lane_of.clear()
        for lane in self.lanes:
            lane.begin(seed, policy_version)

    def submit(self, request: Request) -> None:
        """See `Engine.submit`. Later turns of a conversation go where the cache has the earlier ones.

        Raises:
            EngineError: see `EngineOptions.check`.
        """
        # A harness's samples begin one by one, so each has a lane; the others' begin together.
        conversation = request.index, 0 if request.call is None else request.first_sample
        lane = self._lane_of.get(conversation) if request.turn else None
        lane = lane or min(self.lanes, key=lambda lane: lane.expected)
        lane.submit(request)
        self._lane_of[conversation] = lane

    def cancel(self, calls: Collection[int]) -> None:
        for lane in self.lanes:
            lane.cancel(calls)

    @property
    def statistics(self) -> EngineStatistics:
        """Of all lanes."""
        return sum((lane.statistics for lane in self.lanes), EngineStatistics())

    @property
    def has_unfinished(self) -> bool:
        return any(lane.has_unfinished for lane in self.lanes)

    def unfinished_tokens(self, wanted: Callable[[Request], bool]) -> list[tuple[Request, tuple[int, ...]]]:
        """Of lanes between two steps: amid one the rows do not have yet what their sequences count."""
        return [told for lane in self.lanes if not lane.is_under_way for told in lane.unfinished_tokens(wanted)]

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        return [tensor for lane in self.lanes for tensor in lane.cache_tensors]

    def forget_graphs(self) -> None:
        for lane in self.lanes:
            lane.forget_graphs()

    @torch.inference_mode()
    def step(self) -> list[Completed]:
        """Until one lane has finished a step of its own. The others stay under way, so that the pipeline is full.

        Collective over the lockstep group where copies share experts: each lane takes its turns on all of them.
        """
        while self._shares_experts or self.has_unfinished:
            if self._shares_experts or self._turns[0].has_unfinished:
                complete = self._turns[0].take_turn()
                if complete is not None:  # its next step comes first
                    return complete
            self._turns.rotate(-1)
        return []

    @torch.inference_mode()
    def interrupt(self) -> list[Request]:
        finished = [replace(request, begun=completions) for request, completions in self._end_turns()]
        return finished + [request for lane in self.lanes for request in lane.interrupt()]

    @torch.inference_mode()
    def abort(self) -> None:
        self._end_turns()
        for lane in self.lanes:
            lane.abort()

    def _end_turns(self) -> list[Completed]:
        """Messages under way are received: the next rollout would take them for its own. What is complete with it."""
        complete: list[Completed] = []
        while any(lane.is_under_way for lane in self.lanes):
            if self._turns[0].is_under_way:
                complete += self._turns[0].take_turn() or []
            self._turns.rotate(-1)
        return complete


class Lane(RolloutEngine):
    """A share of the rows, whose step pauses."""

    def __init__(self, groups: ParallelGroups, messages: StageMessages, policy: PolicyModel, *whole: Any) -> None:
        """``whole``: what `RolloutEngine` takes after the policy, up to its groups."""
        super().__init__(policy, *whole, groups.tensor_group, partial(StageRunner, policy, messages))
        self._turns: Generator[None, None, list[Completed]] | None = None
        self._lockstep_group = groups.lockstep_group if groups.shares_experts else None

    @property
    def expected(self) -> int:
        """Tokens that the unfinished requests will probably draw."""
        requests = [group.request for group in self._groups.values()]
        return sum(r.num_samples * (r.expected_tokens or r.sampling.max_new_tokens) for r in requests)

    @property
    def is_under_way(self) -> bool:
        """It is amid a step."""
        return self._turns is not None

    def take_turn(self) -> list[Completed] | None:
        """Go on with the step, or begin one; None when it pauses, and what is complete when it is finished."""
        if self._turns is None:
            self._turns = self._pausing_step()
        try:
            next(self._turns)
        except StopIteration as end:
            self._turns = None
            return end.value
        return None

    def _pausing_step(self) -> Generator[None, None, list[Completed]]:
        """`RolloutEngine.step`, with pauses."""
        chunks, kinds = self._plan()
        running = self._scheduler.running
        burst = self._next_burst(running) if running else None
        others_passes = others_steps = rows = 0
        decode_kinds = kinds
        if self._lockstep_group is not None:
            passes, (_, _, steps) = len([*self.runner.passes(chunks)]), burst or NOTHING
            most = Most.of(passes, burst or NOTHING, kinds, self._lockstep_group)
            others_passes, others_steps, rows = most.passes - passes, most.steps - steps, most.rows
            if self.runner.graphs is not None:
                others_steps = rows = 0
                burst, decode_kinds = most.burst_of_all(running if burst else [], steps), most.kinds
        if not chunks and burst is None and not others_passes and not others_steps:
            yield  # no copy has anything here: the other lanes go on
        self.runner.context.shared_rows = None
        if chunks:
            yield from self.runner.prefill_turns(chunks, kinds)
        yield from self.runner.join_turns(others_passes)
        self.runner.context.shared_rows = rows
        if burst is not None:
            yield from self.runner.decode_turns(*burst, decode_kinds)
        yield from self.runner.join_turns(others_steps)
        return self._finish(running) if running else []
