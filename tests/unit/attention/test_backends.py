"""Every backend that can run here against a sum over keys written out; one more file is one more case."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.errors import ConfigError
from megatron_rl.families import LayerCache
from megatron_rl.inference.kv_cache import Cache, PagedCache, RowCache
from megatron_rl.models.attention.backend import BACKENDS, Backend, NewTokens
from megatron_rl.models.attention.kv_format import FP8
from megatron_rl.models.attention.selection import choose, facts_of
from tests.support.paged import naive

HEADS, GROUPS, WIDTH, LENGTH = 4, 2, 16, 40
CPU = facts_of(torch.device("cpu"))
HERE = [name for name in BACKENDS.names() if BACKENDS.get(name).problem(CPU) is None]
STORED = pytest.mark.parametrize("stored", [None, torch.bfloat16, FP8], ids=["exact", "bf16", "fp8"])
CACHES = [name for name in HERE if BACKENDS.get(name).cache is not None]


def make_cache(backend: Backend, stored: torch.dtype | None) -> Cache:
    layers = [LayerCache(GROUPS, WIDTH, WIDTH)]
    if backend.cache.layout == "rows":
        return RowCache(layers, 5, LENGTH, torch.float32, torch.device("cpu"), stored)
    return PagedCache(layers, 5, LENGTH, 16, torch.float32, torch.device("cpu"), stored)


def written(cache: Cache, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill a slot up to ``length``; what is read from it, [length, groups, D] each."""
    key, value = torch.randn(length, 1, GROUPS, WIDTH), 30 * torch.randn(length, 1, GROUPS, WIDTH)
    cache.format.calibrate(0, key, value)
    places = cache.slot_mapping(torch.full((length,), slot), torch.arange(length))
    cache.write(0, places, key, value)
    key, value = cache.format.round_trip(0, key, value)
    return key[:, 0], value[:, 0]


@STORED
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("lengths", [[1], [7, 40, 16, 1], [17, 33]])
def test_decode(name: str, lengths: list[int], stored: torch.dtype | None) -> None:
    torch.manual_seed(0)
    backend = BACKENDS.get(name)
    cache = make_cache(backend, stored)
    known = [written(cache, slot, length) for slot, length in enumerate(lengths)]
    query = torch.randn(len(lengths), 1, HEADS, WIDTH)
    plan = backend.cache.prepare_decode(cache, torch.tensor(lengths) - 1, max(*lengths, 16))
    actual = backend.cache.decode(query, cache, 0, plan)
    expected = torch.stack([naive(query[row, 0], *known[row]) for row in range(len(lengths))])
    torch.testing.assert_close(actual[:, 0].double(), expected, rtol=1e-5, atol=1e-5)


@STORED
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("spans", [[(0, 5)], [(3, 4), (16, 40), (0, 17)]], ids=str)
def test_extend(name: str, spans: list[tuple[int, int]], stored: torch.dtype | None) -> None:
    """``spans``: from which position to which the tokens are new."""
    torch.manual_seed(1)
    backend = BACKENDS.get(name)
    cache, slots = make_cache(backend, stored), [4, 0, 2][: len(spans)]
    known = [written(cache, slot, end) for slot, (_, end) in zip(slots, spans, strict=True)]
    lengths = [end - start for start, end in spans]
    new = NewTokens(
        rows=torch.tensor(slots),
        lengths=lengths,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        position_ids=torch.cat([torch.arange(*span) for span in spans]),
        key_length=max(end for _, end in spans),
    )
    query = torch.randn(sum(lengths), 1, HEADS, WIDTH)
    actual = backend.cache.extend(query, cache, 0, backend.cache.prepare_extend(cache, new))
    expected, token = [], 0
    for (start, end), (keys, values) in zip(spans, known, strict=True):
        for position in range(start, end):
            expected.append(naive(query[token, 0], keys[: position + 1], values[: position + 1]))
            token += 1
    torch.testing.assert_close(actual[:, 0].double(), torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_a_cpu_takes_sdpa_and_says_so() -> None:
    chosen = choose("auto", CPU)
    assert (chosen.packed_name, chosen.cache_name) == ("sdpa", "sdpa")
    assert chosen.reason.startswith("attention: sdpa for packed batches, sdpa over the KV cache (the fastest present")


def test_what_a_backend_does_not_compute_is_chosen_automatically() -> None:
    chosen = choose("paged", CPU)
    assert (chosen.packed_name, chosen.cache_name) == ("sdpa", "paged")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no attention backend 'nonsense'.* Available: invariant, paged, "):
        choose("nonsense", CPU)
