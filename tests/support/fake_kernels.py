"""Plain torch behind the signatures of torch's varlen kernel, in 2.13 and in 2.11.

They show that our arguments mean what the kernel takes them to mean; they say nothing about the kernel.
Arguments are spelled as published, so a wrong name fails. Whatever we do not use is not accepted.
"""

from __future__ import annotations

import torch


def one_sequence(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, left: int) -> torch.Tensor:
    """Causal to the bottom right: ``query`` [L, heads, D], the newest of ``keys`` [K, groups, D].

    ``left`` keys before the token are seen, or with -1 all.
    """
    length, share = query.shape[0], query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(share, 1).transpose(0, 1).double() for x in (keys, values))
    scores = query.transpose(0, 1).double() @ keys.transpose(1, 2) / query.shape[-1] ** 0.5
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(keys.shape[1] - length)
    if left >= 0:
        visible = visible.triu(keys.shape[1] - length - left)
    mixed = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ values
    return mixed.transpose(0, 1).to(query.dtype)


def laid_out(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The keys of one sequence of a paged cache."""
    assert pages.dtype == torch.int32 and cache.dim() == 4 and cache.shape[1] % 256 == 0
    return cache[pages.long()].flatten(0, 1)[:length]


def paged(query, key, value, borders, lengths, table, left=-1) -> torch.Tensor:
    """Sequences of new tokens against their pages."""
    assert lengths.dtype == borders.dtype == torch.int32
    return torch.cat([
        one_sequence(query[start:end], laid_out(key, pages, length), laid_out(value, pages, length), left)
        for start, end, length, pages in zip(
            borders[:-1].tolist(), borders[1:].tolist(), lengths.tolist(), table, strict=True
        )
    ])


def packed(query, key, value, borders, key_borders=None, left=-1) -> torch.Tensor:
    """Sequences of new tokens against themselves, or against keys of their own number."""
    queries = query.split(borders.diff().tolist())
    keys, values = (x.split((borders if key_borders is None else key_borders).diff().tolist()) for x in (key, value))
    return torch.cat([one_sequence(*one, left) for one in zip(queries, keys, values, strict=True)])


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """torch 2.13's."""
    assert window_size[1] == 0 and enable_gqa and return_aux is None and scale is None
    assert max_q == (cu_seq_q[1:] - cu_seq_q[:-1]).max()
    if block_table is None:
        assert max_k == cu_seq_k.diff().max() and cu_seq_k.dtype == torch.int32 and seqused_k is None
        return packed(query, key, value, cu_seq_q, cu_seq_k, window_size[0])
    assert cu_seq_k is None and max_k >= seqused_k.max() and num_splits == 1
    return paged(query, key, value, cu_seq_q, seqused_k, block_table, window_size[0])


def varlen_attn_of_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """torch 2.11's: no pages, and no leave to ask for where there are fewer key heads than query heads."""
    return varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale,
        window_size=window_size, enable_gqa=True,
    )  # fmt: skip


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """``torch.ops.aten._flash_attention_backward``: the softmax anew from its logarithm, the rest written out."""
    assert dropout_p == 0.0 and scale is None and window_size_right == 0 and is_causal == (window_size_left == -1)
    assert max_q == cum_seq_q.diff().max() and max_k == cum_seq_k.diff().max()
    assert logsumexp.shape == query.shape[1::-1] and logsumexp.dtype == torch.float32
    queries, keys = cum_seq_q.diff().tolist(), cum_seq_k.diff().tolist()
    given = [x.split(queries) for x in (grad_out, query, out, logsumexp.t())] + [x.split(keys) for x in (key, value)]
    parts = [_backward_of_one(*one, window_size_left) for one in zip(*given, strict=True)]
    return tuple(torch.cat(part).to(query.dtype) for part in zip(*parts, strict=True))


def _backward_of_one(grad, query, out, lse, key, value, left):
    share, unit, seen = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5, key.shape[0] - query.shape[0]
    grad, query, out, lse = (x.double().transpose(0, 1) for x in (grad, query, out, lse))
    keys, values = (x.double().repeat_interleave(share, 1).transpose(0, 1) for x in (key, value))
    visible = torch.ones(query.shape[1], key.shape[0], dtype=torch.bool).tril(seen)
    visible = visible.triu(seen - left) if left >= 0 else visible
    weights = ((query @ keys.transpose(1, 2)) * unit - lse[..., None]).exp().masked_fill(~visible, 0.0)
    scores = weights * (grad @ values.transpose(1, 2) - (grad * out).sum(-1, keepdim=True)) * unit
    found = scores.transpose(1, 2) @ query, weights.transpose(1, 2) @ grad
    summed = (x.unflatten(0, (-1, share)).sum(1).transpose(0, 1) for x in found)
    return (scores @ keys).transpose(0, 1), *summed
