"""The books of a decode step in kernels are those of plain torch, to the bit.

In Triton's interpreter here, compiled in tests/gpu. The interpreter must be switched on before Triton's import, so a
process of its own runs `StateChecks`.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron_rl.families import LayerCache
from megatron_rl.inference.batch_state import BatchState
from megatron_rl.inference.kv_cache import PagedCache
from tests.support.compiling import compile_for_hopper
from tests.support.interpreter import INTERPRETED, mend, run_interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
ROWS, LONGEST, VOCABULARY = 150, 9, 12


def random_state(seed: int, device: str = "cpu") -> BatchState:
    """Rows in the middle of their work, some of them ended, some about to."""
    generator = torch.Generator().manual_seed(seed)

    def some(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (ROWS,), generator=generator)

    state = BatchState(ROWS, LONGEST, torch.arange(VOCABULARY, device=device) % 5 == 3)
    state.position.copy_(some(0, 60)), state.token.copy_(some(0, VOCABULARY))
    state.seed.copy_(torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=generator))
    state.limit.copy_(some(1, LONGEST + 1)), state.alive.copy_(some(0, 4) > 0)
    state.count.copy_((torch.rand(ROWS, generator=generator) * state.limit.cpu()).long())
    return state


class StateChecks:
    """Subclasses name the device."""

    device: str

    @pytest.mark.parametrize(("rows", "steps"), [(150, 4), (7, 1), (128, 3)])
    def test_positions_and_numbers(self, rows: int, steps: int):
        from megatron_rl.inference.state_kernels import ahead

        wanted = random_state(1).ahead(rows, steps, 50, draws=True)
        found = ahead(random_state(1, self.device), rows, steps, 50)
        for own, twin in zip(found, wanted, strict=True):
            assert own.dtype == twin.dtype and torch.equal(own.cpu(), twin)
        assert wanted[0].max() == 49, "none is as far as the cache is long"

    @pytest.mark.parametrize("shape", [(4, 20), (1, 3), (200,)])
    def test_places_in_the_cache(self, shape: tuple[int, ...]):
        from megatron_rl.inference.state_kernels import cells

        cache = PagedCache([LayerCache(1, 8, 8)], 6, 64, 16, torch.float32, torch.device("cpu"))
        cache.table.copy_(torch.randperm(cache.table.numel(), generator=torch.Generator().manual_seed(1)).view(6, -1))
        rows, positions = torch.arange(shape[-1]) % 6, torch.arange(torch.Size(shape).numel()).view(shape) % 64
        found = cells(*(held.to(self.device) for held in (cache.table, rows, positions)), 16)
        assert torch.equal(found.cpu(), cache.slot_mapping(rows, positions))

    @pytest.mark.parametrize("chosen", [False, True])
    @pytest.mark.parametrize("steps", [1, 5])
    def test_what_was_drawn(self, chosen: bool, steps: int):
        from megatron_rl.inference.state_kernels import record

        generator = torch.Generator().manual_seed(2)
        count = 40 if chosen else 140
        rows = torch.randperm(ROWS, generator=generator)[:count] if chosen else slice(0, count)
        # As views of a longer burst.
        tokens = torch.randint(0, VOCABULARY, (steps, ROWS), generator=generator)[:, :count]
        logprobs = torch.rand(steps, ROWS, generator=generator)[:, :count]
        state, twin = random_state(3, self.device), random_state(3)
        before = twin.alive.clone()
        twin.record(rows, tokens, logprobs)
        record(state, rows.to(self.device) if chosen else rows, tokens.to(self.device), logprobs.to(self.device))
        assert 0 < twin.alive.sum() < before.sum(), "some go on and some end"
        for name in ("token", "position", "count", "limit", "seed", "alive"):
            assert torch.equal(getattr(state, name).cpu(), getattr(twin, name)), name
        for name in ("tokens", "logprobs"):  # the last column is nobody's
            assert torch.equal(getattr(state, name)[:, :-1].cpu(), getattr(twin, name)[:, :-1]), name


if INTERPRETED:
    mend()

    @pytest.mark.each_value
    class TestInterpreted(StateChecks):
        device = "cpu"

else:

    def test_the_kernels_in_tritons_interpreter():
        run_interpreted(__file__)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled")
    def test_they_compile_for_hopper_without_spills(monkeypatch, tmp_path):
        from megatron_rl.inference.state_kernels import ahead_kernel, cells_kernel, record_kernel

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        int64 = dict.fromkeys(("position", "seed", "positions", "drawn", "token", "count", "limit", "tokens"), "*i64")
        types = int64 | dict.fromkeys(("numbers", "drawn_logprobs", "logprobs"), "*fp32")
        types |= dict.fromkeys(("is_stop", "alive"), "*i1")
        for kernel, chosen in ((ahead_kernel, None), (record_kernel, None), (record_kernel, "*i64")):
            given = types | ({"chosen": chosen} if chosen else {})
            fixed = {"BLOCK": 128} | ({} if chosen or kernel is ahead_kernel else {"chosen": None})
            assert compile_for_hopper(kernel, given, fixed, num_warps=4).resources.spilled == 0
        types = {"table": "*i32"} | dict.fromkeys(("rows", "positions", "found"), "*i64")
        made = compile_for_hopper(cells_kernel, types, {"SIZE": 16, "BLOCK": 128}, num_warps=4)
        assert made.resources.spilled == 0
