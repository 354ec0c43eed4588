"""The kernels over pages against sums written out in fp64: in Triton's interpreter here, compiled in tests/gpu.

The interpreter must be switched on before Triton's import, so a process of its own runs `KernelChecks`.
"""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

from megatron_rl.models.attention.backend import BACKENDS, Requirements
from megatron_rl.models.attention.kv_format import FP8
from megatron_rl.models.attention.selection import DeviceFacts
from tests.support.interpreter import INTERPRETED, mend, run_interpreted
from tests.support.paged import FilledPages

RAGGED = [1, 90, 16, 17]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


class KernelChecks:
    """Everything both ways of running must get right."""

    device = "cpu"
    fp32 = {"rtol": 1e-5, "atol": 1e-5}
    low = {"rtol": 0.03, "atol": 0.02}
    """bf16 weights of a softmax and a bf16 result."""
    wide = torch.float32
    """What heads wider than 64 are checked in."""
    kernel = property(lambda self: BACKENDS.get("triton_paged").cache)

    def pages(self, lengths, **changes) -> FilledPages:
        return FilledPages(lengths, **{"device": self.device} | changes)

    def check(self, pages: FilledPages, starts=None) -> None:
        tolerance = self.fp32 if pages.dtype == torch.float32 else self.low
        torch.testing.assert_close(*pages.decoded(self.kernel), **tolerance)
        starts = [length * 2 // 3 for length in pages.lengths] if starts is None else starts
        torch.testing.assert_close(*pages.extended(self.kernel, starts), **tolerance)

    @pytest.mark.parametrize("block_size", [16, 48, 64, 256])
    def test_ragged_lengths_and_block_sizes(self, block_size):
        self.check(self.pages(RAGGED, block_size=block_size))

    @pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (8, 2), (7, 1), (8, 1), (17, 1)])
    def test_query_heads_a_group(self, heads, groups):
        self.check(self.pages([5, 40], heads=heads, groups=groups))

    @pytest.mark.parametrize("width", [8, 64, 80, 96, 128])
    def test_widths(self, width):
        dtype = self.wide if width > 64 else torch.float32
        self.check(self.pages([5, 40], width=width, heads=2, groups=1, dtype=dtype))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision(self, dtype):
        self.check(self.pages([1, 33, 70], dtype=dtype, width=64))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_codes(self, dtype):
        pages = self.pages([3, 33, 70], dtype=dtype, stored=FP8, width=32)
        pages.cache.format.key_scales *= torch.tensor([4.0, 0.5], device=self.device)
        pages.cache.format.value_scales *= torch.tensor([0.25, 8.0], device=self.device)
        self.check(pages)

    def test_codes_and_queries_beyond_fp16(self):
        """Its largest number is 65,504: bf16 queries are divided before they are multiplied with keys as fp16."""
        pages = self.pages([3, 33, 70], dtype=torch.bfloat16, stored=FP8, width=32)
        pages.stretch = 2.0**20
        pages.cache.format.key_scales /= pages.stretch
        self.check(pages)

    @pytest.mark.parametrize("length", [1, 255, 256, 257, 512, 1300])
    def test_splits(self, length):
        """Keys are cut every 256, whatever the row's own length, in the middle of a page too."""
        block_size = 48 if length == 1300 else 64
        pages = self.pages([length, 1], block_size=block_size, max_length=1300, heads=2, groups=1)
        self.check(pages, starts=[max(0, length - 3), 0])

    @pytest.mark.parametrize(("dtype", "lengths"), [(torch.float32, [1, 300, 17, 1300]), (torch.bfloat16, [90, 3])])
    def test_sinks(self, dtype, lengths):
        """Of the longest row 20 new tokens, over all of its splits; the interpreter takes 15 seconds for 433."""
        pages = self.pages(lengths, block_size=64, dtype=dtype, sinks=[-3.0, 0.0, 2.0, 5.0])
        self.check(pages, starts=[max(length * 2 // 3, length - 20) for length in lengths])

    @pytest.mark.parametrize(
        ("window", "sinks"), [(1, []), (70, [-3.0, 0.0, 2.0, 5.0]), (256, []), (2000, [-3.0, 0.0, 2.0, 5.0])]
    )
    def test_windows(self, window, sinks):
        pages = self.pages([1, 300, 17, 700], block_size=64, window=window, sinks=sinks, max_length=1300)
        self.check(pages, starts=[0, 210, 0, 690])

    def test_windows_of_a_tile_of_many_tokens_and_of_late_splits(self):
        """Some tokens of a tile see nothing of its first blocks; 17 splits lie before the window."""
        self.check(self.pages([200, 3], window=5, block_size=16), starts=[1, 0])
        pages = self.pages([4700, 3], window=300, block_size=64, heads=2, groups=1)
        torch.testing.assert_close(*pages.decoded(self.kernel), **self.fp32)

    def test_more_splits_than_are_added_up_at_once(self):
        pages = self.pages([4700, 3], block_size=64, heads=2, groups=1)
        torch.testing.assert_close(*pages.decoded(self.kernel), **self.fp32)

    def test_the_splits_that_have_keys_and_no_others(self):
        """Splits of 256 of at most 5 x 256 keys, written out by hand."""
        from megatron_rl.models.attention.kernels import find_splits

        found = find_splits(torch.tensor([255, 0, 256, 1279], device=self.device), 1280, 16)
        assert (found.length, found.most) == (256, 5)
        assert found.count.item() == 1 + 1 + 2 + 5
        assert found.items[:9].tolist() == [0, 5, 10, 11, 15, 16, 17, 18, 19]

    def test_the_splits_that_a_window_reaches(self):
        """Of 200 keys: the row at 1279 sees keys 1080 to 1279, of split 4 alone; the one at 300 those of two."""
        from megatron_rl.models.attention.kernels import find_splits

        found = find_splits(torch.tensor([255, 0, 300, 1279], device=self.device), 1280, 16, window=200)
        assert found.count.item() == 5
        assert found.items[:5].tolist() == [0, 5, 10, 11, 19]

    def test_the_splits_of_many_rows(self):
        from megatron_rl.models.attention.kernels import find_splits

        lengths = [1 + 37 * row % 700 for row in range(300)]
        found = find_splits(torch.tensor(lengths, device=self.device) - 1, 700, 16)
        wanted = [3 * row + split for row, length in enumerate(lengths) for split in range(-(-length // 256))]
        assert found.items[: found.count.item()].tolist() == wanted

    @pytest.mark.parametrize(
        ("longest", "length", "most"),
        [(100, 256, 1), (1024, 256, 4), (16384, 256, 64), (16385, 320, 52), (131072, 2048, 64)],
    )
    def test_how_keys_are_cut(self, longest, length, most):
        from megatron_rl.models.attention.kernels import find_splits

        found = find_splits(torch.tensor([0], device=self.device), longest, 16)
        assert (found.length, found.most) == (length, most)

    @pytest.mark.parametrize(
        ("longest", "groups", "length"),
        [(1024, 2, 128), (1024, 4, 256), (1024, 1, 128), (8192, 2, 256), (32768, 2, 512), (32768, 4, 512)],
    )
    def test_how_keys_are_cut_on_a_gpu(self, longest, groups, length):
        """Of 132 processors, which take 396 splits at once; a 0.5B has 2 groups, a 7B 4, a rank of it fewer."""
        from megatron_rl.models.attention.kernels import split_length

        assert split_length(longest, groups, 132) == length

    def test_one_new_token_is_a_short_extension(self):
        pages = self.pages([40, 1, 17])
        self.check(pages, starts=[39, 0, 16])

    def test_tiles_of_new_tokens(self):
        self.check(self.pages([200, 3, 65], block_size=64), starts=[1, 0, 0])

    def test_a_row_does_not_depend_on_its_neighbours(self):
        alone, together = (self.pages(lengths, max_length=600, block_size=64) for lengths in ([300], [300, 600, 2]))
        for mine, theirs in zip(
            (*alone.cache.keys, *alone.cache.values), (*together.cache.keys, *together.cache.values), strict=True
        ):
            theirs[together.cache.table[0].long()] = mine[alone.cache.table[0].long()]
        query = alone.random(1, 1, 4, 16)
        many = torch.cat((query, together.random(2, 1, 4, 16)))
        outputs = [
            self.kernel.decode(
                q, p.cache, 0, self.kernel.prepare_decode(p.cache, torch.tensor(p.lengths, device=self.device) - 1, 0)
            )
            for q, p in ((query, alone), (many, together))
        ]
        assert torch.equal(outputs[0][0], outputs[1][0])

    def test_large_scores_do_not_overflow(self):
        pages = self.pages([70, 5])
        pages.cache.keys[0].nan_to_num_(nan=float("nan")).mul_(1e4)
        actual, expected = pages.decoded(self.kernel)
        assert actual.isfinite().all()
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


if INTERPRETED:
    mend()

    @pytest.mark.each_value
    class TestInterpreted(KernelChecks):
        """On the CPU."""

else:

    @needs_triton
    def test_the_kernels_in_tritons_interpreter():
        run_interpreted(__file__)


@pytest.mark.parametrize(
    ("device", "interpreter", "wanted"),
    [("cuda", "0", None), ("cpu", "1", None), ("cpu", "0", "needs a CUDA device")],
)
def test_where_they_run(monkeypatch, device, interpreter, wanted):
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    problem = BACKENDS.get("triton_paged").problem(DeviceFacts(device))
    assert problem is wanted is None or problem.startswith(wanted)


@pytest.mark.parametrize(
    ("capability", "stored", "width", "wanted"),
    [
        ((9, 0), FP8, 128, None),
        ((8, 0), FP8, 128, "capability 8.9"),
        ((8, 0), torch.bfloat16, 128, None),
        ((9, 0), torch.bfloat16, 512, "up to 256"),
        ((9, 0), torch.float32, 64, None),
        ((9, 0), torch.float32, 80, "up to 64 numbers in fp32, not of 80 (--bf16"),
    ],
)
def test_what_they_take(capability, stored, width, wanted):
    kernel = BACKENDS.get("triton_paged").cache
    dtype = torch.bfloat16 if stored == FP8 else stored
    problem = kernel.unsupported(DeviceFacts("cuda", capability), Requirements(dtype, stored, width))
    assert (problem is None) if wanted is None else (wanted in problem)
