"""Environments of the end-to-end tests; YAML lists name them ``tests.support.e2e_environments:Digits``."""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.environments.base import ConversationEnvironment, Environment, GroupEnvironment, HarnessEnvironment
from megatron_rl.types import Demonstration, Grade, Prompt, Split, Step, Task, Transcript, Turn

if TYPE_CHECKING:
    import openai

BAD_REWARDS = (float("nan"), float("inf"), -float("inf"), "a lot", None)


class Digits(Environment):
    """The reward is the share of digits: nearly every group of a random policy has a signal."""

    name = "digits"

    def __init__(self, *, count: int = 32, long_every: int = 0, chat: bool = False, demonstrations: int = 64) -> None:
        self._count, self._long_every, self._chat = count, long_every, chat
        self._num_demonstrations = demonstrations

    def tasks(self, split: Split) -> Iterator[Task]:
        """``12+3=`` and the like; one in ``long_every`` is far too long."""
        for number in range(self._count if split == "train" else 4):
            text = f"{number}+{number % 7}="
            if self._long_every and number % self._long_every == 0:
                text = "1+" * 60 + text
            yield Task(f"{split}-{number}", self._prompt(text))

    def _prompt(self, text: str) -> Prompt:
        return ({"role": "user", "content": text},) if self._chat else text

    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """Digits over characters."""
        text = transcript.text
        return sum(character.isdigit() for character in text) / max(len(text), 1)

    def demonstrations(self, split: Split) -> Iterator[Demonstration]:
        """Sums, right ones."""
        for number in range(self._num_demonstrations):
            task = Task(f"demonstration-{number}", self._prompt(f"{number}+{number % 7}="))
            yield Demonstration(task, str(number + number % 7))


class Signed(Digits):
    """Right is 1 and wrong is -1."""

    name = "signed"
    reward_range = (-1.0, 1.0)


class Unreliable(Digits):
    """About one reward in five is NaN, infinite, a text, or nothing; with ``always`` every one."""

    name = "unreliable"

    def __init__(self, *, always: bool = False, **options: int) -> None:
        super().__init__(**options)
        self._always = always

    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """Bad or good, as the text's checksum says: the same text always gets the same."""
        checksum = zlib.crc32(f"{task.id}/{transcript.text}".encode())
        if self._always or checksum % 5 == 0:
            return BAD_REWARDS[checksum // 5 % len(BAD_REWARDS)]
        return super().grade(task, transcript)


class Unwell(Digits):
    """Cannot grade every fourth task while the file ``broken`` is there."""

    name = "unwell"

    def __init__(self, *, broken: str, **options: int) -> None:
        super().__init__(**options)
        self._broken = Path(broken)

    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """Raises, or grades."""
        if int(task.id.partition("-")[2]) % 4 == 0 and self._broken.exists():
            raise RuntimeError("the service behind this environment is down")
        return super().grade(task, transcript)


class Slow(Digits):
    """A grade takes a while, so that a signal can arrive in the middle of a step."""

    name = "slow"

    def __init__(self, *, seconds: float = 0.05, started: str = "", **options: int) -> None:
        super().__init__(**options)
        self._seconds, self._started = seconds, started

    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """Touches the file ``started``, waits, and grades."""
        if self._started:
            Path(self._started).touch()
        time.sleep(self._seconds)
        return super().grade(task, transcript)


class Broken(Digits):
    """Row 2 of the training split is not a task: a data set lost a column."""

    name = "broken"

    def tasks(self, split: Split) -> Iterator[Task]:
        """Two tasks, then perhaps a row without a prompt."""
        yield Task(id=f"{split}-0", prompt="1+1=")
        yield Task(id=f"{split}-1", prompt="1+2=")
        if split == "train":
            yield {"question": "1+3=", "id": "train-2"}


class Talks(ConversationEnvironment):
    """Up to three turns: sums are asked again while the answer's checksum says so."""

    name = "talks"
    max_turns = 3

    def tasks(self, split: Split) -> Iterator[Task]:
        """Those of `Digits`."""
        return Digits().tasks(split)

    def step(self, task: Task, state: Any, turn: Turn) -> Step:
        """A further sum, or the end."""
        sum_ = next_sum(turn.text, turn.number)
        if sum_ is None:
            return Step(done=True, reward=share_of_digits(turn.text))
        return Step(({"role": "user", "content": sum_},), reward=share_of_digits(turn.text))


class TalksByHarness(HarnessEnvironment):
    """The same by an OpenAI client; ``faults`` lets a few samples go wrong."""

    name = "talks"
    run_deadline = 60.0

    def __init__(self, *, faults: bool = False) -> None:
        self._faults = faults
        if faults:  # one that hangs is waited for
            self.run_deadline = 2.5

    def tasks(self, split: Split) -> Iterator[Task]:
        """Those of `Digits`."""
        return Digits().tasks(split)

    def run(self, task: Task, client: openai.OpenAI) -> float | Grade:
        """The reward of the last turn."""
        prompt = task.prompt
        for number in range(Talks.max_turns):
            said = client.completions.create(model="policy", prompt=prompt).choices[0].text
            if self._faults:
                go_wrong(zlib.crc32(f"{prompt}/{said}".encode()))
            sum_ = next_sum(said, number)
            if sum_ is None or number == Talks.max_turns - 1:
                return share_of_digits(said)
            prompt += said + sum_


class ComparedTalks(TalksByHarness, GroupEnvironment):
    """Samples of a group are rewarded for being longer than the shortest of them."""

    name = "compared_talks"
    grade_deadline = 20.0

    def grade_group(self, task: Task, transcripts: Sequence[Transcript]) -> list[float]:
        """How many characters each has more."""
        shortest = min(len(each.text) for each in transcripts)
        return [float(len(each.text) - shortest) for each in transcripts]


class Branching(TalksByHarness):
    """Two answers to one question at once beside another agent's; one goes on, one has its history edited."""

    name = "branching"

    async def run(self, task: Task, client: openai.AsyncOpenAI) -> Grade:
        """The mean over what was said, of each agent."""

        async def ask(prompt: str, by: openai.AsyncOpenAI = client) -> str:
            answer = await by.completions.create(model="policy", prompt=prompt)
            return answer.choices[0].text

        other = self.agent_client(client, "other")
        *said, aside = await asyncio.gather(ask(task.prompt), ask(task.prompt), ask(task.prompt, other))
        said.sort()
        said.append(await ask(f"{task.prompt}{said[0]}+"))
        said.append(await ask(f"{task.prompt}7+"))
        mean = sum(map(share_of_digits, said)) / len(said)
        return Grade(mean, agent_rewards={"main": mean, "other": share_of_digits(aside)})


def go_wrong(checksum: int) -> None:
    """One call in eight ends its sample."""
    if checksum % 32 == 0:
        os._exit(9)
    if checksum % 32 == 1:
        time.sleep(60)
    if checksum % 32 in (2, 3):
        raise RuntimeError("the browser is gone")


def next_sum(said: str, number: int) -> str | None:
    """What follows turn ``number``; None about once in three times."""
    checksum = zlib.crc32(f"{number}/{said}".encode())
    return None if checksum % 3 == 0 else f"+{checksum % 7}="


def share_of_digits(text: str) -> float:
    """0 of an empty text."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)
