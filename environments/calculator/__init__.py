"""Arithmetic with a calculator: a tool the model calls in one turn and reads from in the next."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from megatron_rl.environments.base import ConversationEnvironment, drawn_tasks
from megatron_rl.environments.grading import arithmetic_value
from megatron_rl.types import Demonstration, Grade, LaterTurn, Message, Prompt, Split, Step, Task, Turn

CALL = re.compile(r"<([^<>]*)>\s*$")
"""A call ends the model's turn: ``<37*46>``."""
INSTRUCTION = (
    "Compute {expression}. You have a calculator: end a message with an expression in angle brackets, such as "
    "<12*34>, and you are told its value. Finish with # and the number, such as #408."
)


class Calculator(ConversationEnvironment):
    """Computes with numbers too large for the head; a calculator answers ``<37*46>`` with ``=1702,``.

    The conversation ends with ``#`` and the answer, worth 1 if it is right. A turn that neither calls nor answers
    ends it too, worth 0, and so does the last turn. The metric ``calls`` counts the calls that were answered.

    ``chat`` asks in words, as a chat; otherwise the prompt is the expression and ``=``. Demonstrations are plain
    text: ``guess_share`` of them guess without calling, and guess wrong, to leave reinforcement learning
    something to correct.
    """

    name = "calculator"
    in_process = True

    def __init__(
        self,
        *,
        chat: bool = False,
        max_turns: int = 3,
        operators: str = "+-*",
        min_terms: int = 2,
        max_terms: int = 3,
        max_operand: int = 99,
        seed: int = 0,
        train_tasks: int = 4096,
        test_tasks: int = 256,
        demonstrations: int = 24000,
        guess_share: float = 0.6,
    ) -> None:
        if not 2 <= min_terms <= max_terms <= 100:
            raise ValueError(f"2 <= min_terms <= max_terms <= 100 must hold, got {min_terms} and {max_terms}")
        if not operators or set(operators) - set("+-*"):
            raise ValueError(f"operators is {operators!r}; use some of + - *")
        if max_turns < 2 or max_operand < 1 or not 0 <= guess_share <= 1:
            raise ValueError("max_turns must be at least 2, max_operand 1, and guess_share within 0 and 1")
        self.max_turns = max_turns
        self._chat, self._operators, self._terms = chat, operators, (min_terms, max_terms)
        self._max_operand, self._seed = max_operand, seed
        self._num_tasks = {"train": train_tasks, "test": test_tasks}
        self._num_demonstrations, self._guess_share = demonstrations, guess_share

    def tasks(self, split: Split) -> Iterator[Task]:
        """Distinct expressions in random order."""
        rng = random.Random(f"{self._seed}:{split}")
        return drawn_tasks(lambda: self._draw(rng), split, self._num_tasks[split], "raise max_operand")

    def step(self, task: Task, state: Any, turn: Turn) -> Step:
        """A value for a call; the end for an answer, or for a turn that is neither."""
        calls = state["calls"] if state else 0
        _, mark, answer = turn.text.rpartition("#")
        if mark:
            right = turn.ended and answer.strip() == task.data["answer"]
            status = "correct" if right else "wrong"
            return Step(done=True, reward=Grade(float(right), {"calls": calls}, status, answer.strip()))
        unanswered = Grade(0.0, {"calls": calls}, "no_answer")
        call = CALL.search(turn.text) if turn.ended else None
        if call is None:
            return Step(done=True, reward=unanswered)
        return Step((self._reply(call[1]),), {"calls": calls + 1}, reward=unanswered)

    def gold_turns(self, task: Task) -> list[str]:
        """A call, then the value."""
        return [f"<{task.data['expression']}>", f"#{task.data['answer']}"]

    def demonstrations(self, split: Split) -> Iterator[Demonstration]:
        """Calls followed by the answer, and guesses; of training tasks only."""
        rng = random.Random(f"{self._seed}:demonstrations")
        count = self._num_demonstrations if split == "train" else 0
        drawn = drawn_tasks(lambda: self._draw(rng), "train", count, "raise max_operand", repeats=True)
        for shown, task in enumerate(drawn, start=1):
            call, answer = self.gold_turns(task)
            # the first ones are right, as a curriculum begins
            if shown > 100 and rng.random() < self._guess_share:
                yield Demonstration(task, f"#{int(task.data['answer']) + rng.choice((-10, -2, -1, 1, 2, 10))}")
            else:
                yield Demonstration(task, call, (LaterTurn((self._reply(call[1:-1]),), answer),))

    def _draw(self, rng: random.Random) -> Task:
        terms = [str(rng.randint(1, self._max_operand)) for _ in range(rng.randint(*self._terms))]
        expression = "".join(part for term in terms for part in (rng.choice(self._operators), term))[1:]
        answer = str(arithmetic_value(expression))
        prompt: Prompt = f"{expression}="
        if self._chat:
            prompt = ({"role": "user", "content": INSTRUCTION.format(expression=expression)},)
        return Task(expression, prompt, {"expression": expression, "answer": answer})

    def _reply(self, expression: str) -> Message:
        try:
            value = str(arithmetic_value(expression))
        except (ValueError, ZeroDivisionError):
            value = "?"
        return {"role": "user", "content": value if self._chat else f"={value},"}
