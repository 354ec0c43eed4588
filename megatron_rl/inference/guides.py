"""What changes the distribution that one sequence is drawn from, token by token: grammars, biases, penalties.

    host     Guide.bias(tokens so far) ─► a row [V] of `BatchState.bias`, where it has changed
    device   logits + bias ─► temperature, top-k, top-p ─► token, and its log-prob under what it was drawn from

A grammar knows its next mask only when the host has read the last token, so a batch with such a sequence is read after
every step. Sequences without constraints have no guide.
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
from megatron_rl.inference.sequence import FOR_EVER
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Constraints


class Grammars:
    """Compiles grammars in Lark's notation for one vocabulary, with llguidance, which is imported when one is needed.

    ``start: "yes" | "no"``, ``start: %json {"type": "object"}``: https://github.com/guidance-ai/llguidance has more.
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
    """Compile a grammar once: in the endpoint's text thread, so that the engine's need not wait for it."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0)
    if matcher.is_error():
        raise ConfigError([one_line(matcher.get_error(), 300)])
    return matcher


class Guide:
    """The guide of one sequence: the biases of its next token, a function of the tokens that it has drawn."""

    def __init__(
        self, constraints: Constraints, vocab_size: int, end_ids: Collection[int],
        grammar: Callable[[str], Any] | None = None, prompt_ids: Collection[int] = (),
    ) -> None:  # fmt: skip
        """``end_ids`` end an answer; ``grammar`` gives the matcher of ``constraints.grammar``, where there is one."""
        self._constraints = constraints
        self._ends = sorted(end_ids)
        self._always = torch.zeros(vocab_size)
        for token, bias in constraints.logit_bias:
            self._always[token] += bias
        if constraints.ignores_end:
            self._always[self._ends] = float("-inf")
        self._counts = torch.zeros(vocab_size) if constraints.penalizes else None
        self.divisor = torch.ones(vocab_size) if constraints.repetition_penalty != 1 else None
        """What divides positive logits and multiplies negative ones [V] fp32, before `bias`, which keeps it current."""
        if self.divisor is not None:
            self.divisor[list(prompt_ids)] = constraints.repetition_penalty
        self._matcher = grammar(constraints.grammar) if constraints.grammar else None
        self._num_seen = 0
        self.is_stuck = False
        """The grammar allows no token, or is beyond llguidance's limits: what is drawn from now on is no answer."""

    @property
    def is_constant(self) -> bool:
        """Return whether the bias never changes."""
        return self.holds_until(0) == FOR_EVER

    def holds_until(self, num_drawn: int) -> int:
        """Return how many tokens may be drawn in all with the bias that holds after ``num_drawn`` of them."""
        if self._matcher is not None or self._counts is not None:
            return num_drawn + 1
        return self._constraints.min_tokens if num_drawn < self._constraints.min_tokens else FOR_EVER

    def bias(self, token_ids: ListOf[int]) -> torch.Tensor:
        """Return what is added to the logits [V] fp32 of the next token; ``token_ids``: all that were drawn.

        They grow from call to call. Where nothing would be left, the end tokens are.
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
        """The tokens [V] bool that the grammar goes on with; none where it has gone beyond llguidance's limits."""
        if self._matcher.is_error():
            return torch.zeros(vocab_size, dtype=torch.bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, count=vocab_size, bitorder="little")).bool()


def literal(text: str, unsplit_tokens: dict[str, int]) -> str:
    """Return ``text`` in Lark's notation. One of `Tokenizer.unsplit_tokens` is no text there: llguidance takes those in
    angle brackets for special tokens, which match no text, whatever the tokenizer says of them."""
    return f"<[{unsplit_tokens[text]}]>" if text in unsplit_tokens else json.dumps(text)
