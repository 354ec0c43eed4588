"""The protocol of a generation engine, its sizes and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megatron_rl.errors import EngineError
from megatron_rl.types import Completed, Request


class GraphOptions(NamedTuple):
    """When and for how many batch sizes decode steps are captured."""

    most_sizes: int
    """Largest number of batch sizes."""
    after: int = 0
    """Eager decode steps before the capture; 0 if the user asked for CUDA graphs."""


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of a rollout engine."""

    max_batch_size: int
    max_sequence_length: int
    decode_steps_per_sync: int = 8
    prefill_token_budget: int = 8192
    cache_budget_gb: float | None = None
    block_size: int | None = None
    """Tokens per block for paged attention backends; None: the backend's default."""
    kv_cache_dtype: torch.dtype | None = None
    """Dtype of the KV cache: bf16 or E4M3; None: the model's dtype."""
    graphs: GraphOptions | None = None
    """None: decode steps run eagerly."""
    prefix_reuse: bool = True
    """Reuse cached prefixes of prompts."""
    kv_overcommit: float = 1.0
    """Ratio of promised to existing KV blocks; 1: every sequence has room for its longest length."""
    records_routing: bool = False
    """Record the experts of each token, for requests that want them."""
    overlap_steps: int | None = None
    """Decode steps that run while the host processes the previous read. None: a quarter of them on a GPU, else 0."""

    def check(self, request: Request) -> None:
        """Check that the engine has room for ``request``.

        Raises:
            EngineError: empty prompt, no new tokens or samples, or longer than the maximum sequence length.
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


@dataclass
class EngineStatistics:
    """Counters since `Engine.begin`."""

    decode_steps: int = 0
    decode_rows: int = 0
    """Rows computed in decode steps; the excess over the drawn tokens is work on ended rows."""
    prefill_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens found in the cache."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Prefilled tokens that a preempted sequence had in the cache before."""
    generated_tokens: int = 0
    completions: int = 0
    host_reads: int = 0
    """How often the host waited for the device to read results."""

    def __add__(self, other: EngineStatistics) -> EngineStatistics:
        return EngineStatistics(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))

    def count_completion(self, num_tokens: int) -> None:
        """Count a sample of ``num_tokens`` tokens, finished or interrupted."""
        self.generated_tokens += num_tokens
        self.completions += 1


class EngineLoad(NamedTuple):
    """Queue length and KV cache usage at one moment."""

    running: int = 0
    """Sequences with a row."""
    waiting: int = 0
    used_blocks: int = 0
    blocks: int = 0
    """KV cache blocks; 0 for a cache of rows."""


class Engine(Protocol):
    """Turns requests into groups of completions with the log-prob of every sampled token.

    All ranks of a model-parallel group make the same calls in the same order.
    """

    statistics: EngineStatistics

    def begin(self, seed: int, policy_version: int) -> None:
        """Start a rollout: ``seed`` fixes every draw, ``policy_version`` is stamped on the results."""

    def submit(self, request: Request) -> None:
        """Queue one group."""

    def step(self) -> list[Completed]:
        """Do a bounded amount of work; return the completed requests."""

    def cancel(self, calls: Collection[int]) -> None:
        """Drop the requests of these ``calls`` of the endpoint; other requests are not affected.

        Takes effect in the next step, which may still complete one. An engine may also ignore it.
        """

    @property
    def has_unfinished(self) -> bool:
        """True while there are requests that `step` has not returned."""

    def unfinished_tokens(self, wanted: Callable[[Request], bool]) -> list[tuple[Request, tuple[int, ...]]]:
        """Return the tokens so far of the first sample of each unfinished ``wanted`` request, for display.

        Costs a read from the device. One rank of a model copy may call it alone. Engines without partial results return
        an empty list.
        """
        return []

    def load(self) -> EngineLoad | None:
        """Return the load, thread-safe; None if the engine does not report it."""
        return None

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        """The KV cache with all views. Its memory may be released between rollouts and comes back zeroed. Empty: stays.
        """
        return []

    def forget_graphs(self) -> None:
        """Drop CUDA graphs, before the memory of `cache_tensors` is released."""

    def interrupt(self) -> list[Request]:
        """Stop; return the unfinished requests in any order, with their tokens so far in `Request.so_far`.

        Submitted again, also with new weights, they continue from these tokens, whose keys and values are recomputed.
        On pipeline stages a request may complete while stopping; all its samples are then finished.
        """

    def abort(self) -> None:
        """Drop all unfinished requests."""
