"""Draw tokens: counter-based random numbers, inverse CDF, and the log-prob of the draw.

The random number of a draw depends only on (sample seed, position), so a completion does not depend on the rest of the
batch or on the parallel layout.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_rl.types import Request

MOST_SCORED = 20
"""Largest number of likeliest tokens with log-probs."""


def sample_seed(*key: object) -> int:
    """Return a signed 64-bit seed from any printable key, the same on every rank and machine."""
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def fingerprint(token_ids: Sequence[int]) -> str:
    """Return a hash of token ids, the same on every rank and machine."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()


class SamplingModes(NamedTuple):
    """The sampling features that the requests need; each unused one saves a pass over [N, V]."""

    greedy: bool = False
    filtered: bool = False
    """Top-k or top-p."""
    tempered: bool = False
    floored: bool = False
    """Min-p."""
    biased: bool = False
    """A request has `Constraints`."""
    divided: bool = False
    """A request has a repetition penalty."""
    scored: bool = False
    """A request wants the likeliest tokens, see `Hints.top_logprobs`."""

    @classmethod
    def of(cls, requests: Iterable[Request]) -> SamplingModes:
        """Return the features that any request needs."""
        requests = list(requests)
        params = [request.sampling for request in requests]
        return cls(
            greedy=any(p.greedy for p in params),
            filtered=any(p.top_k > 0 or p.top_p < 1.0 for p in params),
            tempered=any(p.temperature != 1.0 for p in params),
            floored=any(p.min_p > 0 for p in params),
            biased=any(p.constraints is not None for p in params),
            divided=any(p.constraints is not None and p.constraints.repetition_penalty != 1 for p in params),
            scored=any(request.hints.top_logprobs > 0 for request in requests),
        )


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling parameters of the rows, [N] each on the device; None: off for all rows."""

    seeds: torch.Tensor
    temperature: torch.Tensor | None = None
    """fp32; 1 in greedy rows."""
    greedy: torch.Tensor | None = None
    """bool."""
    top_k: torch.Tensor | None = None
    """int64; vocabulary size where off. Never None if ``top_p`` is set."""
    top_p: torch.Tensor | None = None
    """fp32; 1 where off."""
    min_p: torch.Tensor | None = None
    """fp32; 0 where off."""
    bias: torch.Tensor | None = None
    """[N, V] fp32, added to the logits."""
    divisor: torch.Tensor | None = None
    """[N, V] fp32, applied before ``bias``: divides positive logits and multiplies negative ones."""
    scored: bool = False
    """Some requests want the likeliest tokens."""


class Sampler:
    """Draws the next tokens, identical on all tensor-parallel ranks."""

    def __init__(self, tensor_group: dist.ProcessGroup | None = None, padded_vocab_size: int | None = None) -> None:
        """``padded_vocab_size`` is split over ``tensor_group``; on CUDA sums are made per shard, as in the trainer."""
        is_split = tensor_group is not None and padded_vocab_size is not None
        self._shard = padded_vocab_size // tensor_group.size() if is_split else None
        self._tensor_group = tensor_group if tensor_group is not None and tensor_group.size() > 1 else None

    def __call__(
        self, logits: torch.Tensor, numbers: torch.Tensor, params: SamplingTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token, logprob = draw(logits, numbers, params, self._shard)
        if self._tensor_group is not None:
            # The ranks computed the same logits, but if rounding differed, they could disagree on an end token and
            # deadlock. So one rank draws for all.
            source = dist.get_global_rank(self._tensor_group, 0)
            dist.broadcast(token, source, group=self._tensor_group)
            dist.broadcast(logprob, source, group=self._tensor_group)
        return token, logprob


def draw(
    logits: torch.Tensor, numbers: torch.Tensor, params: SamplingTensors, shard: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    ``logits`` [N, V] fp32 without vocabulary padding; ``numbers`` [N] from `uniform`, at the positions of the new
    tokens. Returns token ids [N] int64 and log-probs [N] fp32 under the final distribution: after bias, temperature,
    and min-p / top-k / top-p with renormalisation. ``shard``: vocabulary columns per tensor-parallel rank; on CUDA sums
    are made shard by shard, as in the trainer.
    """
    logits, temperature = _shaped(logits, params)
    if logits.is_cuda:
        from megatron_rl.inference.sampling_kernel import draw_by_chunks

        return draw_by_chunks(logits, numbers, temperature, params.greedy, shard)
    return draw_by_columns(logits, numbers, temperature, params.greedy)


def likeliest(logits: torch.Tensor, params: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and log-probs [N, `MOST_SCORED`] of the likeliest tokens in the distribution of `draw`."""
    logits, temperature = _shaped(logits, params)
    logits = logits if temperature is None else logits / temperature[:, None]
    logprobs, ids = logits.log_softmax(-1).topk(min(MOST_SCORED, logits.shape[-1]), -1)
    return ids, logprobs


def _shaped(logits: torch.Tensor, params: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply bias and support filters; return the logits, and the temperature if it is still to be applied."""
    temperature = params.temperature
    if params.divisor is not None:
        logits = torch.where(logits > 0, logits / params.divisor, logits * params.divisor)
    if params.bias is not None:
        logits = logits + params.bias
    if temperature is not None and (params.top_k is not None or params.min_p is not None):
        logits, temperature = logits / temperature[:, None], None
    if params.min_p is not None:
        floor = logits.amax(-1, keepdim=True) + params.min_p[:, None].log()
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if params.top_k is not None:
        logits = _keep_support(logits, params.top_k, params.top_p)
    return logits, temperature


def draw_by_columns(
    logits: torch.Tensor, numbers: torch.Tensor, temperature: torch.Tensor | None, greedy: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample in plain torch; arguments and results as in `sampling_kernel.draw_by_chunks`."""
    if temperature is not None:
        logits = logits / temperature[:, None]
    # In place: on a CPU a third new [N, V] buffer costs more in page faults than the additions.
    largest = logits.amax(-1, keepdim=True)
    cumulative = logits.sub(largest).exp_().cumsum_(-1)
    total = cumulative[:, -1:]
    token = torch.searchsorted(cumulative, numbers[:, None] * total).clamp_max_(logits.shape[-1] - 1)
    if greedy is not None:
        token = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), token)
    # Not logit - log Z: that would round at the size of the logits, see decisions/001.
    logprob = logits.gather(-1, token).sub_(largest).sub_(total.log())
    return token[:, 0], logprob[:, 0]


def _keep_support(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask ``logits`` outside of the support: top-k first, then the smallest set with a mass of ``top_p``."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)[None]
    keep = rank < top_k[:, None]
    mass = (ordered - ordered[:, :1]).exp_().masked_fill_(~keep, 0.0)
    mass = mass / mass.sum(-1, keepdim=True)
    # A token stays while the mass before it is short of top_p; the first always stays.
    keep &= (rank == 0) | (mass.cumsum(-1) - mass < top_p[:, None]) | (top_p[:, None] >= 1.0)
    kept = torch.zeros_like(keep).scatter_(-1, order, keep)
    return logits.masked_fill(~kept, float("-inf"))
