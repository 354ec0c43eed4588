"""What the rest of the system may ask of a generation engine, and how large one is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megatron_rl.errors import EngineError
from megatron_rl.types import Completed, Request


class GraphOptions(NamedTuple):
    """How decode steps are captured."""

    most_sizes: int
    """Batch sizes, at most."""
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
    """Tokens a block, where the attention backend wants pages; None is the backend's own choice."""
    kv_cache_dtype: torch.dtype | None = None
    """What the KV cache stores: None is the model's dtype, else bf16 or E4M3."""
    graphs: GraphOptions | None = None
    """None: decode steps run eager."""
    prefix_reuse: bool = True
    """Prompts go on from what the cache has of their beginning."""
    kv_overcommit: float = 1.0
    """How often the blocks of the KV cache may be promised to completions; 1: all may become as long as they may."""
    records_routing: bool = False
    """Keep beside keys and values which experts each token was sent to, for requests that want them."""
    steps_not_awaited: int | None = None
    """The last steps before a host read that it does not wait for. None: a quarter of them on a GPU, none on a CPU."""

    def check(self, request: Request) -> None:
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


@dataclass
class EngineStatistics:
    """Counters since `Engine.begin`."""

    decode_steps: int = 0
    decode_rows: int = 0
    """Computed over all decode steps; the finished ones among them are wasted work, and first tokens need none."""
    prefill_tokens: int = 0
    reused_tokens: int = 0
    """Of prompts, found in the cache instead of computed."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Those among the prefilled tokens that a preempted sequence had in the cache before."""
    generated_tokens: int = 0
    completions: int = 0
    host_reads: int = 0
    """How often the host waited for the device to see what has finished."""

    def __add__(self, other: EngineStatistics) -> EngineStatistics:
        return EngineStatistics(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))

    def count_completion(self, num_tokens: int) -> None:
        """Count a sample that has drawn ``num_tokens`` tokens, and is finished or was interrupted."""
        self.generated_tokens += num_tokens
        self.completions += 1


class EngineLoad(NamedTuple):
    """The work of an engine at one moment."""

    running: int = 0
    """Sequences with a row."""
    waiting: int = 0
    used_blocks: int = 0
    blocks: int = 0
    """Of the KV cache; 0 where it has rows."""


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
        """Do a bounded amount of work; return the requests that were completed in it."""

    def cancel(self, calls: Collection[int]) -> None:
        """Forget what these ``calls`` of the endpoint asked for; what else is drawn stays the same.

        The next step does it, and may complete one of them before. An engine may also draw them to their end.
        """

    @property
    def has_unfinished(self) -> bool:
        """True while submitted groups have not come back."""

    def unfinished_tokens(self, wanted: Callable[[Request], bool]) -> list[tuple[Request, tuple[int, ...]]]:
        """Return the tokens so far of the first sample of each unfinished ``wanted`` request, to be shown.

        A read of the device more, where there is one. Empty of an engine that tells only what is complete. One rank of
        a model copy may ask alone.
        """
        return []

    def load(self) -> EngineLoad | None:
        """Return its load; any thread may ask. None of an engine that does not tell."""
        return None

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        """The KV cache with all views: between rollouts its memory may go, and come back zeroed. None: it stays."""
        return []

    def forget_graphs(self) -> None:
        """Drop what was recorded with the addresses of `cache_tensors`, whose memory goes."""

    def interrupt(self) -> list[Request]:
        """Stop; all unfinished requests, in no certain order, with their samples so far in `Request.so_far`.

        Submitted again, also after the weights have changed, they go on from these tokens, whose keys and values are
        computed anew. On pipeline stages one may have been completed by stopping: all its samples are finished.
        """

    def abort(self) -> None:
        """Forget all unfinished requests."""
