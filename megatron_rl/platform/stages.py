"""Messages between the pipeline stages of a copy of the model, as rollouts need them.

    first ──hidden──► ... ──hidden──► last
      ▲                                 │
      └──────ids (or hidden)────────────┘       what was drawn goes from the last stage to all

Shapes follow from what all stages know, so nothing but payload travels.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from megatron_rl.platform.groups import ParallelGroups


class StageMessages:
    """This rank's place among the stages. A send returns at once; receives are in the order of the sends."""

    def __init__(self, groups: ParallelGroups, device: torch.device, in_flight: int) -> None:
        """``in_flight``: sends that need not have arrived when the next one begins."""
        self._stages = groups.pipeline_group
        self._from_previous, self._to_next = groups.ring
        ranks = dist.get_process_group_ranks(self._stages)
        self._last = ranks[-1]
        self._previous, self._next = ranks[groups.stage - 1], ranks[(groups.stage + 1) % len(ranks)]
        self._device, self._in_flight = device, in_flight
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._own: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.is_first, self.is_last = groups.stage == 0, groups.stage == len(ranks) - 1

    def send(self, tensor: torch.Tensor) -> None:
        """To the next stage, from the last one to the first."""
        self._keep(dist.isend(tensor, self._next, group=self._to_next), tensor)

    def receive(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """From the stage before."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(tensor, self._previous, group=self._from_previous)
        return tensor

    def tell_all(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """From the last stage: ids int64 and log-probs fp32 of one shape; all stages call `told` for it."""
        self._own.append((tokens, logprobs))
        both = torch.stack((tokens.int(), logprobs.view(torch.int32)))
        self._keep(dist.broadcast(both, self._last, group=self._stages, async_op=True), both)

    def told(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last stage has said next: ids int64 and log-probs fp32, bit by bit."""
        if self.is_last:
            return self._own.popleft()
        both = torch.empty(2, *shape, dtype=torch.int32, device=self._device)
        dist.broadcast(both, self._last, group=self._stages)
        return both[0].long(), both[1].view(torch.float32)

    def _keep(self, work: dist.Work, tensor: torch.Tensor) -> None:
        """The memory of a message under way must stay."""
        self._sent.append((work, tensor))
        while len(self._sent) > self._in_flight:
            self._sent.popleft()[0].wait()


class OneStage:
    """In the place of `StageMessages` where one stage has the whole model: it receives what it has sent."""

    is_first = is_last = True

    def send(self, tensor: torch.Tensor) -> None:
        """See `StageMessages`."""
        self._sent = tensor

    def receive(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """See `StageMessages`."""
        return self._sent

    def tell_all(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """See `StageMessages`."""
        self._told = tokens, logprobs

    def told(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StageMessages`."""
        return self._told
