"""How answers are drawn: what a request says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Constraints:
    """Changes of the distribution as an answer grows: for answers that nobody trains on."""

    grammar: str = ""
    """In Lark's notation: the answer is one of its texts. Empty: any text."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and what is added to their logits."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the answer has."""
    frequency_penalty: float = 0.0
    """Taken off for each time that the answer has them."""
    min_tokens: int = 0
    """No end token is drawn before so many others."""
    ignores_end: bool = False
    """No end token is drawn at all."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that prompt or answer have, and multiplies negative ones."""

    @property
    def penalizes(self) -> bool:
        """Return whether a penalty is on."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of completions. ``top_k=0``, ``top_p=1.0`` and ``min_p=0.0`` mean off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """An answer ends with the first of them, beside the end tokens."""
    min_p: float = 0.0
    """Tokens with less than this part of the likeliest one's probability are not drawn."""
    constraints: Constraints | None = None


@dataclass(frozen=True)
class TokenScore:
    """The log-prob of a token where it stands, beside the likeliest ones."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """Token ids and log-probs, the likeliest first."""


def find_stop(text: str, stop: Sequence[str], least: int = 0) -> int | None:
    """Return where the first stop string begins; it counts only if it ends behind the first ``least`` characters."""
    found = [text.find(string, max(0, least - len(string) + 1)) for string in stop]
    return min((index for index in found if index >= 0), default=None)
