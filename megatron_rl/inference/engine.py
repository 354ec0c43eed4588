"""What the rest of the system may ask of a generation engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_rl.types import GeneratedGroup, GenerationRequest


@dataclass
class EngineStatistics:
    """Counters since `Engine.begin`."""

    decode_steps: int = 0
    decode_rows: int = 0
    """Rows computed over all decode steps; the finished ones among them are wasted work."""
    prefill_tokens: int = 0
    reused_tokens: int = 0
    """Of prompts, found in the cache instead of computed."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Those among the prefilled tokens that a pre-empted sample had in the cache before."""
    generated_tokens: int = 0
    completions: int = 0
    host_reads: int = 0
    """How often the host waited for the device to see what has finished."""

    def count_completion(self, num_tokens: int) -> None:
        """A sample has finished with ``num_tokens`` tokens."""
        self.generated_tokens += num_tokens
        self.completions += 1

    @property
    def useful_share(self) -> float:
        """Share of decoded rows that gave a token somebody asked for; first tokens come from prefill."""
        return (self.generated_tokens - self.completions) / max(self.decode_rows, 1)


class Engine(Protocol):
    """Turns requests into groups of completions with the log-prob of every sampled token.

    All ranks of a model-parallel group make the same calls in the same order.
    """

    statistics: EngineStatistics

    def begin(self, seed: int, policy_version: int) -> None:
        """Start a rollout: ``seed`` fixes every draw, ``policy_version`` is stamped on the results."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue one group."""
        ...

    def step(self) -> list[GeneratedGroup]:
        """Do a bounded amount of work; return the groups that finished in it."""
        ...

    @property
    def has_unfinished(self) -> bool:
        """True while submitted groups have not come back."""
        ...

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        """The KV cache: between rollouts its memory may go, and come back zeroed at other addresses."""
        ...

    def forget_graphs(self) -> None:
        """The memory of `cache_tensors` goes: drop what was recorded with its addresses."""
        ...

    def abort(self) -> None:
        """Forget all unfinished requests."""
        ...
