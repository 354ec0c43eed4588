"""What an answer is asked with, as the engine's thread gets it, and what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rl.endpoint.options import Drawing
from megatron_rl.types import SamplingParams


@dataclass(frozen=True)
class Call:
    """One answer that is asked for: prompt ``P0 P1``, answered ``A0 E``, and then ``R0 R1`` goes on from it."""

    number: int
    """Unique in the endpoint."""
    session: str | None
    """None: nobody trains on it."""
    after: int | None
    """The call of the same session whose answer it goes on from; None: a root."""
    ids: tuple[int, ...]
    """Of a root the whole prompt, else what the model reads after that answer (``R0 R1``)."""
    branch: int
    """In a session which of the sample's sequences it draws; else the index of the choice. Each has its seeds."""
    max_new_tokens: int
    """There is room for so many."""
    stop: tuple[str, ...]
    """The caller's own, beside the run's."""
    stop_token_ids: tuple[int, ...]
    """The caller's own."""
    sampling: SamplingParams | None
    """Where there is no session: the caller's, with ``max_new_tokens`` and ``stop``."""
    seed: int | None
    """The caller's, without a session."""
    hints: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Hints`; without a session."""


@dataclass(frozen=True)
class Limits:
    """The limits and features of the endpoint."""

    model: str
    """Its name."""
    max_sequence_length: int
    max_new_tokens: int
    sampling: SamplingParams
    """What callers leave open."""
    fixed: str = ""
    """Why the engine draws from the model's own distribution alone; empty where it need not."""
    unscored: str = ""
    """Why it knows the log-probs of drawn tokens alone; empty where it knows those of others."""
    reasoning: str = "none"
    """The parser of thoughts in chats; none: they are part of the text."""


def sampling_of(asked: Drawing, default: SamplingParams, max_new_tokens: int) -> SamplingParams:
    """Return what the caller asks for, and ``default`` where it leaves something open. Temperature 0 is greedy."""
    temperature = default.temperature if asked.temperature is None else asked.temperature
    return replace(
        default, **{name: value for name in ("top_k", "top_p", "min_p") if (value := getattr(asked, name)) is not None},
        temperature=temperature or 1.0, greedy=temperature == 0 or (asked.temperature is None and default.greedy),
        max_new_tokens=max_new_tokens, stop=tuple(dict.fromkeys((*default.stop, *asked.stop))),
        stop_token_ids=asked.stop_token_ids, constraints=asked.constraints,
    )  # fmt: skip
