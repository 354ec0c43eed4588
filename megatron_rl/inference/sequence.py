"""One sample from submission to completion: the `Sequence`, shared by scheduler, cache and output processing.

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

UNLIMITED = 2**62
"""Larger than any number of tokens."""


class SequenceStatus(Enum):
    """The states of a sequence."""

    WAITING = "waiting"
    """In the scheduler's queue, without a row."""
    PREFILL = "prefill"
    """With a row; its prompt is being computed."""
    RUNNING = "running"
    """Decoding."""
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One sample of a request, as known to the host without a device read."""

    group: SequenceGroup
    sample: int
    """Index within the request."""
    seed: int
    """With a token's position it determines the draw."""
    status: SequenceStatus = SequenceStatus.WAITING
    row: int = -1
    """Row in the batch; while waiting, its last one."""
    block_table: list[int] = field(default_factory=list)
    """Its KV cache blocks in order; empty for a cache of rows."""
    blocks_promised: int = 0
    """Blocks reserved for its expected length."""
    num_generated: int = 0
    """Tokens drawn, including those after an end that the host has not read yet."""
    output: Completion = Completion((), (), None, policy_version=0)
    """The tokens read so far, at preemptions and at the end. `completion` sets the version."""
    preempted: bool = False
    """It was preempted, or interrupted in an earlier rollout."""
    guide: Guide | None = None
    """Set if the request has constraints."""
    num_cut: int = 0
    """Tokens that were drawn behind the end found by the host."""
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """If requested, as far as known; see `Completion`."""

    def __post_init__(self) -> None:
        self.request: Request = self.group.request  # asked for often, so no property
        if self.request.so_far:
            self.output = self.request.so_far[self.sample]
            self.num_generated = len(self.output_ids)
            self.preempted = bool(self.output_ids)
            if self.output.finish_reason is not None:
                self.status = SequenceStatus.FINISHED
        self._before = self.output
        """Output of earlier rollouts."""

    @property
    def is_watched(self) -> bool:
        """Return whether the host must see its tokens before it ends."""
        params, is_scored = self.request.sampling, self.request.hints.top_logprobs > 0
        is_guided = self.guide is not None and not self.guide.is_constant
        return bool(params.stop or params.stop_token_ids or is_guided or is_scored)

    def holds_until(self, num_drawn: int) -> int:
        """Return the total number of tokens that can be drawn before the host must read those after ``num_drawn``."""
        if self.request.hints.top_logprobs:
            return num_drawn + 1
        return UNLIMITED if self.guide is None else self.guide.holds_until(num_drawn)

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The tokens read so far."""
        return self.output.token_ids

    @property
    def prefill_ids(self) -> tuple[int, ...]:
        """The prompt, followed by the tokens drawn before a preemption."""
        return self.request.prompt_ids + self.output_ids if self.output_ids else self.request.prompt_ids

    @property
    def position(self) -> int:
        """Position of the last drawn token, which is fed next."""
        return len(self.request.prompt_ids) + self.num_generated - 1

    @property
    def num_unread(self) -> int:
        """Tokens drawn but not yet read by the host."""
        return self.num_generated - len(self.output_ids)

    @property
    def remaining(self) -> int:
        """Tokens it may still draw."""
        return self.request.sampling.max_new_tokens - self.num_generated

    @property
    def expected(self) -> int:
        """Expected number of further tokens, at most ``remaining``."""
        if self.num_generated:
            return self.remaining
        return max(1, min(self.remaining, self.request.hints.expected_tokens or self.remaining))

    @property
    def priority(self) -> tuple[int, int, int]:
        """Sort key of admission: preempted sequences, then later turns of conversations, then the rest.

        Among equals the longest first, so that it does not finish alone at the end.
        """
        urgency = 0 if self.preempted else 1 if self.request.place.turn else 2
        return urgency, -self.expected, self.group.number

    def preempt(self) -> None:
        """Wait again, without the row."""
        self.status, self.preempted = SequenceStatus.WAITING, True

    def append(self, token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        """Add tokens read from the device."""
        self.output = replace(
            self.output,
            token_ids=self.output.token_ids + token_ids,
            inference_logprobs=self.output.inference_logprobs + logprobs,
        )

    def finish(self, reason: FinishReason) -> None:
        """Finish with the tokens so far."""
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
        """Return the result; tokens drawn since the submission are by ``policy_version``."""
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
        """``number`` counts requests; ``seeds``: one per sample."""
        self.number = number
        self.request = request
        self.sequences = [Sequence(self, sample, seed) for sample, seed in enumerate(seeds)]
        sampling, hints = request.sampling, request.hints
        self.needs_every_read = bool(
            sampling.stop or sampling.stop_token_ids or sampling.constraints
            or hints.streams or hints.top_logprobs or hints.wants_routing
        )  # fmt: skip
        """Whether the host must read all tokens before the next steps; see `RolloutEngine`."""

    @property
    def open_sequences(self) -> list[Sequence]:
        """Sequences that are not finished."""
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    def completed(self, policy_version: int) -> Completed:
        """Return the completions of a finished group."""
        return self.request, tuple(sequence.completion(policy_version) for sequence in self.sequences)

    def unfinished(self, policy_version: int) -> Request:
        """Return the request with the output so far of its samples, to be continued."""
        return replace(self.request, so_far=tuple(sequence.completion(policy_version) for sequence in self.sequences))
