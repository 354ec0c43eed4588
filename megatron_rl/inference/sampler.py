"""Draw tokens: counter-based random numbers, inverse CDF, and the log-prob of the draw.

The number that decides a draw depends on (sample seed, position) alone, so a completion is the
same whatever shares its batch and however the model is laid out over ranks.
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
"""Likeliest tokens of which log-probs can be had."""


def sample_seed(*key: object) -> int:
    """Return a signed 64-bit seed from any printable key, the same on every rank and machine."""
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def fingerprint(token_ids: Sequence[int]) -> str:
    """Return a hash of token ids, the same on every rank and machine."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()


class SamplingModes(NamedTuple):
    """The sampling modes that the requests need; each that none needs saves a pass over [N, V]."""

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
        """Return what any of the requests needs."""
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
    """The sampling parameters of the rows, all [N] on the device; None is off for all rows."""

    seeds: torch.Tensor
    temperature: torch.Tensor | None = None
    """fp32; 1 in greedy rows."""
    greedy: torch.Tensor | None = None
    """bool."""
    top_k: torch.Tensor | None = None
    """int64; the vocabulary size where off. There is one where there is ``top_p``."""
    top_p: torch.Tensor | None = None
    """fp32; 1 where off."""
    min_p: torch.Tensor | None = None
    """fp32; 0 where off."""
    bias: torch.Tensor | None = None
    """[N, V] fp32, added to the logits."""
    divisor: torch.Tensor | None = None
    """[N, V] fp32, divides positive logits and multiplies negative ones before that."""
    scored: bool = False
    """Some want the likeliest tokens."""


class Sampler:
    """Draws the next tokens, the same on all tensor-parallel ranks."""

    def __init__(self, tensor_group: dist.ProcessGroup | None = None, padded_vocab_size: int | None = None) -> None:
        """``padded_vocab_size`` is split over the ranks of ``tensor_group``; sums on CUDA go shard by shard."""
        is_split = tensor_group is not None and padded_vocab_size is not None
        self._shard = padded_vocab_size // tensor_group.size() if is_split else None
        self._tensor_group = tensor_group if tensor_group is not None and tensor_group.size() > 1 else None

    def __call__(
        self, logits: torch.Tensor, numbers: torch.Tensor, params: SamplingTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `draw`."""
        token, logprob = draw(logits, numbers, params, self._shard)
        if self._tensor_group is not None:
            # The ranks computed the same logits; if rounding ever made them differ, one draws for
            # all, because ranks that disagree on an end token would wait for each other for ever.
            source = dist.get_global_rank(self._tensor_group, 0)
            dist.broadcast(token, source, group=self._tensor_group)
            dist.broadcast(logprob, source, group=self._tensor_group)
        return token, logprob


def draw(
    logits: torch.Tensor, numbers: torch.Tensor, params: SamplingTensors, shard: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    ``logits`` [N, V] fp32 over the real vocabulary; ``numbers`` [N] are of `uniform`, at the positions
    of the tokens to draw. Returns token ids [N] int64 and their log-probs [N] fp32 under the distribution they
    were drawn from: biased, tempered, and renormalised over the min-p / top-k / top-p support where that is on.
    ``shard``: columns of a tensor-parallel rank; on CUDA sums are made shard by shard, as in the trainer.
    """
    logits, temperature = _shaped(logits, params)
    if logits.is_cuda:
        from megatron_rl.inference.sampling_kernel import draw_by_chunks

        return draw_by_chunks(logits, numbers, temperature, params.greedy, shard)
    return draw_by_columns(logits, numbers, temperature, params.greedy)


def likeliest(logits: torch.Tensor, params: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `MOST_SCORED` likeliest tokens of the distribution that `draw` draws from: ids and log-probs."""
    logits, temperature = _shaped(logits, params)
    logits = logits if temperature is None else logits / temperature[:, None]
    logprobs, ids = logits.log_softmax(-1).topk(min(MOST_SCORED, logits.shape[-1]), -1)
    return ids, logprobs


def _shaped(logits: torch.Tensor, params: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bias the logits and cut them to the support; returns them and what they are still to be divided by."""
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
    """Sample in plain torch; arguments and results as of `sampling_kernel.draw_by_chunks`."""
    if temperature is not None:
        logits = logits / temperature[:, None]
    # In place: on a CPU a third fresh buffer of [N, V] costs more in page faults than in additions.
    largest = logits.amax(-1, keepdim=True)
    cumulative = logits.sub(largest).exp_().cumsum_(-1)
    total = cumulative[:, -1:]
    token = torch.searchsorted(cumulative, numbers[:, None] * total).clamp_max_(logits.shape[-1] - 1)
    if greedy is not None:
        token = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), token)
    # Never by way of log Z = largest + log total: that rounds at the size of the logits, see decisions/001.
    logprob = logits.gather(-1, token).sub_(largest).sub_(total.log())
    return token[:, 0], logprob[:, 0]


def _keep_support(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """``logits`` with -inf outside: top-k first, then the smallest set of what is left whose mass reaches ``top_p``."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)[None]
    keep = rank < top_k[:, None]
    mass = (ordered - ordered[:, :1]).exp_().masked_fill_(~keep, 0.0)
    mass = mass / mass.sum(-1, keepdim=True)
    # A token stays while the mass before it is short of top_p; the first always stays.
    keep &= (rank == 0) | (mass.cumsum(-1) - mass < top_p[:, None]) | (top_p[:, None] >= 1.0)
    kept = torch.zeros_like(keep).scatter_(-1, order, keep)
    return logits.masked_fill(~kept, float("-inf"))
