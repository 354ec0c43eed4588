"""What the model read and wrote in one sample of a harness: a tree of turns, and the sequences it is trained on.

    turns                                 sequences
    P0 P1 ─► A0 E ─► R0 ─► A1 E           P0 P1 │ A0 E R0 A1 E        R0 is read: an environment span
                └──► R1 ─► A2 E           P0 P1 A0 E R1 │ A2 E        A0 is trained on once, so here it is prompt
    P2 ─► A3 E                            P2 │ A3 E                   the harness began anew
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.types import Branch, Completion


def extended(said: Completion, read: Sequence[int], turn: Completion) -> Completion:
    """Return one completion: what was ``said`` before, the tokens that the model ``read`` then, and its next ``turn``.

    The routing of the last turn is of all its prompt, too.
    """
    start, shift = len(said.token_ids), len(said.token_ids) + len(read)
    spans = ((start, shift),) if read else ()
    older, first = said.older, turn.stretches[0][0]
    if said.policy_version != first:  # it waited for the next step, of newer weights
        older += ((said.policy_version, start),)
    return replace(
        turn,
        token_ids=said.token_ids + tuple(read) + turn.token_ids,
        inference_logprobs=said.inference_logprobs + (0.0,) * len(read) + turn.inference_logprobs,
        environment_spans=said.environment_spans + spans,
        older=older + tuple((version, end + shift) for version, end in turn.older),
    )


def divided(said: Completion) -> tuple[Completion, tuple[int, ...], Completion]:
    """Undo `extended`: what was said before the last reply, the reply, and the turn that was begun after it."""
    start, end = said.environment_spans[-1]
    before, turn = _part(said, 0, start), _part(said, end, len(said.token_ids))
    before = replace(before, environment_spans=said.environment_spans[:-1], finish_reason="stop")
    return before, said.token_ids[start:end], turn


def _part(said: Completion, start: int, end: int) -> Completion:
    """Return tokens ``start`` to ``end``, without environment spans."""
    stretches, begin = [], 0
    for version, stop in (*said.older, (said.policy_version, len(said.token_ids))):
        if max(begin, start) < min(stop, end):
            stretches.append((version, min(stop, end) - start))
        begin = stop
    version = stretches[-1][0] if stretches else said.policy_version
    return replace(
        said, token_ids=said.token_ids[start:end], inference_logprobs=said.inference_logprobs[start:end],
        environment_spans=(), policy_version=version, older=tuple(stretches[:-1]),
    )  # fmt: skip


@dataclass
class _Turn:
    after: int | None
    prompt_ids: tuple[int, ...]
    """All that is read before it."""
    read: tuple[int, ...]
    """Of these, those that come after the answer it goes on from."""
    depth: int
    completion: Completion | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens up to the end of its answer."""
        return self.prompt_ids + self.completion.token_ids


class Trace:
    """The turns of one sample by number, the same on every rank of a model copy."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}

    def begin(self, number: int, after: int | None, ids: Sequence[int]) -> tuple[int, ...]:
        """Begin turn ``number``, which reads ``ids`` after the answer of turn ``after``; returns its whole prompt."""
        before, depth = (), 0
        if after is not None:
            before, depth = self._turns[after].token_ids, self._turns[after].depth + 1
        turn = _Turn(after, before + tuple(ids), tuple(ids), depth)
        self._turns[number] = turn
        return turn.prompt_ids

    def answer(self, number: int, completion: Completion) -> None:
        """Add what the model wrote in turn ``number``."""
        self._turns[number].completion = completion

    @property
    def answers(self) -> dict[int, Completion]:
        """What the model wrote, by number of the turn."""
        return {number: turn.completion for number, turn in self._turns.items() if turn.completion is not None}

    def depth(self, number: int) -> int:
        """Return the number of the model's turns before this one."""
        return self._turns[number].depth

    def sequences(
        self, numbers: Collection[int] | None = None, rewards: Mapping[int, float] | None = None, at_end: float = 0.0
    ) -> list[Branch]:
        """List the sequences from roots to last turns; what the model wrote is in the completion of one of them.

        With ``rewards``, of single turns by number, each has them in `Completion.turn_rewards`, and ``at_end`` in its
        last turn besides.

        The longest first, of equally long ones by their tokens: harnesses that call several times at once are answered
        in any order, and the same samples are to be the same. Only answered turns count, and of these only ``numbers``.
        """
        answered = {
            number: turn for number, turn in self._turns.items()
            if turn.completion is not None and (numbers is None or number in numbers)
        }  # fmt: skip
        ids = {number: turn.token_ids for number, turn in answered.items()}
        leaves = answered.keys() - {turn.after for turn in answered.values()}
        sequences, used = [], set()
        for leaf in sorted(leaves, key=lambda leaf: (-len(ids[leaf]), ids[leaf], leaf)):
            own, earned, number = [], [], leaf
            while number is not None and number not in used:
                own.append(answered[number])
                earned.append((rewards or {}).get(number, 0.0))
                used.add(number)
                number = answered[number].after
            joined = _joined(own[::-1])
            if rewards:
                earned[0] += at_end
                joined = replace(joined, completion=_rewarded(joined.completion, own[::-1], earned[::-1]))
            sequences.append(joined)
        return sequences


def _joined(turns: Sequence[_Turn]) -> Branch:
    """Join turns that follow each other."""
    completion = turns[0].completion
    for turn in turns[1:]:
        completion = extended(completion, turn.read, turn.completion)
    return Branch(turns[0].prompt_ids, completion)


def _rewarded(completion: Completion, turns: Sequence[_Turn], earned: Sequence[float]) -> Completion:
    """Return it with the rewards of its turns; a turn before which nothing was read is part of the one before it."""
    by_turn: list[float] = []
    for turn, reward in zip(turns, earned, strict=True):
        if by_turn and not turn.read:
            by_turn[-1] += reward
        else:
            by_turn.append(reward)
    return replace(completion, turn_rewards=tuple(by_turn))
