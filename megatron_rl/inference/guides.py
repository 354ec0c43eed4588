"""Constraints of one sequence, applied to its logits: grammars, biases, penalties.

    host     Guide.bias(tokens so far) ─► a row [V] of `BatchState.bias`, when it has changed
    device   logits + bias ─► temperature, top-k, top-p ─► token, and its log-prob in that distribution

The mask of a grammar depends on the last token, so the host reads a batch with such a sequence after every step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from collections.abc import Sequence as ListOf
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from megatron_rl.errors import ConfigError, one_line
from megatron_rl.inference.sequence import UNLIMITED
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Constraints


class Grammars:
    """Compiles grammars in Lark notation for one vocabulary, with llguidance (imported on first use).

    Example: ``start: "yes" | "no"`` or ``start: %json {"type": "object"}``; see
    https://github.com/guidance-ai/llguidance.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def matcher(self, grammar: str) -> Any:
        """Return an ``LLMatcher`` at the beginning of an answer.

        Raises:
            ConfigError: llguidance is not installed, or cannot read the tokenizer or the grammar.
        """
        try:
            import llguidance  # noqa: F401 - an extra
        except ImportError as error:
            raise ConfigError(['structured answers need llguidance: pip install "megatron-rl[structured]"']) from error
        return _compiled(self._tokenizer.for_grammars(), grammar).deep_copy()


@lru_cache(maxsize=32)
def _compiled(vocabulary: Any, grammar: str) -> Any:
    """Compile a grammar once. The endpoint's text thread calls it first, so that the engine does not wait."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0)
    if matcher.is_error():
        raise ConfigError([one_line(matcher.get_error(), 300)])
    return matcher


class Guide:
    """Computes the logit bias of a sequence's next token from the tokens drawn so far."""

    def __init__(
        self, constraints: Constraints, vocab_size: int, end_ids: Collection[int],
        grammar: Callable[[str], Any] | None = None, prompt_ids: Collection[int] = (),
    ) -> None:  # fmt: skip
        """``end_ids`` end an answer; ``grammar`` compiles ``constraints.grammar``."""
        self._constraints = constraints
        self._ends = sorted(end_ids)
        self._always = torch.zeros(vocab_size)
        for token, bias in constraints.logit_bias:
            self._always[token] += bias
        if constraints.ignores_end:
            self._always[self._ends] = float("-inf")
        self._counts = torch.zeros(vocab_size) if constraints.penalizes else None
        self.divisor = torch.ones(vocab_size) if constraints.repetition_penalty != 1 else None
        """[V] fp32, applied before `bias`: divides positive logits, multiplies negative ones. Updated by `bias`."""
        if self.divisor is not None:
            self.divisor[list(prompt_ids)] = constraints.repetition_penalty
        self._matcher = grammar(constraints.grammar) if constraints.grammar else None
        self._num_seen = 0
        self.is_stuck = False
        """The grammar allows no token or exceeds llguidance's limits: the answer is invalid."""

    @property
    def is_constant(self) -> bool:
        """Return whether the bias never changes."""
        return self.holds_until(0) == UNLIMITED

    def holds_until(self, num_drawn: int) -> int:
        """Return the total number of tokens that can be drawn before the bias after ``num_drawn`` changes."""
        if self._matcher is not None or self._counts is not None:
            return num_drawn + 1
        return self._constraints.min_tokens if num_drawn < self._constraints.min_tokens else UNLIMITED

    def bias(self, token_ids: ListOf[int]) -> torch.Tensor:
        """Return the bias [V] fp32 of the next token, after all tokens drawn so far.

        ``token_ids`` must extend those of the last call. If every token is forbidden, the end tokens are allowed.
        """
        new, self._num_seen = token_ids[self._num_seen :], len(token_ids)
        bias = self._always.clone()
        if self.divisor is not None:
            self.divisor[list(new)] = self._constraints.repetition_penalty
        if self._counts is not None:
            self._counts += torch.bincount(torch.tensor(new, dtype=torch.int64), minlength=len(bias))
            bias -= self._constraints.frequency_penalty * self._counts
            bias -= self._constraints.presence_penalty * (self._counts > 0)
        if len(token_ids) < self._constraints.min_tokens:
            bias[self._ends] = float("-inf")
        if self._matcher is not None:
            self._matcher.consume_tokens(list(new))
            allowed = self._allowed(len(bias))
            self.is_stuck = not allowed.any()
            bias.masked_fill_(~allowed, float("-inf"))
        if not torch.isfinite(bias.amax()):
            bias[self._ends] = 0.0
        return bias

    def _allowed(self, vocab_size: int) -> torch.Tensor:
        """Return the tokens [V] bool that the grammar allows; none if it exceeds llguidance's limits."""
        if self._matcher.is_error():
            return torch.zeros(vocab_size, dtype=torch.bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, count=vocab_size, bitorder="little")).bool()


def literal(text: str, unsplit_tokens: dict[str, int]) -> str:
    """Quote ``text`` for a Lark grammar. Unsplit tokens become ``<[id]>``: llguidance treats tokens in angle brackets
    as special tokens, which match no text.
    """
    return f"<[{unsplit_tokens[text]}]>" if text in unsplit_tokens else json.dumps(text)
