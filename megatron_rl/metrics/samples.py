"""Samples to look at while a run goes on: one of a step's worst group and one of its best.

For example::

    sample 10/80 | worst group | arithmetic 3+2-3+4+8=
        prompt 3+2-3+4+8=
        answer 3+2=5,5-3=1#15<|end|>
        reward 0, wrong; right answer: 14; mean of the group's 16: 0.0625
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.metrics.rollouts import gold_answer, shared_prompt
from megatron_rl.types import Branch, Rollout, RolloutGroup

MAX_CHARACTERS = 4_000
"""Of a prompt or answer, in TensorBoard and wandb."""
SHOWN_CHARACTERS = 300
"""On the screen: about three lines each."""


@dataclass(frozen=True)
class TextSample:
    """One sample of a group; JSON values only, as it travels between ranks."""

    which: str
    """``worst`` or ``best``, of the groups of the step by their mean rewards."""
    number: int
    """Of the group in the step."""
    environment: str
    task_id: str
    prompt: str
    answer: str
    """With special tokens."""
    reward: float
    correct: bool | None
    gold: str | None
    group_mean: float
    group_size: int

    @property
    def heading(self) -> str:
        """What it is a sample of."""
        return f"{self.which} group | {self.environment} {shorten(self.task_id, 60, 0)}"

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Prompt, answer and reward in a few lines for the screen."""
        half = SHOWN_CHARACTERS // 2
        texts = (("prompt", self.prompt), ("answer", self.answer))
        return [*((name, shorten(text, half, half)) for name, text in texts), ("reward", self.verdict)]

    @property
    def verdict(self) -> str:
        """The reward in words."""
        gold = "" if self.gold is None else f"; right answer: {shorten(self.gold, 120, 0)}"
        mean = f"; mean of the group's {self.group_size}: {self.group_mean:.4g}"
        word = {True: ", correct", False: ", wrong", None: ""}[self.correct]
        return f"{self.reward:.4g}{word}{gold}{mean}"


def samples_of(
    groups: Sequence[RolloutGroup], numbers: Sequence[int], decode_raw: Callable[[Sequence[int]], str]
) -> list[TextSample]:
    """The lowest reward of the worst of ``groups``, the highest of the best; of groups that were graded."""
    graded = [(_mean(group), number, group) for number, group in zip(numbers, groups, strict=True)]
    means = [(mean, number, group) for mean, number, group in graded if mean is not None]
    if not means:
        return []
    worst = min(means, key=lambda found: (found[0], found[1]))
    best = max(means, key=lambda found: (found[0], -found[1]))
    return [_sample("worst", min, *worst, decode_raw), _sample("best", max, *best, decode_raw)]


def worst_and_best(samples: Sequence[TextSample]) -> list[TextSample]:
    """Of those that every rank found: the worst and the best; only the best where all groups are alike."""
    if not samples:
        return []
    worst = min((one for one in samples if one.which == "worst"), key=lambda one: (one.group_mean, one.number))
    best = max((one for one in samples if one.which == "best"), key=lambda one: (one.group_mean, -one.number))
    alike = worst.group_mean == best.group_mean and worst.reward == best.reward
    return [best] if alike else [worst, best]


def shorten(text: str, head: int, tail: int) -> str:
    """One line of at most about ``head`` and ``tail`` characters of ``text``, without what a terminal would obey."""
    if len(text) > head + tail:
        text = f"{text[:head]} [...] {text[len(text) - tail :]}"
    # A model writes escape sequences, too: they would move the cursor, or change the title of the window.
    return "".join(char if char.isprintable() else "\u21b5" if char == "\n" else "\ufffd" for char in text).strip()


def _mean(group: RolloutGroup) -> float | None:
    rewards = [rollout.grade.reward for rollout in group.rollouts if not rollout.grade.failed]
    return sum(rewards) / len(rewards) if rewards else None


def _sample(
    which: str, pick: Callable[..., Rollout], mean: float, number: int, group: RolloutGroup,
    decode_raw: Callable[[Sequence[int]], str],
) -> TextSample:  # fmt: skip
    graded = (rollout for rollout in group.rollouts if not rollout.grade.failed)
    rollout = pick(graded, key=lambda rollout: rollout.grade.reward)
    grade, task = rollout.grade, group.source.task
    return TextSample(
        which, number, group.source.environment, task.id, _clip(decode_raw(group.sequences(rollout)[0].prompt_ids)),
        _clip(_answer(group.sequences(rollout), decode_raw)), grade.reward, grade.correct, gold_answer(task), mean,
        len(group.rollouts),
    )  # fmt: skip


def _answer(sequences: Sequence[Branch], decode_raw: Callable[[Sequence[int]], str]) -> str:
    """Of several sequences one after the other, each further one with what is new in its prompt."""
    text = decode_raw(sequences[0].completion.token_ids)
    for number, sequence in enumerate(sequences[1:], start=1):
        origin, shared = shared_prompt(sequence.prompt_ids, sequences[:number])
        new = decode_raw(sequence.prompt_ids[shared:] + sequence.completion.token_ids)
        text += f"\n[sequence {number + 1}, after {shared} tokens of sequence {origin + 1}]\n{new}"
    return text


def _clip(text: str) -> str:
    """Both ends: the question and the result stand there."""
    half = MAX_CHARACTERS // 2
    cut = len(text) - 2 * half
    return text if cut <= 0 else f"{text[:half]}\n[{cut} characters]\n{text[-half:]}"
