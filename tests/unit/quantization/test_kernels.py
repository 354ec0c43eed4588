"""The Triton kernels against `formats`: in Triton's interpreter here, compiled in tests/gpu.

The interpreter must be switched on before Triton's import, so a process of its own runs `KernelChecks`.
Expected numbers come from `formats` on the CPU: on a GPU torch divides by a Python number approximately.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest
import torch

from megatron_rl.quantization import formats
from megatron_rl.quantization.formats import FP8
from megatron_rl.quantization.recipe import Packing
from tests.support.interpreter import run_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LARGEST = {torch.int8: 127.0, FP8: 448.0}
CODE_TYPES = pytest.mark.parametrize("code_type", [torch.int8, FP8], ids=["int8", "fp8"])
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def numbers(rows: int, columns: int, dtype: torch.dtype, kind: str = "normal") -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    values = torch.randn(rows, columns, generator=generator)
    if kind == "outliers":
        values[:, ::37] *= 300
    elif kind == "wide":  # into the numbers that E4M3 holds without a leading one
        values = values.sign() * torch.exp(values * 4)
    elif kind == "equal":
        values = torch.full_like(values, -0.37)
    elif kind == "zeros":
        values[::2] = 0
    return values.to(dtype)


def eager_codes(values: torch.Tensor, scale: torch.Tensor, code_type: torch.dtype) -> torch.Tensor:
    encode = formats.integer_codes if code_type == torch.int8 else formats.fp8_codes
    return encode(values, scale)


def eager_rows(values: torch.Tensor, code_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scale = formats.scale_of(formats.row_amax(values), LARGEST[code_type])
    return eager_codes(values, scale, code_type), scale


def eager_tiles(weight: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    cut = formats.tiles(weight.float())
    scale = formats.scale_of(cut.abs().amax((1, 3), keepdim=True), 448.0)
    scale = formats.power_of_two(scale) if power_of_two else scale
    codes = formats.fp8_codes(cut, scale)
    return codes.reshape(codes.shape[0] * 128, -1), scale[:, 0, :, 0]


def eager_segments(values: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    cut = formats.segments(values.float())
    scale = formats.scale_of(formats.row_amax(cut), 448.0)
    scale = formats.power_of_two(scale) if power_of_two else scale
    return formats.fp8_codes(cut, scale).flatten(1), scale[..., 0]


def quantize_rows(
    values: torch.Tensor, code_type: torch.dtype, columns: int | None = None, smoothing: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron_rl.quantization.kernels import quantize

    packed = quantize(values, Packing(code_type, columns or values.shape[1], smoothing=smoothing))
    return packed.codes, packed.scales


def quantize_segments(values: torch.Tensor, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron_rl.quantization.kernels import quantize

    columns = -(-values.shape[1] // 128) * 128
    packed = quantize(values, Packing(FP8, columns, in_segments=True, power_of_two=power_of_two))
    return packed.codes, packed.scales


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal to the bit, but for the sign of a zero."""
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.cpu().float(), theirs.float())


def every_e4m3_tie() -> torch.Tensor:
    """[1, C] fp32: all E4M3 numbers, the middles between neighbours, and the numbers next to the middles."""
    exact = torch.arange(0, 0x7F, dtype=torch.uint8).view(FP8).float()
    middles = (exact[1:] + exact[:-1]) / 2
    beside = [torch.nextafter(middles, torch.full_like(middles, side)) for side in (0.0, 1e9)]
    positive = torch.cat([exact, middles, *beside])
    return torch.cat([positive, -positive])[None]


def every_integer_tie() -> torch.Tensor:
    middles = torch.arange(-126.5, 127.0)
    beside = [torch.nextafter(middles, torch.full_like(middles, side)) for side in (-1e9, 1e9)]
    return torch.cat([torch.arange(-127.0, 128.0), middles, *beside])[None]


