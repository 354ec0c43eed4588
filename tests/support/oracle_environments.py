"""What the oracles' runs are rewarded for: a function of the text that anybody can compute again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_rl.environments.base import ConversationEnvironment, Environment
from megatron_rl.types import Split, Step, Task, Transcript, Turn


def _sums(split: Split) -> Iterator[Task]:
    """Prompts of different lengths."""
    for number in range(64 if split == "train" else 4):
        yield Task(id=f"{split}-{number}", prompt=f"{7 ** (number % 6)}+{number}=")


def _share_of_digits(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(len(text), 1)


class Digits(Environment):
    """The reward is the share of digits."""

    name = "digits"
    in_process = True

    def tasks(self, split: Split) -> Iterator[Task]:
        """``343+3=`` and the like."""
        return _sums(split)

    def grade(self, task: Task, transcript: Transcript) -> float:
        """Digits over characters."""
        return _share_of_digits(transcript.text)


class Talk(ConversationEnvironment):
    """Answers ``,3,`` to a turn of three characters; ends after three turns, or with one of even length."""

    name = "talk"
    in_process = True
    max_turns = 3

    def tasks(self, split: Split) -> Iterator[Task]:
        """The same prompts."""
        return _sums(split)

    def step(self, task: Task, state: Any, turn: Turn) -> Step:
        """The reward is the share of digits in the last turn."""
        reward = _share_of_digits(turn.text)
        if len(turn.text) % 2 == 0:
            return Step(done=True, reward=reward)
        return Step(messages=({"role": "user", "content": f",{len(turn.text)},"},), reward=reward)


class Rare(Environment):
    """One or nothing, by the first character: in many groups all are equal. A ``#`` first has no grade."""

    name = "rare"
    in_process = True

    def tasks(self, split: Split) -> Iterator[Task]:
        """The same prompts."""
        return _sums(split)

    def grade(self, task: Task, transcript: Transcript) -> float:
        """1 for an answer that begins with a digit below 5."""
        if transcript.text.startswith("#"):
            return float("nan")
        return float(transcript.text[:1] in tuple("01234"))
