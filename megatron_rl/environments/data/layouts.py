"""The layouts in which data sets are published: one table. A data set is recognised by its columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The columns of a row. A name with dots is a field in a column: ``reward_model.ground_truth``."""

    problem: str
    """The bare problem, or a chat that asks for it."""
    answer: str = ""
    """The right answer."""
    solution: str = ""
    """A worked solution, or whatever a model should learn to write."""
    boxed: bool = False
    """Whether ``answer`` is a solution, and the answer what stands in its last box."""
    others: tuple[str, ...] = ()
    """Further columns that are needed."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a data set of this layout has, each once."""
        names = (self.problem, self.answer, self.solution, *self.others)
        return tuple(dict.fromkeys(name.partition(".")[0] for name in names if name))

    @property
    def beside(self) -> tuple[str, ...]:
        """Columns that are read with ``answer`` where they are there."""
        return BESIDE.get(self.answer, ())


VERL = Layout("prompt", "reward_model.ground_truth")
"""DAPO-Math-17k, BytedTsinghua-SIA/AIME-2024, and what verl's scripts prepare."""
VERL_SOLVED = Layout("prompt", "reward_model.ground_truth", solution="extra_info.answer")
"""GSM8K as verl's script prepares it."""
SLIME = Layout("prompt", "label")
"""The JSON lines of slime's recipes, and so of InfiR2's: zhuzilin/dapo-math-17k, zhuzilin/aime-2024."""
PROBLEM = Layout("problem", "answer")
"""MATH-500, DeepScaleR, math-ai/aime25, HuggingFaceH4/aime_2024, MathArena's."""
QUESTION = Layout("question", "answer")
"""opencompass/AIME2025."""
QUESTION_SOLVED = Layout("question", "answer", solution="answer")
"""openai/gsm8k: the answer is the end of its solution."""
CAPITALS = Layout("Problem", "Answer")
"""Maxwell-Jia/AIME_2024."""
BOXED = Layout("problem", "solution", boxed=True)
"""math-ai/aime24, whose solutions are boxes, and the MATH data set."""
NUMBERS = Layout("nums", "target")
"""Countdown: Jiayi-Pan/Countdown-Tasks-3to4."""
NUMBERS_TEXT = Layout("input", "output")
"""Countdown: d1's test set, of texts."""
WRITTEN = Layout("prompt", solution="completion")
"""Prompts with what should be written, to learn from."""
CHAT = Layout("messages")
"""Chats. Those that end with the assistant are to be learnt from."""

MATH = (VERL, SLIME, PROBLEM, QUESTION, CAPITALS, BOXED)
"""Problems with answers."""

CODE = (
    Layout("text", "test_list"),  # MBPP
    Layout("prompt", "test_list"),  # MBPP, sanitized
    Layout("prompt", "test"),  # HumanEval
    Layout("question", "input_output"),  # APPS, TACO
    Layout("problem", "tests"),  # agentica-org/DeepCoder-Preview-Dataset
    Layout("prompt", "verification_info"),  # PrimeIntellect/verifiable-coding-problems
    VERL,  # PRIME-RL/Eurus-2-RL-Data
)
"""Problems with tests of the code that solves them."""
BESIDE = {"test_list": ("test_setup_code", "test_imports"), "test": ("entry_point", "prompt")}
"""By the column of the tests, those that belong to them where a data set has them."""

# The prompts of DAPO-Math-17k, of slime's copy of it, and of verl's GSM8K and MATH.
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
_BEGINNINGS = (
    BEFORE,
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: \\boxed{$Answer} where $Answer is the answer to the problem.\n\n",
)
_ENDINGS = (
    AFTER,
    " Let's think step by step and output the final answer after \"####\".",
    " Let's think step by step and output the final answer within \\boxed{}.",
)


def bare_problem(text: str) -> str:
    """Return the problem in a published prompt; the text as it is when it is written otherwise."""
    for beginning in _BEGINNINGS:
        text = text.removeprefix(beginning)
    for ending in _ENDINGS:
        text = text.removesuffix(ending)
    return text


def recognised(layouts: Sequence[Layout], columns: Collection[str]) -> Layout | None:
    """Return the first of the layouts whose columns are all there."""
    return next((layout for layout in layouts if set(layout.columns) <= set(columns)), None)
