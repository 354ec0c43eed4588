"""Instructions that a program can check: the form of an answer, in the way of IFEval (arXiv 2311.07911)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_rl.environments.base import Environment, drawn_tasks
from megatron_rl.types import Grade, Split, Task, Transcript

QUESTIONS: Mapping[str, str] = {
    "apple": "Tell me about apples.", "bicycle": "Why do people ride a bicycle?", "bread": "How is bread made?",
    "bridge": "What is a bridge good for?", "candle": "What is a candle used for?",
    "cat": "How does a cat spend its day?", "city": "What do you find in a city?",
    "cloud": "Where does a cloud come from?", "clock": "What does a clock do?", "desert": "Describe a desert.",
    "dog": "What does a dog like?", "farm": "What happens on a farm?", "fire": "What is fire good for?",
    "forest": "What lives in a forest?", "garden": "What grows in a garden?", "glass": "What is made of glass?",
    "gold": "Why is gold precious?", "honey": "Where does honey come from?", "horse": "What can a horse do?",
    "ice": "What is ice?", "island": "Describe an island.", "kitchen": "What do you do in a kitchen?",
    "lake": "What can you do at a lake?", "letter": "Why would somebody write a letter?",
    "library": "What is a library for?", "lion": "Describe a lion.", "market": "What do you buy at a market?",
    "milk": "What is made from milk?", "moon": "Describe the moon.", "mountain": "Why do people climb a mountain?",
    "museum": "What do you see in a museum?", "music": "Why do people like music?", "night": "What happens at night?",
    "ocean": "What lives in the ocean?", "orange": "Describe an orange.", "paper": "What is paper used for?",
    "piano": "How does a piano sound?", "rain": "What is rain good for?", "river": "Where does a river go?",
    "rose": "Describe a rose.", "salt": "What is salt used for?", "school": "What do children learn at school?",
    "ship": "What does a ship carry?", "snow": "What do children do in the snow?", "soup": "How do you make soup?",
    "spring": "What happens in spring?", "star": "What is a star?", "stone": "What is stone used for?",
    "sugar": "Where does sugar come from?", "summer": "What do people do in summer?", "sun": "What does the sun do?",
    "tea": "How do you make tea?", "tiger": "Describe a tiger.", "train": "Why do people take the train?",
    "tree": "What is a tree good for?", "village": "What do you find in a village?",
    "water": "What is water used for?", "wind": "What does the wind do?", "winter": "What do people do in winter?",
    "wood": "What is made of wood?",
}  # fmt: skip
"""Subject -> a question about it."""
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 8: "eight", 10: "ten", 15: "fifteen"}
KEYS = ("answer", "reason", "name", "example", "title", "color")
ENDINGS = ("The end.", "That is all.", "Thank you.")
WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
BULLET = re.compile(r"[-*•] +\S.*")

Instruction = dict[str, Any]
"""A ``kind`` of `KINDS`, and what it wants."""


def _has_keys(text: str, wanted: Sequence[str]) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and set(value) == set(wanted) and all(map(_says_something, value.values()))


def _says_something(value: Any) -> bool:
    return bool(WORD.search(value)) if isinstance(value, str) else value not in (None, [], {})


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


KINDS: Mapping[str, tuple[Callable[[Any], str], Callable[[str, Any], bool]]] = {
    "one_word": (
        lambda _: "Answer with exactly one word.",
        lambda text, _: len(text.split()) == 1 and len(WORD.findall(text)) == 1,
    ),
    "most_words": (
        lambda most: f"Use at most {NUMBERS[most]} words.",
        lambda text, most: len(WORD.findall(text)) <= most,
    ),
    "bullets": (
        lambda count: f'Answer in exactly {NUMBERS[count]} bullet points, each on a line that begins with "- ".',
        lambda text, count: len(_lines(text)) == count and all(map(BULLET.fullmatch, _lines(text))),
    ),
    "json": (
        lambda keys: f"Answer only with a JSON object that has exactly the keys {' and '.join(map(json.dumps, keys))}.",
        _has_keys,
    ),
    "capitals": (lambda _: "Write in capital letters only.", lambda text, _: text == text.upper()),
    "small_letters": (lambda _: "Write in lower-case letters only.", lambda text, _: text == text.lower()),
    "no_comma": (lambda _: "Do not use any commas.", lambda text, _: "," not in text),
    "mentions": (
        lambda word: f'Use the word "{word}".',
        lambda text, word: word in map(str.lower, WORD.findall(text)),
    ),
    "ending": (lambda words: f'End with the words "{words}"', lambda text, words: text.lower().endswith(words.lower())),
}
"""Kind -> how it is asked for, and whether an answer keeps to it."""
FORMS = ("one_word", "most_words", "bullets", "json")
"""Kinds of which a prompt has at most one."""
LETTERS = ("capitals", "small_letters")


class Instructions(Environment):
    """Answers a question in a given form: one word, capitals, JSON with given keys, three bullet points.

    A prompt has between one and ``most`` instructions. The reward is the share of them that the answer keeps to, and
    only an answer that keeps to all is right; one that is cut or has no word keeps to none. What it says about the
    subject is not checked. ``count`` prompts are drawn; those held out are never trained on.
    """

    name = "instructions"
    in_process = True

    def __init__(self, *, count: int = 512, most: int = 3, seed: int = 0) -> None:
        if not 1 <= count <= 3000:
            raise ValueError(f"count is {count}; use 1 to 3000")
        if not 1 <= most <= 3:
            raise ValueError(f"most is {most}; use 1 to 3")
        self._count, self._most, self._seed = count, most, seed

    def tasks(self, split: Split) -> Iterable[Task]:
        """Up to ``count`` prompts for training, and a quarter as many held out."""
        draw = random.Random(self._seed)
        count = self._count if split == "train" else max(1, self._count // 4)
        return drawn_tasks(lambda: self._draw(draw), split, count, few="use a smaller count")

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """The share of the instructions that are kept, each of which is a metric of its own."""
        text = transcript.text.strip()
        if not transcript.ended or not WORD.search(text):
            return Grade(0.0, status="no_answer")
        kept = {each["kind"]: KINDS[each["kind"]][1](text, each["wanted"]) for each in task.data["instructions"]}
        metrics = {kind: float(value) for kind, value in kept.items()}
        status = "correct" if all(kept.values()) else "wrong"
        return Grade(sum(metrics.values()) / len(kept), metrics, status, text[:80])

    def gold_answer(self, task: Task) -> str:
        """An answer that keeps to all instructions, whatever it says."""
        wanted = {each["kind"]: each["wanted"] for each in task.data["instructions"]}
        word = wanted.get("mentions", "yes")
        if "json" in wanted:
            return json.dumps(dict.fromkeys(wanted["json"], word))
        text = f"{word} {wanted['ending']}" if "ending" in wanted else word
        if "bullets" in wanted:
            text = "\n".join(["- yes"] * (wanted["bullets"] - 1) + [f"- {text}"])
        return text.upper() if "capitals" in wanted else text.lower() if "small_letters" in wanted else text

    def _draw(self, draw: random.Random) -> Task:
        subject = draw.choice(sorted(QUESTIONS))
        instructions = _drawn(draw, subject, draw.randint(1, self._most))
        asked = " ".join(KINDS[each["kind"]][0](each["wanted"]) for each in instructions)
        prompt = f"{QUESTIONS[subject]} {asked}"
        return Task(prompt, ({"role": "user", "content": prompt},), {"instructions": instructions})


def _drawn(draw: random.Random, subject: str, count: int) -> list[Instruction]:
    """Instructions that an answer can keep to all at once."""
    wanted: dict[str, Any] = {
        "one_word": None, "most_words": draw.choice([5, 8, 10, 15]), "bullets": draw.choice([2, 3, 4, 5]),
        "json": draw.sample(KEYS, 2), "capitals": None, "small_letters": None, "no_comma": None, "mentions": subject,
        "ending": draw.choice(ENDINGS),
    }  # fmt: skip
    chosen = [draw.choice([*FORMS, *LETTERS])]
    allowed = {
        "one_word": [*LETTERS], "json": ["mentions"], "most_words": [*LETTERS, "no_comma", "mentions", "ending"],
    }.get(chosen[0], ["no_comma", "mentions", "ending", *([] if chosen[0] in LETTERS else LETTERS)])  # fmt: skip
    for kind in draw.sample(allowed, len(allowed)):
        if len(chosen) < count and not (kind in LETTERS and set(LETTERS) & set(chosen)):
            chosen.append(kind)
    return [{"kind": kind, "wanted": wanted[kind]} for kind in chosen]
