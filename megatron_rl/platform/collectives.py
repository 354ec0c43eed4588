"""Small host-side exchanges between ranks: flags, maxima and JSON values. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """True on every rank when it is true on one."""
    value = torch.tensor([int(flag)])
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return bool(value.item())


def max_over(values: Mapping[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    """Largest of named host numbers; every rank passes the same names in the same order."""
    largest = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(values, largest.tolist(), strict=True))


def gather_vectors(local: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """1-D host tensors of different lengths from every rank, in rank order."""
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
    """A small JSON value from every rank, in rank order."""
    return [_value_of(part) for part in gather_vectors(_text_of(value), group)]


def collect_json(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """A JSON value of any size from every rank, in rank order, on the group's first rank; None on the others.

    Sent from rank to rank: a gather would pad each to the largest, and leave all of them on every rank.
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
    """A JSON value from global rank ``source``; the others pass anything."""
    is_source = dist.get_rank() == source
    text = _text_of(value if is_source else None)
    size = torch.tensor([text.numel()])
    dist.broadcast(size, source, group=group)
    data = text if is_source else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, source, group=group)
    return _value_of(data)


def _text_of(value: Any) -> torch.Tensor:
    """JSON, [bytes] uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value_of(text: torch.Tensor) -> Any:
    return json.loads(text.numpy().tobytes())
