"""The product of few tokens with 8-bit weights: in Triton's interpreter here, compiled in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.quantization.formats import FP8
from tests.support.interpreter import INTERPRETED, mend, run_interpreted
from tests.unit.quantization.test_kernels import needs_triton, numbers

SHAPES = {
    "one split": (3, 200, 64, 4),
    "several": (17, 100, 1000, 64),
    "as many as steps": (64, 48, 512, 4096),
    "the last one shorter": (5, 64, 560, 6),
    "nothing left over": (17, 128, 512, 8),
    "one token": (1, 130, 272, 64),
    "the most tokens": (128, 64, 200, 264),
}
"""Tokens, outputs, inputs, programs wanted."""


def codes_of(rows: int, columns: int, code_type: torch.dtype) -> torch.Tensor:
    values = numbers(rows, columns, torch.float32)
    return (values * 40).clamp(-127, 127).round().to(code_type) if code_type == torch.int8 else (values * 90).to(FP8)


class ThinChecks:
    """Subclasses name the device."""

    device: str
    fp8_error: float
    """Relative to the largest number."""

    @pytest.mark.parametrize("code_type", [torch.int8, FP8], ids=["int8", "fp8"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_it_is_the_product(self, shape: str, code_type: torch.dtype):
        """Int8 to the bit, with sums that fp64 holds exactly."""
        from megatron_rl.quantization.thin_kernels import thin_product, tiles_for_few

        rows, columns, depth, programs = SHAPES[shape]
        codes, weight = codes_of(rows, depth, code_type), codes_of(columns, depth, code_type)
        scales, weight_scales = numbers(rows, 1, torch.float32).abs(), numbers(columns, 1, torch.float32).abs()
        tiles = tiles_for_few(rows)._replace(depth=64, programs=programs)
        given = (each.to(self.device) for each in (codes, weight, scales, weight_scales))
        found = thin_product(*given, torch.float32, tiles).cpu()
        wanted = (codes.double() @ weight.double().t()).float() * scales * weight_scales.t()
        if code_type == torch.int8:
            assert torch.equal(found, wanted)
        else:
            torch.testing.assert_close(found, wanted, rtol=0, atol=self.fp8_error * float(wanted.abs().max()))

    @pytest.mark.parametrize("shape", SHAPES)
    def test_it_is_the_product_of_tiles(self, shape: str):
        """Scales of 1 x 128 segments lie column by column, those of 128 x 128 tiles in rows that are padded."""
        from megatron_rl.quantization.thin_kernels import thin_product, tiles_for_few

        rows, columns, depth, programs = SHAPES[shape]
        codes, weight = codes_of(rows, depth, FP8), codes_of(columns, depth, FP8)
        across, down = -(-depth // 128), -(-columns // 128)
        scales = numbers(across, rows, torch.float32).abs().t()
        weight_scales = numbers(down, across + 3, torch.float32).abs()[:, :across]
        tiles = tiles_for_few(rows)._replace(depth=64, programs=programs)
        on_device = codes.to(self.device), weight.to(self.device)
        found = thin_product(
            *on_device, scales.to(self.device), weight_scales.to(self.device), torch.float32, tiles, tiled=True
        ).cpu()
        by_segment = codes.double() * scales.double().repeat_interleave(128, 1)[:, :depth]
        by_tile = weight_scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:columns, :depth]
        wanted = (by_segment @ (weight.double() * by_tile).t()).float()
        torch.testing.assert_close(found, wanted, rtol=0, atol=self.fp8_error * float(wanted.abs().max()))


    @pytest.mark.parametrize("shape", SHAPES)
    def test_it_is_the_product_of_bf16(self, shape: str):
        from megatron_rl.quantization.thin_kernels import thin_product, tiles_for_few

        rows, columns, depth, programs = SHAPES[shape]
        tokens, weight = numbers(rows, depth, torch.bfloat16), numbers(columns, depth, torch.bfloat16)
        tiles = tiles_for_few(rows, torch.bfloat16)._replace(programs=programs, least_steps=2)
        given = tokens.to(self.device), weight.to(self.device), None, None
        wanted = torch.mm(tokens.float(), weight.float().t())
        torch.testing.assert_close(thin_product(*given, torch.float32, tiles).cpu(), wanted, rtol=1e-5, atol=1e-4)
        found = thin_product(*given, torch.bfloat16, tiles).cpu()
        torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=1e-4)  # the interpreter truncates

    def test_a_row_has_the_same_bits_in_every_batch(self):
        """In bf16. In the interpreter with exact sums: numpy adds up differently for each number of rows."""
        from megatron_rl.quantization.thin_kernels import thin_product

        tokens, weight = (numbers(size, 2048, torch.bfloat16) for size in (64, 192))
        if self.device == "cpu":
            tokens, weight = tokens.sign(), weight.sign()
        tokens, weight = tokens.to(self.device), weight.to(self.device)
        whole = thin_product(tokens, weight, None, None, torch.bfloat16)
        for rows in (1, 5, 16, 17, 33):
            assert torch.equal(thin_product(tokens[:rows], weight, None, None, torch.bfloat16), whole[:rows]), rows


@needs_triton
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_the_splits_depend_on_the_weight_alone(dtype: torch.dtype):
    """Of the linears of a 7B and a 0.5B, and one that has less than a step."""
    from megatron_rl.quantization.thin_kernels import tiles_for_few

    for columns, depth in ((4608, 3584), (3584, 18_944), (1152, 896), (64, 16)):
        each = [tiles_for_few(rows, dtype) for rows in (1, 16, 17, 32, 33, 64, 128)]
        assert len({(tiles.columns, tiles.depth, tiles.cut(columns, depth)) for tiles in each}) == 1
        (share, splits), tiles = each[0].cut(columns, depth), each[0]
        assert (splits - 1) * share * tiles.depth < depth <= splits * share * tiles.depth
        assert splits == 1 or share >= tiles.least_steps


if INTERPRETED:
    mend()

    @pytest.mark.each_value
    class TestInterpreted(ThinChecks):
        device = "cpu"
        fp8_error = 1e-5

else:

    @needs_triton
    def test_the_kernel_in_tritons_interpreter():
        run_interpreted(__file__)
