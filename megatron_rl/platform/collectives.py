"""Collectives for flags, maxima and JSON values on the host (without pickle), and messages between pipeline stages."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from megatron_rl.platform.groups import ParallelGroups


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return True on every rank if ``flag`` is true on any."""
    value = torch.tensor([int(flag)])
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return bool(value.item())


def max_over(values: Mapping[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    """Return the maxima of named host numbers; every rank passes the same names in the same order."""
    largest = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(values, largest.tolist(), strict=True))


def gather_vectors(local: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gather 1-D host tensors of different lengths from every rank, in rank order."""
    if group.size() == 1:  # a step asks four times, and a collective of one costs 0.3 ms
        return [local.clone()]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([local.numel()]), group=group)
    longest = max(int(size.item()) for size in sizes)
    padded = torch.zeros(longest, dtype=local.dtype)
    padded[: local.numel()] = local
    parts = [torch.zeros_like(padded) for _ in sizes]
    if longest:
        dist.all_gather(parts, padded, group=group)
    return [part[: int(size.item())] for part, size in zip(parts, sizes, strict=True)]


def gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Gather a small JSON value from every rank, in rank order."""
    return [_value_of(part) for part in gather_vectors(_text_of(value), group)]


def collect_json(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """Collect a JSON value of any size from every rank, in rank order, on the group's first rank; None elsewhere.

    Sent point-to-point: a gather would pad each to the largest, and keep all of them on every rank.
    """
    text = _text_of(value)
    sizes = gather_vectors(torch.tensor([text.numel()]), group)
    if group.rank() > 0:
        dist.send(text, group=group, group_dst=0)
        return None
    values = [value]
    for peer in range(1, group.size()):
        data = torch.empty(int(sizes[peer]), dtype=torch.uint8)
        dist.recv(data, group=group, group_src=peer)
        values.append(_value_of(data))
    return values


def broadcast_json(value: Any, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast a JSON value from global rank ``source``; other ranks' values are ignored."""
    is_source = dist.get_rank() == source
    text = _text_of(value if is_source else None)
    size = torch.tensor([text.numel()])
    dist.broadcast(size, source, group=group)
    data = text if is_source else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, source, group=group)
    return _value_of(data)


def _text_of(value: Any) -> torch.Tensor:
    """Encode as JSON, [bytes] uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value_of(text: torch.Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


class StageMessages:
    """Messages between the pipeline stages of a model copy in rollouts.

        first ──hidden──► ... ──hidden──► last
          ▲                                 │
          └──────ids (or hidden)────────────┘       drawn tokens go from the last stage to all

    All stages know the shapes, so only data is sent. Sends are asynchronous; receives are in the order of sends.
    """

    def __init__(self, groups: ParallelGroups, device: torch.device, in_flight: int) -> None:
        """``in_flight``: sends that may be incomplete when the next one begins."""
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
        """Send to the next stage, from the last one to the first."""
        self._keep(dist.isend(tensor, self._next, group=self._to_next), tensor)

    def receive(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Receive from the previous stage."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(tensor, self._previous, group=self._from_previous)
        return tensor

    def send_drawn(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Send ids int64 and log-probs fp32 of one shape from the last stage; every stage calls `receive_drawn`."""
        self._own.append((tokens, logprobs))
        both = torch.stack((tokens.int(), logprobs.view(torch.int32)))
        self._keep(dist.broadcast(both, self._last, group=self._stages, async_op=True), both)

    def receive_drawn(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Receive the next ids int64 and log-probs fp32 of the last stage, bit for bit."""
        if self.is_last:
            return self._own.popleft()
        both = torch.empty(2, *shape, dtype=torch.int32, device=self._device)
        dist.broadcast(both, self._last, group=self._stages)
        return both[0].long(), both[1].view(torch.float32)

    def _keep(self, work: dist.Work, tensor: torch.Tensor) -> None:
        """Keep the memory of incomplete sends."""
        self._sent.append((work, tensor))
        while len(self._sent) > self._in_flight:
            self._sent.popleft()[0].wait()


class OneStage:
    """`StageMessages` for a single stage: it receives its own messages."""

    is_first = is_last = True

    def send(self, tensor: torch.Tensor) -> None:
        self._sent = tensor

    def receive(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return self._sent

    def send_drawn(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        self._drawn = tokens, logprobs

    def receive_drawn(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._drawn