class KernelChecks:
    """Subclasses name the device."""

    device: str
    bf16_error: float
    """Relative error of a product's cast to bf16, beyond torch's."""

    # -- activations ---------------------------------------------------------------------------

    @CODE_TYPES
    @pytest.mark.parametrize(
        ("rows", "columns", "dtype", "kind"),
        [
            (5, 100, torch.bfloat16, "normal"),
            (3, 260, torch.float32, "wide"),
            (2, 128, torch.float16, "outliers"),
            (1, 7, torch.float32, "equal"),
            (4, 33, torch.bfloat16, "zeros"),
            (0, 100, torch.bfloat16, "normal"),
        ],
    )
    def test_rows(self, rows, columns, dtype, kind, code_type):
        values, padded = numbers(rows, columns, dtype, kind), -(-columns // 16) * 16
        codes, scales = quantize_rows(values.to(self.device), code_type, columns=padded)
        wanted, wanted_scales = eager_rows(values, code_type) if rows else (values.to(code_type), scales.cpu())
        same(codes[:, :columns], wanted)
        same(scales, wanted_scales)
        assert codes.shape == (rows, padded) and scales.shape == (rows, 1)
        assert not codes[:, columns:].float().any()

    @pytest.mark.parametrize(
        ("values", "code_type"), [(every_e4m3_tie(), FP8), (every_integer_tie(), torch.int8)], ids=["fp8", "int8"]
    )
    def test_rounding_is_to_nearest_even(self, values, code_type):
        codes, scales = quantize_rows(values.to(self.device), code_type)
        assert scales.item() == 1
        same(codes, eager_codes(values, torch.ones(1, 1), code_type))

    @CODE_TYPES
    def test_rows_of_another_stride(self, code_type):
        values = numbers(6, 90, torch.bfloat16)
        wide, turned = torch.full((6, 128), 1e4, dtype=torch.bfloat16), values.t().contiguous().t()
        wide[:, 3:93] = values
        for view in (wide.to(self.device)[:, 3:93], turned.to(self.device)):
            codes, scales = quantize_rows(view, code_type)
            same(codes, eager_rows(values, code_type)[0])
            same(scales, eager_rows(values, code_type)[1])

    @CODE_TYPES
    def test_smoothing_divides_first(self, code_type):
        values, smoothing = numbers(5, 100, torch.bfloat16), numbers(1, 100, torch.float32)[0].abs() + 0.1
        codes, scales = quantize_rows(
            values.to(self.device), code_type, columns=112, smoothing=smoothing.to(self.device)
        )
        wanted, wanted_scales = eager_rows(values.float() / smoothing, code_type)
        same(codes[:, :100], wanted)
        same(scales, wanted_scales)
        assert not codes[:, 100:].float().any()

    def test_what_is_not_finite_reaches_the_scale(self):
        values = torch.ones(3, 20)
        values[0, 3], values[1, 4] = float("nan"), float("-inf")
        scales = quantize_rows(values.to(self.device), FP8)[1].cpu().flatten()
        assert scales[0].isnan() and scales[1].isinf() and scales[2] == formats.scale_of(torch.ones(1), 448.0)

    @pytest.mark.parametrize("power_of_two", [False, True])
    @pytest.mark.parametrize(
        ("rows", "columns", "dtype", "kind"),
        [
            (5, 100, torch.bfloat16, "normal"),
            (17, 260, torch.float32, "wide"),
            (1, 256, torch.float16, "outliers"),
            (4, 129, torch.bfloat16, "zeros"),
            (0, 100, torch.bfloat16, "normal"),
        ],
    )
    def test_segments(self, rows, columns, dtype, kind, power_of_two):
        values = numbers(rows, columns + 5, dtype, kind)[:, :columns]
        codes, scales = quantize_segments(values.to(self.device), power_of_two=power_of_two)
        assert codes.shape == (rows, -(-columns // 128) * 128)
        if rows:
            wanted, wanted_scales = eager_segments(values, power_of_two)
            same(codes, wanted)
            same(scales, wanted_scales)
            assert scales.stride(0) == 1

    # -- weights -------------------------------------------------------------------------------

    @CODE_TYPES
    def test_a_weight_by_channel(self, code_type):
        from megatron_rl.quantization.kernels import requantize_rows

        weight = numbers(9, 100, torch.bfloat16, "outliers")
        codes = torch.full((16, 112), 3.0, device=self.device).to(code_type)
        scales = torch.full((16, 1), 7.0, device=self.device)
        places = codes.data_ptr(), scales.data_ptr()
        wanted, wanted_scales = eager_rows(weight, code_type)
        requantize_rows(weight.to(self.device), codes, scales)
        same(codes[:9, :100], wanted)
        same(scales[:9], wanted_scales)
        assert not codes[:9, 100:].float().any()
        assert (codes[9:].float() == 3).all() and (scales[9:] == 7).all()
        assert places == (codes.data_ptr(), scales.data_ptr())

    @pytest.mark.parametrize("power_of_two", [False, True])
    @pytest.mark.parametrize(
        ("rows", "columns", "dtype", "kind"),
        [
            (130, 260, torch.bfloat16, "normal"),
            (128, 128, torch.float32, "wide"),
            (5, 100, torch.float16, "outliers"),
        ],
    )
    def test_a_weight_by_tile(self, rows, columns, dtype, kind, power_of_two):
        from megatron_rl.quantization.kernels import requantize_blocks

        weight = numbers(rows, columns, dtype, kind)
        wanted, wanted_scales = eager_tiles(weight, power_of_two)
        codes = torch.ones(wanted.shape, device=self.device).to(FP8)
        around = torch.full((wanted_scales.shape[0], 4), 7.0, device=self.device)
        scales = around[:, : wanted_scales.shape[1]]
        places = codes.data_ptr(), scales.data_ptr()
        requantize_blocks(weight.to(self.device), codes, scales, whole=True, power_of_two=power_of_two)
        same(codes, wanted)
        same(scales, wanted_scales)
        assert (around[:, wanted_scales.shape[1] :] == 7).all()
        assert places == (codes.data_ptr(), scales.data_ptr())

    def test_a_weight_by_tile_into_codes_of_its_own_shape(self):
        from megatron_rl.quantization.kernels import requantize_blocks

        weight = numbers(130, 200, torch.bfloat16)
        codes, scales = torch.empty(130, 200, device=self.device).to(FP8), torch.empty(2, 2, device=self.device)
        requantize_blocks(weight.to(self.device), codes, scales, whole=True, power_of_two=True)
        wanted, wanted_scales = eager_tiles(weight, True)
        same(codes, wanted[:130, :200])
        same(scales, wanted_scales)

    # -- the product ---------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("tokens", "channels", "columns"),
        [(1, 48, 112), (5, 33, 256), (17, 40, 100), (40, 70, 128), (70, 20, 16), (140, 130, 144), (0, 16, 16)],
    )
    def test_sums_are_exact(self, tokens, channels, columns):
        codes, weight = self.int8(tokens, columns), self.int8(channels, columns)
        assert torch.equal(self.sums(codes, weight).long(), codes.long() @ weight.long().t())

    @pytest.mark.parametrize("tokens", [5, 130])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_the_epilogue_scales(self, dtype, tokens):
        """Each fp32 operation rounds once, as eager torch's do: the numbers are equal. By both kernels."""
        from megatron_rl.quantization.kernels import int8_matmul

        codes, weight = self.int8(tokens, 100), self.int8(48, 100)
        scales, weight_scales = (numbers(rows, 1, torch.float32).abs() * 0.05 for rows in (tokens, 48))
        wanted = (codes.long() @ weight.long().t()).float() * scales * weight_scales.t()
        ours = int8_matmul(*(each.to(self.device) for each in (codes, weight, scales, weight_scales)), dtype)
        self.same_product(ours, wanted.to(dtype))

    @pytest.mark.parametrize("tokens", [5, 130])
    def test_a_product_of_views_without_the_weights_padding_rows(self, tokens):
        from megatron_rl.quantization.kernels import int8_matmul

        codes, weight = self.int8(tokens, 128)[:, :112], self.int8(48, 112)
        scales, weight_scales = (numbers(rows, 1, torch.float32).abs() for rows in (tokens, 48))
        wanted = (codes.long() @ weight[:39].long().t()).float() * scales * weight_scales[:39].t()
        wide = torch.full((tokens, 128), 99, dtype=torch.int8)
        wide[:, :112] = codes
        on_device = [each.to(self.device) for each in (wide, weight, scales, weight_scales)]
        ours = int8_matmul(on_device[0][:, :112], on_device[1][:39], on_device[2], on_device[3][:39])
        self.same_product(ours, wanted.bfloat16())

    def sums(self, codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product with scales of 1, in fp32."""
        from megatron_rl.quantization.kernels import int8_matmul

        ones = (torch.ones(len(each), 1) for each in (codes, weight))
        return int8_matmul(*(each.to(self.device) for each in (codes, weight, *ones)), torch.float32).cpu()

    def same_product(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        if self.bf16_error and ours.dtype == torch.bfloat16:
            torch.testing.assert_close(ours.cpu(), theirs, rtol=self.bf16_error, atol=0)
        else:
            same(ours, theirs)

    @staticmethod
    def int8(rows: int, columns: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rows * 1000 + columns)
        codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)
        codes[:, ::5] = 127  # sums too large for 16 bits and for the integers of bf16
        return codes

    # -- refusals ------------------------------------------------------------------------------

    def test_what_does_not_fit_registers_or_sums_is_refused(self):
        from megatron_rl.quantization.kernels import int8_matmul

        with pytest.raises(ValueError, match="at most 65536"):
            quantize_rows(torch.ones(1, 65537, device=self.device), FP8)
        codes = torch.ones(1, 133145, dtype=torch.int8, device=self.device)
        with pytest.raises(ValueError, match="at most 133144"):
            int8_matmul(codes, codes, torch.ones(1, 1), torch.ones(1, 1))


if INTERPRETED:

    @pytest.mark.each_value
    class TestInterpreted(KernelChecks):
        device = "cpu"
        bf16_error = 2**-7  # the interpreter truncates

else:

    @needs_triton
    def test_the_kernels_in_tritons_interpreter():
        run_interpreted(__file__)
