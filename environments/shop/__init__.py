"""What goods cost, found out with two tools: a search that knows the prices, and Python, which computes."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from megatron_rl.environments.base import drawn_tasks
from megatron_rl.environments.grading import arithmetic_value
from megatron_rl.environments.sandbox import python_tool
from megatron_rl.environments.tools import ToolEnvironment, tool
from megatron_rl.types import Demonstration, Grade, LaterTurn, Split, Task, Transcript, Turn

GOODS = ("fig", "nut", "pear", "plum", "leek", "kiwi", "lime", "date", "oat", "rye", "egg", "yam")
PRINTED = re.compile(r"print\((\d+(?:[-+*]\d+)*)\)")
ERRORS = (-100, -20, -10, -2, -1, 1, 2, 10, 20, 100)


class Shop(ToolEnvironment):
    """Adds up what goods cost, with a search tool for the prices and a Python tool for the sum.

    Prices are drawn for each task, so a model must search for them. The conversation ends with the first turn that
    calls no tool, worth 1 if it is the right number. With ``sandbox`` its code runs as it stands, in a sandbox;
    without, ``python`` knows ``print`` of sums and products and nothing else, which saves some 60 ms a call.

    The first ``practice`` demonstrations use the tools; of the others ``guess_share`` guess, and guess wrong, to leave
    reinforcement learning something to correct.
    """

    name = "shop"
    max_turns = 6

    def __init__(
        self,
        *,
        goods: int = 2,
        max_count: int = 29,
        max_price: int = 99,
        sandbox: bool = False,
        seed: int = 0,
        train_tasks: int = 4096,
        test_tasks: int = 256,
        demonstrations: int = 32000,
        practice: int = 19200,
        guess_share: float = 0.65,
    ) -> None:
        if not 1 <= goods <= len(GOODS) or min(max_count, max_price) < 2 or not 0 <= guess_share <= 1:
            raise ValueError(f"goods must be 1 to {len(GOODS)}, max_count and max_price at least 2, guess_share 0 to 1")
        self.in_process, self.needs_sandbox = not sandbox, sandbox
        self._run = python_tool()[1] if sandbox else computed
        self._goods, self._max_count, self._max_price = goods, max_count, max_price
        self._seed, self._num_tasks = seed, {"train": train_tasks, "test": test_tasks}
        self._num_demonstrations, self._practice, self._guess_share = demonstrations, practice, guess_share

    def tasks(self, split: Split) -> Iterator[Task]:
        """Distinct questions in random order."""
        rng = random.Random(f"{self._seed}:{split}")
        return drawn_tasks(lambda: self._draw(rng), split, self._num_tasks[split], "raise max_count")

    @tool
    def search(self, query: str, task: Task) -> str:
        """The price of one of the goods."""
        return str(task.data["prices"].get(query, "?"))

    @tool
    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints."""
        return self._run(code)

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """1 for the right number."""
        answer = transcript.text.strip()
        right = transcript.ended and answer == task.data["answer"]
        return Grade(float(right), {}, "correct" if right else "wrong", answer)

    def gold_turns(self, task: Task) -> list[str]:
        """A search for each of the goods, the sum, and the answer."""
        searches = [self.call("search", query=name) for name in task.data["prices"]]
        return [*searches, self.call("python", code=f"print({task.data['sum']})"), task.data["answer"]]

    def demonstrations(self, split: Split) -> Iterator[Demonstration]:
        """Uses of the tools, and guesses, some of them after the searches; of training tasks only."""
        rng = random.Random(f"{self._seed}:demonstrations")
        count = self._num_demonstrations if split == "train" else 0
        drawn = drawn_tasks(lambda: self._draw(rng), "train", count, "raise max_count", repeats=True)
        for shown, task in enumerate(drawn, start=1):
            turns = self.gold_turns(task)
            if shown > self._practice and rng.random() < self._guess_share:
                guess = str(int(task.data["answer"]) + rng.choice(ERRORS))
                turns = [*turns[: rng.choice((0, self._goods))], guess]
            read = [self.step(task, None, Turn(turn, "stop", 0)).messages for turn in turns[:-1]]
            yield Demonstration(task, turns[0], tuple(map(LaterTurn, read, turns[1:])))

    def _draw(self, rng: random.Random) -> Task:
        counts = {name: rng.randint(2, self._max_count) for name in rng.sample(GOODS, self._goods)}
        prices = {name: rng.randint(2, self._max_price) for name in counts}
        question = "+".join(f"{count} {name}" for name, count in counts.items())
        total = "+".join(f"{count}*{prices[name]}" for name, count in counts.items())
        data = {"prices": prices, "sum": total, "answer": str(arithmetic_value(total))}
        return Task(question, ({"role": "user", "content": question},), data)


def computed(code: str) -> str:
    """What a program prints that prints a sum or a product."""
    found = PRINTED.fullmatch(code)
    return str(arithmetic_value(found[1])) if found else "?"
