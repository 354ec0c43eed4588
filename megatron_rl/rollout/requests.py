"""Draws to generation requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_rl.rollout.prompt_source import Draw
from megatron_rl.types import GenerationRequest, SamplingParams


@dataclass(frozen=True)
class RequestFactory:
    """Knows how answers are drawn and how long a sequence may become."""

    sampling: SamplingParams
    max_sequence_length: int

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for a full answer.

        When answers may fill the whole sequence, a prompt needs only leave room for one token.
        """
        if self.sampling.max_new_tokens >= self.max_sequence_length - 1:
            return self.max_sequence_length - 1
        return self.max_sequence_length - self.sampling.max_new_tokens

    def request(
        self, draw: Draw, num_samples: int, index: int, greedy: bool = False, at_most: int | None = None
    ) -> GenerationRequest:
        """One group; ``index`` is its number in the step, ``at_most`` bounds its new tokens further."""
        room = self.max_sequence_length - len(draw.prompt_ids)
        tokens = min(self.sampling.max_new_tokens, room, at_most or room)
        sampling = replace(self.sampling, greedy=greedy, max_new_tokens=tokens)
        return GenerationRequest(draw.source, draw.prompt_ids, num_samples, sampling, index)
