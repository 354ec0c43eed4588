"""One vocabulary of failures: each error is named after the boundary it crossed.

A message has three parts: what, why, what instead.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_VALUE = 200
"""Characters of a value in a message."""
MAX_LINE = 500
"""Characters of a text that somebody else wrote, such as an exception's, in a message."""
MAX_PROBLEM = 800
"""Characters of a problem."""


def shorten(value: object, limit: int = MAX_VALUE) -> str:
    """Return ``repr(value)`` in at most ``limit`` characters; that of a YAML list of anchors could fill the memory."""
    short = reprlib.Repr()
    short.maxlevel, short.maxother, short.maxstring = 4, limit, limit
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = short.maxfrozenset = 8
    try:
        text = short.repr(value)
    except ValueError:  # more digits than sys.get_int_max_str_digits()
        text = f"<{type(value).__name__} with a number of thousands of digits>"
    return cut("".join(sign if sign.isprintable() else " " for sign in text), limit)


def one_line(text: str, limit: int = MAX_LINE) -> str:
    """Take line breaks and control characters out of ``text``, and its middle beyond ``limit`` characters."""
    if len(text) > 2 * limit:
        text = f"{text[:limit]} ... {text[-limit:]}"
    return cut("".join(sign if sign.isprintable() else " " for sign in " ".join(text.split())), limit)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with what the user asked for.

    ``Problem("--lr", "--lr is missing: the peak learning rate; give for example --lr 1e-6")``
    """

    flag: str | None
    """The flag to change, with its dashes; None where no single one is to blame."""
    text: str
    """The whole line for the user: what, why, what instead."""
    is_unknown: bool = False
    """It is about a word that is no flag."""

    def __str__(self) -> str:
        return self.text

    def under(self, flag: str) -> Problem:
        """Name the flag it was found under: ``--load-hf: config.json is not JSON``."""
        return Problem(flag, f"{flag}: {self.text}")


def problem_lines(problems: Sequence[Problem | str]) -> list[str]:
    """Shorten each problem to one line."""
    return [one_line(str(problem), MAX_PROBLEM) for problem in problems]


def cut(line: str, limit: int) -> str:
    """Leave out the middle of a line of more than ``limit`` characters: what and what instead stay."""
    if len(line) <= limit:
        return line
    end = (limit - 5) // 3
    return f"{line[: limit - 5 - end]} ... {line[-end:]}"


class MegatronRLError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(MegatronRLError):
    """The user's configuration cannot run; carries every problem found. A bare text is a problem of no flag."""

    def __init__(self, problems: Sequence[Problem | str]) -> None:
        self.problems = tuple(Problem(None, each) if isinstance(each, str) else each for each in problems)
        super().__init__("\n".join(map(str, self.problems)))

    @property
    def lines(self) -> list[str]:
        """The problems as text."""
        return [problem.text for problem in self.problems]


@contextlib.contextmanager
def collecting(problems: list[Problem], flag: str | None = None) -> Iterator[None]:
    """Add what a check raises to ``problems``, as found in what ``flag`` names, and go on."""
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        found = error.problems if isinstance(error, ConfigError) else (Problem(flag, str(error)),)
        problems += [each if flag is None else each.under(flag) for each in found]


class CheckpointError(MegatronRLError):
    """A checkpoint is absent, damaged or of another model; names the file."""


class SaveError(CheckpointError):
    """A checkpoint could not be written, on one rank at least; the same on every rank."""


class EnvironmentFault(MegatronRLError):
    """An environment (not a single sample) failed: its server, its data or its code."""


class ChatRefused(EnvironmentFault):
    """A chat template cannot render a chat: that row, request or turn is left out; names the roles and the reason."""


class TextTooLong(MegatronRLError):
    """A text has more characters than the tokens that there is room for; nothing of it was encoded."""


class EngineError(MegatronRLError):
    """The rollout engine cannot go on."""


class QuantizationError(MegatronRLError):
    """Weights that have no quantised form, or a layer that did not run in the format it was given."""


class MemoryExhausted(MegatronRLError):
    """An allocation failed, on the device or on the host; names the phase and what to lower."""

    def __init__(self, message: str, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks  # at the same point, so that they can still save together


class TrainingError(MegatronRLError):
    """The training step cannot go on, for example after repeated non-finite gradients."""
