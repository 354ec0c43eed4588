"""Megatron's flags that change nothing here; `no_effect.txt` has a row for each: ``spellings | values | why``.

``values`` is what may follow the flag: ``switch`` (nothing), ``VALUE``, ``VALUE ...``, the values that are built, or
another flag, whose value it must have. A row with ``refused`` is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from megatron_rl.errors import Problem, shorten

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig


@dataclass(frozen=True)
class NoEffect:
    """A flag that is accepted, or refused, and never read."""

    spellings: tuple[str, ...]
    """With dashes."""
    values: str
    why: str

    @property
    def is_switch(self) -> bool:
        """Return whether no value follows it."""
        return self.values in ("switch", "refused")

    @property
    def note(self) -> str | None:
        """The line that a run prints; None where the only value that is built was given."""
        is_said = self.values in ("switch", "VALUE", "VALUE ...")
        return f"{self.spellings[0]} has no effect: {self.why}" if is_said else None

    def refusal(self, texts: Sequence[str], config: RLConfig) -> str | None:
        """Say what is wrong with the values ``texts``; None if nothing is."""
        if self.values == "refused":
            return f"is refused: {self.why}"
        if self.is_switch:
            return f"takes no value, got {shorten(' '.join(texts))}" if texts else None
        if not texts:
            return "needs a value"
        if len(texts) > 1 and self.values != "VALUE ...":
            return f"takes one value, got {len(texts)}: {shorten(' '.join(texts))}"
        if self.values.startswith("--"):
            built = str(config.value(self.values.removeprefix("--").replace("-", "_")))
            what = f"{self.values} {built}"
            return None if texts[0] == built else f"{shorten(texts[0])} is not {what}: {self.why}; leave it out"
        if self.note is None and not any(_equal(texts[0], built) for built in self.values.split(", ")):
            return f"{shorten(texts[0])} is not built: {self.why}; use {self.values}"
        return None


@functools.cache
def no_effect() -> Mapping[str, NoEffect]:
    """Return every spelling, without dashes, and its row; a switch has both its spelling and its opposite."""
    found: dict[str, NoEffect] = {}
    for line in files(__package__).joinpath("no_effect.txt").read_text(encoding="utf-8").splitlines():
        spellings, values, why = line.split(" | ")
        row = NoEffect(tuple(spellings.split(", ")), values, why)
        for name in (spelling.removeprefix("--") for spelling in row.spellings):
            found[name] = row
            if row.is_switch:
                found[name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"] = row
    return found


def no_effect_problems(config: RLConfig, _: int) -> Iterator[Problem]:
    """Report the flags of `no_effect.txt` that are refused or have a value that is not built."""
    for row, texts in config.no_effect.items():
        refusal = row.refusal(texts, config)
        if refusal is not None:
            yield Problem(row.spellings[0], f"{row.spellings[0]} {refusal}")


def _equal(text: str, built: str) -> bool:
    try:
        return float(text) == float(built)
    except ValueError:
        return text == built
