"""The grouped product of codes against its eager twin: in Triton's interpreter here, compiled in tests/gpu."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_rl.quantization.recipe import QuantizedWeight
from megatron_rl.registry import RECIPES
from tests.support.interpreter import INTERPRETED, run_interpreted
from tests.unit.quantization.test_kernels import needs_triton, numbers

CASES = {
    "an expert without tokens": (40, 48, 112, [3, 3, 20, 33]),
    "nobody has tokens": (5, 20, 16, [0, 0, 0, 0, 0]),
    "one has all": (75, 33, 260, [0, 75, 75]),
    "many tiles each": (600, 16, 64, [290, 590]),
    "one token each": (40, 130, 32, list(range(1, 41))),
    "no tokens": (0, 16, 32, [0, 0]),
}
"""Tokens, outputs, inputs, ends."""
LARGE = ("many tiles each", "one token each")
"""With int8 and fp8 codes alone: the interpreter takes seconds for one."""


def stack_of(name: str, experts: int, rows: int, columns: int) -> QuantizedWeight:
    """On the CPU; each expert's weights are of another size."""
    recipe = RECIPES.get(name)
    q = recipe.allocate((experts, rows, columns), torch.device("cpu"))
    if q.smoothing is not None:
        q.smoothing.copy_(numbers(experts, columns, torch.float32).abs() + 0.1)
    for expert in range(experts):
        recipe.encode(numbers(rows, columns, torch.float32) * (expert + 1), q.of_expert(expert))
    return q


def on(device: str, q: QuantizedWeight) -> QuantizedWeight:
    moved = {name: value.to(device) for name, value in vars(q).items() if torch.is_tensor(value)}
    return dataclasses.replace(q, **moved)


class GroupedChecks:
    """Subclasses name the device."""

    device: str
    bf16_error: float
    """Relative error of the cast to bf16."""
    fp8_error = 1e-5
    """Of fp8 products, relative to the largest number."""

    @pytest.mark.parametrize(
        ("name", "case"),
        [
            (name, case)
            for case in CASES
            for name in ("int8", "fp8", *(() if case in LARGE else ("int8_smooth", "fp8_tensor")))
        ],
    )
    def test_it_is_the_twins(self, name: str, case: str):
        """Int8 to the bit, fp8 but for the order of fp32 sums; rows behind the last group may be anything."""
        tokens, rows, columns, ends = CASES[case]
        recipe, q = RECIPES.get(name), stack_of(name, len(ends), rows, columns)
        x, ends = numbers(tokens, columns, torch.float32, "outliers"), torch.tensor(ends, dtype=torch.int32)
        wanted = recipe.grouped_matmul(x, q, ends)[: ends[-1]]
        product = recipe.grouped_by_kernel(x.to(self.device), on(self.device, q), ends.to(self.device))
        assert product.shape == (tokens, rows) and product.dtype == x.dtype
        found = product[: ends[-1]].cpu()
        if name.startswith("int8"):
            assert torch.equal(found, wanted)
        else:
            largest = float(wanted.abs().max()) if wanted.numel() else 0.0
            torch.testing.assert_close(found, wanted, rtol=0, atol=self.fp8_error * largest)

    def test_bf16(self):
        recipe, q = RECIPES.get("int8"), stack_of("int8", 3, 40, 96)
        x, ends = numbers(20, 96, torch.bfloat16), torch.tensor([4, 11, 20], dtype=torch.int32)
        wanted = recipe.grouped_matmul(x, q, ends)
        product = recipe.grouped_by_kernel(x.to(self.device), on(self.device, q), ends.to(self.device)).cpu()
        torch.testing.assert_close(product, wanted, rtol=self.bf16_error, atol=0)

    def test_sums_that_could_overflow_are_refused(self):
        from megatron_rl.quantization.grouped_kernels import grouped_product

        codes = torch.ones(1, 133145, dtype=torch.int8, device=self.device)
        scales, ends = torch.ones(1, 1, device=self.device), torch.ones(1, dtype=torch.int32, device=self.device)
        with pytest.raises(ValueError, match="at most 133144"):
            grouped_product(codes, codes[None], scales, scales[None], ends, torch.float32)


if INTERPRETED:

    @pytest.mark.each_value
    class TestInterpreted(GroupedChecks):
        device = "cpu"
        bf16_error = 2**-7  # the interpreter truncates

else:

    @needs_triton
    def test_the_kernel_in_tritons_interpreter():
        run_interpreted(__file__)
