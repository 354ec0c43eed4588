"""Sizes of a rollout engine, and what no engine of these sizes can finish."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.errors import EngineError
from megatron_rl.types import GenerationRequest


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of the rollout engine."""

    max_batch_size: int
    max_sequence_length: int
    steps_per_host_read: int = 8
    prefill_token_budget: int = 8192
    cache_budget_gb: float | None = None
    page_length: int | None = None
    """Tokens a page, where the attention backend wants pages; None is the backend's own choice."""
    kv_cache_dtype: torch.dtype | None = None
    """What the KV cache stores: None is the model's dtype, else bf16 or E4M3."""
    num_cuda_graphs: int | None = None
    """Most batch sizes to capture a decode step for; None: it runs eager."""
    reuse_prefixes: bool = True
    """Prompts go on from what the cache has of their beginning."""
    kv_overcommit: float = 1.0
    """How often the pages of the KV cache may be promised to completions; 1: all may become as long as they may."""

    def check(self, request: GenerationRequest) -> None:
        """Refuse what no engine of these sizes can finish.

        Raises:
            EngineError: nothing is asked for, or prompt and answer exceed the maximum sequence length.
        """
        prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens
        if min(prompt, new, request.num_samples) < 1:
            raise EngineError(
                f"task {request.source.task.id!r}: {prompt} prompt tokens, {new} new ones and "
                f"{request.num_samples} samples; each must be at least 1"
            )
        if prompt + new > self.max_sequence_length:
            raise EngineError(
                f"task {request.source.task.id!r}: {prompt} prompt tokens and {new} new ones do not fit "
                f"--inference-max-seq-length {self.max_sequence_length}; raise it, or lower --rl-max-new-tokens"
            )
