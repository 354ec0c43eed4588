"""The requests under way and what has come in for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_rl.inference.harvest import Watch
from megatron_rl.types import Completion, GeneratedGroup, GenerationRequest


@dataclass
class _Pending:
    request: GenerationRequest
    completions: dict[int, Completion] = field(default_factory=dict)
    begun: dict[int, Watch] = field(default_factory=dict)


class Ledger:
    """Numbers requests and puts their samples together again."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[GenerationRequest]:
        return (pending.request for pending in self._pending.values())

    def __getitem__(self, number: int) -> GenerationRequest:
        return self._pending[number].request

    def add(self, request: GenerationRequest) -> int:
        """The number of the request."""
        number = self._next
        self._next += 1
        self._pending[number] = _Pending(request)
        return number

    def file(self, number: int, sample: int, completion: Completion) -> GeneratedGroup | None:
        """The completion of one sample; the group comes out when its last sample is in."""
        pending = self._pending[number]
        pending.completions[sample] = completion
        if len(pending.completions) < pending.request.num_samples:
            return None
        del self._pending[number]
        ordered = tuple(pending.completions[i] for i in range(pending.request.num_samples))
        return GeneratedGroup(pending.request, ordered)

    def watch(self, number: int, sample: int) -> Watch:
        """What the sample had said before it was pre-empted, and what ends it."""
        pending = self._pending[number]
        return pending.begun.get(sample) or Watch(pending.request.sampling.stop)

    def keep(self, number: int, sample: int, token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        """What a sample has said since it was seated; it is pre-empted."""
        before = self.watch(number, sample)
        self._pending[number].begun[sample] = Watch(
            before.stop, before.token_ids + token_ids, before.logprobs + logprobs
        )

    def clear(self) -> None:
        """Forget everything."""
        self._pending.clear()
        self._next = 0
