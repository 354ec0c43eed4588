"""What the model read and wrote in one sample: a tree of turns, and the sequences that it is trained on.

    turns                                 sequences
    P0 P1 ─► A0 E ─► R0 ─► A1 E           P0 P1 │ A0 E R0 A1 E        R0 is read: an environment span
                └──► R1 ─► A2 E           P0 P1 A0 E R1 │ A2 E        A0 is trained on once, so here it is prompt
    P2 ─► A3 E                            P2 │ A3 E                   the harness began anew

An environment that replies turn by turn makes a path of it, a harness whatever it likes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megatron_rl.types import Branch, Completion


@dataclass
class _Turn:
    after: int | None
    prompt_ids: tuple[int, ...]
    """All that is read before it."""
    num_new: int
    """Of these, those that come after the answer it goes on from."""
    depth: int
    completion: Completion | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Up to the end of its answer."""
        return self.prompt_ids + self.completion.token_ids


class Trace:
    """The turns of one sample by number, the same on every rank of a model copy."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}

    def begin(self, number: int, after: int | None, ids: Sequence[int]) -> tuple[int, ...]:
        """Turn ``number`` reads ``ids`` after the answer of turn ``after``; its whole prompt."""
        before, depth = (), 0
        if after is not None:
            before, depth = self._turns[after].token_ids, self._turns[after].depth + 1
        turn = _Turn(after, before + tuple(ids), len(ids), depth)
        self._turns[number] = turn
        return turn.prompt_ids

    def answer(self, number: int, completion: Completion) -> None:
        """What the model wrote in turn ``number``."""
        self._turns[number].completion = completion

    def depth(self, number: int) -> int:
        """The model's turns before this one."""
        return self._turns[number].depth

    def length(self, number: int) -> int:
        """Tokens up to the end of an answered turn."""
        turn = self._turns[number]
        return len(turn.prompt_ids) + len(turn.completion.token_ids)

    def sequences(self, numbers: Collection[int] | None = None) -> list[Branch]:
        """From every root to every last turn; what the model wrote is in the completion of one of them.

        The longest first, of equally long ones by their tokens: harnesses that call several times at once are answered
        in any order, and the same samples are to be the same. Only answered turns count, and of these only ``numbers``.
        """
        answered = {
            number: turn for number, turn in self._turns.items()
            if turn.completion is not None and (numbers is None or number in numbers)
        }  # fmt: skip
        leaves = answered.keys() - {turn.after for turn in answered.values()}
        sequences, used = [], set()
        for leaf in sorted(leaves, key=lambda leaf: (-self.length(leaf), answered[leaf].token_ids, leaf)):
            own, number = [], leaf
            while number is not None and number not in used:
                own.append(answered[number])
                used.add(number)
                number = answered[number].after
            sequences.append(_joined(own[::-1]))
        return sequences


def _joined(turns: Sequence[_Turn]) -> Branch:
    """Turns that follow each other."""
    first, last = turns[0], turns[-1].completion
    token_ids, logprobs, spans = list(first.completion.token_ids), list(first.completion.inference_logprobs), []
    for turn in turns[1:]:
        start = len(token_ids)
        token_ids += turn.prompt_ids[len(turn.prompt_ids) - turn.num_new :]
        logprobs += [0.0] * turn.num_new
        if turn.num_new:
            spans.append((start, len(token_ids)))
        token_ids += turn.completion.token_ids
        logprobs += turn.completion.inference_logprobs
    # All turns are of one policy; the routing of the last is of all its prompt, too.
    completion = replace(
        last, token_ids=tuple(token_ids), inference_logprobs=tuple(logprobs), environment_spans=tuple(spans)
    )
    return Branch(first.prompt_ids, completion)
