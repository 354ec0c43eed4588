"""One sample from submission to completion: a `Sequence`, to which scheduler, cache and output processing refer.

    WAITING ──admitted──► PREFILL ──prompt complete──► RUNNING ──end token, limit, stop string──► FINISHED
       ▲                     │                            │
       └─────────────────────┴──preempted: no free block──┘
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from megatron_rl.types import Completed, Completion, FinishReason, Request, TokenScore

if TYPE_CHECKING:
    from megatron_rl.inference.guides import Guide

FOR_EVER = 2**62
"""More tokens than are ever drawn."""


class SequenceStatus(Enum):
    """The states of a sequence."""

    WAITING = "waiting"
    """In the scheduler's queue, without a row."""
    PREFILL = "prefill"
    """It has a row, and its prompt is on the way into the cache."""
    RUNNING = "running"
    """It is decoded."""
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One sample of a request, as far as the host knows it without reading the device."""

    group: SequenceGroup
    sample: int
    """Its number in the request."""
    seed: int
    """With a token's position it fixes the token's draw."""
    status: SequenceStatus = SequenceStatus.WAITING
    row: int = -1
    """In the batch; of a sequence that waits, the last one it had."""
    block_table: list[int] = field(default_factory=list)
    """The blocks of the KV cache that hold it, in order; empty where every row has a stretch of its own."""
    blocks_promised: int = 0
    """Blocks that it may come to have."""
    num_generated: int = 0
    """Tokens drawn. A row that has ended counts on, up to its limit, until the host reads it."""
    output: Completion = Completion((), (), None, policy_version=0)
    """What was drawn, as far as it was read: at a preemption, and at the end. `completion` stamps the version."""
    preempted: bool = False
    """It was in the cache before: it made room for others, or was interrupted in an earlier rollout."""
    guide: Guide | None = None
    """Where its request has constraints."""
    num_cut: int = 0
    """Tokens that the device had drawn and fed when the host found an end before them."""
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Both as far as they are asked for and known, see `Completion`."""

    def __post_init__(self) -> None:
        self.request: Request = self.group.request  # asked for often, so no property
        if self.request.so_far:
            self.output = self.request.so_far[self.sample]
            self.num_generated = len(self.output_ids)
            self.preempted = bool(self.output_ids)
            if self.output.finish_reason is not None:
                self.status = SequenceStatus.FINISHED
        self._before = self.output
        """What was drawn of it in earlier rollouts."""

    @property
    def is_watched(self) -> bool:
        """Return whether the host has to see its tokens before it ends."""
        params, is_scored = self.request.sampling, self.request.hints.top_logprobs > 0
        is_guided = self.guide is not None and not self.guide.is_constant
        return bool(params.stop or params.stop_token_ids or is_guided or is_scored)

    def holds_until(self, num_drawn: int) -> int:
        """Return how many tokens may be drawn in all before the host has to read those after ``num_drawn``."""
        if self.request.hints.top_logprobs:
            return num_drawn + 1
        return FOR_EVER if self.guide is None else self.guide.holds_until(num_drawn)

    @property
    def output_ids(self) -> tuple[int, ...]:
        """Tokens drawn, as far as they were read."""
        return self.output.token_ids

    @property
    def prefill_ids(self) -> tuple[int, ...]:
        """The prompt, and behind it what was drawn before a preemption."""
        return self.request.prompt_ids + self.output_ids if self.output_ids else self.request.prompt_ids

    @property
    def position(self) -> int:
        """Position of the last token drawn, which is fed next."""
        return len(self.request.prompt_ids) + self.num_generated - 1

    @property
    def num_unread(self) -> int:
        """Tokens that only the device knows."""
        return self.num_generated - len(self.output_ids)

    @property
    def remaining(self) -> int:
        """Tokens it may still draw."""
        return self.request.sampling.max_new_tokens - self.num_generated

    @property
    def expected(self) -> int:
        """Tokens it will probably draw, never more than ``remaining``."""
        if self.num_generated:
            return self.remaining
        return max(1, min(self.remaining, self.request.hints.expected_tokens or self.remaining))

    @property
    def priority(self) -> tuple[int, int, int]:
        """The lowest is admitted first: preempted sequences, then turns that hold up a conversation, then the rest.

        Among equals the longest, so that none begins alone at the end.
        """
        urgency = 0 if self.preempted else 1 if self.request.place.turn else 2
        return urgency, -self.expected, self.group.number

    def preempt(self) -> None:
        """Give up the row and wait again."""
        self.status, self.preempted = SequenceStatus.WAITING, True

    def append(self, token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        """Add tokens that were read."""
        self.output = replace(
            self.output,
            token_ids=self.output.token_ids + token_ids,
            inference_logprobs=self.output.inference_logprobs + logprobs,
        )

    def finish(self, reason: FinishReason) -> None:
        """End the sequence with the tokens that it has."""
        self.output = replace(self.output, finish_reason=reason)
        if self.scores or self.prompt_scores:
            scores = tuple(self.scores[: len(self.output_ids)])
            self.output = replace(self.output, scores=scores, prompt_scores=tuple(self.prompt_scores))
        self.status, self.num_generated = SequenceStatus.FINISHED, len(self.output_ids)

    @property
    def num_drawn(self) -> int:
        """Tokens drawn since it was submitted."""
        return self.num_generated - len(self._before.token_ids)

    def completion(self, policy_version: int) -> Completion:
        """Return what was read; what was drawn since it was submitted is by ``policy_version``."""
        before = self._before
        if not before.token_ids:
            return replace(self.output, policy_version=policy_version)
        if self.num_drawn == 0:
            return before
        earlier = before.older
        if before.policy_version != policy_version:
            earlier += ((before.policy_version, len(before.token_ids)),)
        return replace(self.output, policy_version=policy_version, older=earlier)


class SequenceGroup:
    """The samples of one request."""

    def __init__(self, number: int, request: Request, seeds: list[int]) -> None:
        """``number`` counts requests; one seed a sample."""
        self.number = number
        self.request = request
        self.sequences = [Sequence(self, sample, seed) for sample, seed in enumerate(seeds)]
        sampling, hints = request.sampling, request.hints
        self.is_awaited = bool(
            sampling.stop or sampling.stop_token_ids or sampling.constraints
            or hints.streams or hints.top_logprobs or hints.wants_routing
        )  # fmt: skip
        """Whether the host must know after every burst where its sequences stand; see `RolloutEngine`."""

    @property
    def open_sequences(self) -> list[Sequence]:
        """Sequences that are not finished."""
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    def completed(self, policy_version: int) -> Completed:
        """Return the completions of a finished group."""
        return self.request, tuple(sequence.completion(policy_version) for sequence in self.sequences)

    def unfinished(self, policy_version: int) -> Request:
        """Return the request, to go on from what was read of its samples."""
        return replace(self.request, so_far=tuple(sequence.completion(policy_version) for sequence in self.sequences))
