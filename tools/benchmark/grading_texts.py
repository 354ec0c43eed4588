"""Problems and completions for the grading benchmark: 2 kB of reasoning with an answer, no two alike."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.environments.base import Environment
from megatron_rl.types import Split, Task, Transcript

ENVIRONMENTS = {
    "math": "math500",
    "dapo": "dapo",
    "exact_number": "gsm8k",
    "countdown": "countdown",
    "arithmetic": "arithmetic",
}
"""The environment that each kind of grader is measured in; the last one grades by itself, in the server."""
PROBLEMS = 256
RIGHT, WRONG = 8, 15
"""Of 16 completions 8 are right, 7 wrong, and the last gives no answer."""

SENTENCES = (
    "Let $x = {a}$ and $y = {b}$, so that $x + y = {c}$ and the first condition holds.",
    "Substituting gives \\[ {a}x^2 - {b}x + {c} = 0, \\] whose discriminant is ${b}^2 - 4 \\cdot {a} \\cdot {c}$.",
    "We note that $\\frac{{{a}}}{{{b}}}$ is already in lowest terms, because the two share no factor.",
    "Hence there are $\\binom{{{a}}}{{2}}$ ways to choose the pair, of which {c} have to be left out.",
    "Wait, I should check this: {a} times {b} is not {c}, so the case with {a} needs another look.",
    "Since {c} is divisible by {b}, the remainder is 0, and the sequence repeats after {a} terms.",
    "By symmetry the second triangle has the area $\\frac{{1}}{{2}} \\cdot {a} \\cdot {b}$ as well.",
    "So far we have used {a} of the {c} objects; the others must lie on the line $y = {b}x + {a}$.",
)


def environment_entry(kind: str, folder: Path) -> dict[str, Any]:
    """The entry of an environment list for a kind; a data set it reads is written to ``folder``."""
    name = ENVIRONMENTS[kind]
    rows = _rows(kind)
    if not rows:
        return {"environment": name, "args": {"train_tasks": PROBLEMS, "test_tasks": 1}}
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"environment": name, "args": {"path": str(path)} | ({"held_out": 0} if kind == "dapo" else {})}


def split_of(environment: Environment) -> Split:
    """Where the problems of an environment are."""
    return "test" if environment.evaluation_only else "train"


def groups_of(
    environment: Environment, tasks: Sequence[Task], size: int, characters: int, seed: int
) -> Iterator[list[tuple[Task, Transcript]]]:
    """Groups without end: each has one task and ``size`` completions of ``characters``."""
    draw = random.Random(f"{environment.name}:{seed}")
    while True:
        task = draw.choice(tasks)
        group = []
        for sample in range(size):
            answered = task if sample % 16 < RIGHT else draw.choice(tasks) if sample % 16 < WRONG else None
            ending = "" if answered is None else environment.gold_answer(answered) or ""
            text = completion(draw, ending, characters, chain=environment.name == "arithmetic")
            group.append((task, Transcript(text, "stop", len(text) // 4)))
        yield group


def completion(draw: random.Random, ending: str, characters: int, chain: bool) -> str:
    """Reasoning up to the length wanted, and the line with the answer."""
    parts: list[str] = []
    length = len(ending)
    while length < characters:
        a, b, c = (draw.randint(2, 99) for _ in range(3))
        parts.append(f"{a}+{b}={a + b}" if chain else draw.choice(SENTENCES).format(a=a, b=b, c=c))
        length += len(parts[-1]) + 1
    return ",".join([*parts, ending]) if chain else "\n".join([*parts, ending])


def _rows(kind: str) -> list[dict[str, Any]]:
    """A data set in the published layout; none for the environments that make their own tasks."""
    draw = random.Random(kind)
    if kind == "math":
        return [{"problem": f"Problem {n}: simplify.", "answer": _expression(draw)} for n in range(PROBLEMS)]
    if kind == "exact_number":
        answers = [draw.randint(-999, 9999) for _ in range(PROBLEMS)]
        return [{"question": f"Story {n}?", "answer": f"So it is.\n#### {answer}"} for n, answer in enumerate(answers)]
    if kind == "dapo":
        return [
            {
                "prompt": [{"role": "user", "content": f"Problem {n}: find it."}],
                "reward_model": {"ground_truth": str(draw.randint(-999, 9999))},
            }
            for n in range(PROBLEMS)
        ]
    return []


def _expression(draw: random.Random) -> str:
    """An answer as MATH-500 has them: two in three are numbers."""
    a, b, c = (draw.randint(2, 40) for _ in range(3))
    forms = (f"{a * b * c}", f"{a}", f"-{b}", f"\\frac{{{a}}}{{{b + a}}}", f"{a}.{b}", f"{a * b}",
             f"{a}\\sqrt{{{b}}}", f"({a}, {b})", f"{a}x^2 - {b}x + {c}")  # fmt: skip
    return draw.choice(forms)
