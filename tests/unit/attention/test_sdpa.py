"""Packed and cached attention against a sum over keys written out."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.models.attention.backends import sdpa
from megatron_rl.models.attention.backends.sdpa import attend_one_token, padded_attention
from megatron_rl.models.attention.padded import PaddedRows

HEADS, GROUPS, WIDTH = 4, 2, 8


def rows_of(lengths: list[int]) -> PaddedRows:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return PaddedRows.build(lengths, cu_seqlens)


def naive(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query ``[heads, D]`` over keys and values ``[K, groups, D]`` -> ``[heads * D]``, in fp64."""
    outputs = []
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        scores = (keys[:, group] @ query[head]).double() / WIDTH**0.5
        outputs.append(scores.softmax(0) @ values[:, group].double())
    return torch.cat(outputs)


def tensors(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return tuple(
        torch.randn(count, 1, heads, WIDTH, generator=generator, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    )


def test_rows_of_the_worked_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.models.attention.padded.FEWEST_KEYS", 1)
    rows = rows_of([3, 2])
    assert rows.gather.tolist() == [0, 1, 2, 3, 4, 0]
    assert rows.scatter.tolist() == [0, 1, 2, 3, 4]
    packed = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 1, 2, 3)
    padded = rows.pad(packed)
    assert padded.shape == (2, 2, 3, 3)
    assert padded[1, 0, :, 0].tolist() == [3.0, 4.0, 0.0]
    assert torch.equal(rows.unpad(padded), packed.reshape(5, 1, 6))


@pytest.mark.parametrize("lengths", [[1], [5], [3, 2], [1, 7, 1, 4]])
@pytest.mark.parametrize("explicit_length", [256, 0], ids=["explicit", "kernel"])
def test_packed_attention(monkeypatch: pytest.MonkeyPatch, lengths: list[int], explicit_length: int) -> None:
    monkeypatch.setattr(sdpa, "EXPLICIT_LENGTH", explicit_length)
    query, key, value = tensors(sum(lengths))
    actual = padded_attention(query, key, value, rows_of(lengths))
    expected, start = [], 0
    for length in lengths:
        for offset in range(length):
            seen = slice(start, start + offset + 1)
            expected.append(naive(query[start + offset, 0], key[seen, 0], value[seen, 0]))
        start += length
    torch.testing.assert_close(actual[:, 0].double(), torch.stack(expected), rtol=1e-5, atol=1e-6)

    weight = torch.randn_like(actual)
    own = torch.autograd.grad((actual * weight).sum(), (query, key, value), retain_graph=True)
    other = torch.autograd.grad((torch.stack(expected) * weight[:, 0]).sum(), (query, key, value))
    for gradient, reference in zip(own, other, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def test_a_sequence_does_not_see_its_neighbours() -> None:
    query, key, value = (tensor.detach() for tensor in tensors(7))
    before = padded_attention(query, key, value, rows_of([3, 4]))
    key[3:], value[3:] = 50.0, -50.0
    after = padded_attention(query, key, value, rows_of([3, 4]))
    assert torch.equal(before[:3], after[:3])
    assert not torch.allclose(before[3:], after[3:])


@pytest.mark.parametrize("lengths", [[1, 1], [4, 2, 6]])
def test_attend_one_token(lengths: list[int]) -> None:
    """Row r sees the first ``lengths[r]`` cells; the others hold something large."""
    longest = max(lengths) + 1
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(len(lengths), 1, HEADS, WIDTH, generator=generator)
    keys, values = (torch.randn(len(lengths), GROUPS, longest, WIDTH, generator=generator) for _ in "kv")
    hidden = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    for cache in (keys, values):
        cache.masked_fill_(hidden[:, None, :, None], 1e4)
    mask = torch.zeros(len(lengths), 1, 1, longest).masked_fill_(hidden[:, None, None], float("-inf"))
    actual = attend_one_token(query, keys, values, mask)
    for row, length in enumerate(lengths):
        seen = (cache[row, :, :length].transpose(0, 1) for cache in (keys, values))
        expected = naive(query[row, 0], *seen)
        torch.testing.assert_close(actual[row, 0].double(), expected, rtol=1e-5, atol=1e-6)
