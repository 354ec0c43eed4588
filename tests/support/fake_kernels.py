"""Plain torch behind the signatures that flash-attn, torch's varlen and Transformer Engine document.

They show that our arguments mean what the kernels take them to mean; they say nothing about the kernels.
Arguments are spelled as published (flash-attn 2.8, flash-attn 3 beta, torch 2.13, Transformer Engine 2), so a wrong
name fails. Whatever we do not use is not accepted.
"""

from __future__ import annotations

from types import ModuleType

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


def flash_attn() -> ModuleType:
    """Version 2."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal, block_table=None,
        window_size=(-1, -1),
    ):  # fmt: skip
        assert causal and window_size[1] <= 0 and max_seqlen_q == (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max()
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        assert max_seqlen_k >= lengths.max() and cu_seqlens_k.dtype == torch.int32
        if block_table is None:
            return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, window_size[0])
        return paged(q, k, v, cu_seqlens_q, lengths, block_table, window_size[0])

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, block_table, causal, window_size=(-1, -1)
    ):
        assert causal and q.shape[1] == 1
        borders = torch.arange(q.shape[0] + 1, dtype=torch.int32)
        return paged(q[:, 0], k_cache, v_cache, borders, cache_seqlens, block_table, window_size[0])[:, None]

    return module("flash_attn", flash_attn_varlen_func, flash_attn_with_kvcache)


def flash_attn_interface(with_sums: bool = False) -> ModuleType:
    """Version 3; early releases return the log-sum-exp too."""

    def answer(out):
        return (out, None) if with_sums else out

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal, window_size=(-1, -1)
    ):
        for borders, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
            assert borders.dtype == torch.int32 and longest == borders.diff().max()
        assert causal
        return answer(packed(q, k, v, cu_seqlens_q, cu_seqlens_k, window_size[0]))

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, page_table, causal, cu_seqlens_q=None, max_seqlen_q=None,
        window_size=(-1, -1),
    ):
        assert causal and (cu_seqlens_q is None) == (max_seqlen_q is None)
        if cu_seqlens_q is None:
            borders = torch.arange(q.shape[0] + 1, dtype=torch.int32)
            rows = paged(q[:, 0], k_cache, v_cache, borders, cache_seqlens, page_table, window_size[0])
            return answer(rows[:, None])
        return answer(paged(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, window_size[0]))

    return module("flash_attn_interface", flash_attn_varlen_func, flash_attn_with_kvcache)


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


def transformer_engine() -> ModuleType:
    """Its ``pytorch`` module."""

    class DotProductAttention(torch.nn.Module):
        def __init__(
            self, num_attention_heads, kv_channels, *, num_gqa_groups, attention_dropout, qkv_format, attn_mask_type
        ) -> None:
            super().__init__()
            assert (attention_dropout, qkv_format, attn_mask_type) == (0.0, "thd", "padding_causal")
            self.shapes = (num_attention_heads, kv_channels), (num_gqa_groups, kv_channels)

        def forward(self, query_layer, key_layer, value_layer, *, cu_seqlens_q, cu_seqlens_kv, **longest):
            assert set(longest) == {"max_seqlen_q", "max_seqlen_kv"} and torch.equal(cu_seqlens_q, cu_seqlens_kv)
            assert (query_layer.shape[1:], key_layer.shape[1:]) == self.shapes
            assert all(x.is_contiguous() for x in (query_layer, key_layer, value_layer))
            return packed(query_layer, key_layer, value_layer, cu_seqlens_q).flatten(1)

    return module("transformer_engine.pytorch", DotProductAttention)


def module(name: str, *members) -> ModuleType:
    """A module with those members."""
    made = ModuleType(name)
    for member in members:
        setattr(made, member.__name__, member)
    return made
