"""What every discovered quantisation recipe must hold to; a new file is tested by being there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl.errors import QuantizationError
from megatron_rl.quantization.recipe import QuantizedWeight, Recipe
from megatron_rl.quantization.shapes import Split, storage_of
from megatron_rl.registry import RECIPES

SHAPES = [(64, 64), (96, 192), (200, 130), (1, 1), (100, 1500)]
"""[N, K] of weights: usual ones, none of the sizes a multiple of anything, the smallest, a long sum."""
ERROR_BOUNDS = {"full": 1e-6, "int8": 0.025, "fp8": 0.06}
"""Relative error of the product of Gaussian numbers, by the first word of ``Recipe.format``."""
COARSEST = 0.25
"""Of a family that is not listed."""

QUANTIZING = [name for name in RECIPES.names() if name != "none"]
each_recipe = pytest.mark.parametrize("name", QUANTIZING)
each_shape = pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=[f"{n}x{k}" for n, k in SHAPES])


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(recipe: Recipe, weight: Tensor) -> QuantizedWeight:
    """With a smoothing that is not 1 where the recipe knows one."""
    smoothing = None
    if recipe.needs_calibration:
        smoothing = 0.5 + torch.rand(weight.shape[-1], generator=torch.Generator().manual_seed(9))
    return recipe.quantize(weight, smoothing)


def relative(values: Tensor, reference: Tensor) -> float:
    return float((values - reference).norm() / reference.norm())


def test_without_a_recipe_nothing_is_kept() -> None:
    assert RECIPES.get("none") is None
    assert storage_of("none") is None


@each_recipe
class TestDescription:
    def test_it_is_called_like_its_file(self, name: str) -> None:
        assert RECIPES.get(name).name == name
        assert RECIPES.get(name.replace("_", "-")) is RECIPES.get(name)

    def test_no_other_recipe_describes_itself_with_the_same_words(self, name: str) -> None:
        others = {RECIPES.get(other).format for other in QUANTIZING if other != name}
        assert RECIPES.get(name).format not in others

    def test_its_safer_recipes_exist_and_end_at_none(self, name: str) -> None:
        chain = [name]
        while (recipe := RECIPES.get(chain[-1])) is not None:
            safer = recipe.safer
            assert safer in RECIPES.names()
            assert safer not in chain, f"{chain} goes in circles"
            chain.append(safer)
        assert chain[-1] == "none"

    def test_a_cpu_runs_any_shape_of_a_single_rank(self, name: str) -> None:
        recipe = RECIPES.get(name)
        assert recipe.device_problem(None) is None
        assert [recipe.shape_problem(rows, columns, None) for rows, columns in SHAPES] == [None] * len(SHAPES)


@each_recipe
@each_shape
class TestProduct:
    def test_it_is_the_product_of_the_dequantised_numbers(self, name: str, rows: int, columns: int) -> None:
        recipe, x = RECIPES.get(name), gaussian(12, columns, seed=1)
        q = quantized(recipe, gaussian(rows, columns, seed=0))
        exact = recipe.round_trip(x, q).double() @ recipe.dequantize(q).double().t()
        assert (recipe.matmul(x, q) - exact).abs().max() <= 1e-5 * exact.abs().max()

    def test_its_error_is_that_of_its_format(self, name: str, rows: int, columns: int) -> None:
        recipe, x, weight = RECIPES.get(name), gaussian(64, columns, seed=1), gaussian(rows, columns, seed=0)
        q = quantized(recipe, weight)
        bound = ERROR_BOUNDS.get(recipe.format.split()[0].rstrip(","), COARSEST)
        assert relative(recipe.matmul(x, q), x @ weight.t()) <= bound
        assert relative(recipe.round_trip(x, q), x) <= bound
        assert relative(recipe.dequantize(q), weight) <= bound

    def test_zeros_stay_zeros(self, name: str, rows: int, columns: int) -> None:
        recipe, x, weight = RECIPES.get(name), gaussian(5, columns, seed=1), gaussian(rows, columns, seed=0)
        nothing = recipe.quantize(torch.zeros(rows, columns))
        assert torch.equal(recipe.dequantize(nothing), torch.zeros(rows, columns))
        assert torch.equal(recipe.matmul(x, nothing), torch.zeros(5, rows))
        q, silent = recipe.quantize(weight), torch.zeros(5, columns)
        assert torch.equal(recipe.round_trip(silent, q), silent)
        assert torch.equal(recipe.matmul(silent, q), torch.zeros(5, rows))

    def test_a_row_does_not_depend_on_its_company(self, name: str, rows: int, columns: int) -> None:
        recipe, row = RECIPES.get(name), gaussian(1, columns, seed=1)
        q = quantized(recipe, gaussian(rows, columns, seed=0))
        quiet = torch.cat((row, torch.zeros(3, columns)))  # 4 rows: below, a CPU takes another kernel (decision 001)
        crowd = 1e3 * gaussian(9, columns, seed=2)
        crowded = torch.cat((crowd[:5], row, crowd[5:]))
        assert torch.equal(recipe.matmul(quiet, q)[0], recipe.matmul(crowded, q)[5])
        assert torch.equal(recipe.round_trip(row, q)[0], recipe.round_trip(crowded, q)[5])

    def test_encoding_again_writes_into_the_same_buffers(self, name: str, rows: int, columns: int) -> None:
        recipe, weight = RECIPES.get(name), -3 * gaussian(rows, columns, seed=7)
        q = quantized(recipe, gaussian(rows, columns, seed=0))
        before, addresses = recipe.dequantize(q).clone(), [tensor.data_ptr() for tensor in q.tensors]
        recipe.encode(weight, q)
        assert [tensor.data_ptr() for tensor in q.tensors] == addresses
        assert not torch.equal(recipe.dequantize(q), before)
        assert torch.equal(recipe.dequantize(q), recipe.dequantize(quantized(recipe, weight)))
        x = gaussian(4, columns, seed=1)
        assert torch.equal(recipe.matmul(x, q), recipe.matmul(x, quantized(recipe, weight)))

    def test_its_bytes_are_those_of_the_estimate(self, name: str, rows: int, columns: int) -> None:
        recipe, read = RECIPES.get(name), storage_of(name)
        q = recipe.quantize(gaussian(rows, columns, seed=0))
        assert q.stored_bytes == recipe.stored_bytes(rows, columns) == read.stored_bytes(rows, columns)
        parts = [(part, split) for part in ((rows, columns), (128, 192)) for split in (None, "rows", "columns")]
        for part, split in parts:
            assert recipe.shape_problem(*part, split) == read.shape_problem(*part, split)
        assert (q.rows, q.columns) == (rows, columns)


@each_recipe
class TestTensors:
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_a_weight_that_is_not_finite_is_refused(self, name: str, bad: float) -> None:
        weight = gaussian(20, 30, seed=0)
        weight[13, 17] = bad
        with pytest.raises(QuantizationError, match=r"\[20, 30\] holds NaN or infinity"):
            RECIPES.get(name).quantize(weight)

    @pytest.mark.parametrize("weight", [torch.zeros(4), torch.zeros(2, 2, 2), torch.zeros(2, 2, dtype=torch.int8)])
    def test_what_is_no_matrix_of_floats_is_refused(self, name: str, weight: Tensor) -> None:
        with pytest.raises(QuantizationError, match="a matrix of floats is needed"):
            RECIPES.get(name).quantize(weight)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("leading", [(), (4,), (6, 1), (2, 3, 1)])
    def test_leading_dimensions_and_dtype_are_kept(
        self, name: str, leading: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        recipe, weight = RECIPES.get(name), gaussian(24, 40, seed=0).to(dtype)
        q, x = quantized(recipe, weight), gaussian(*leading, 40, seed=1).to(dtype)
        kept = x.clone()
        y, seen = recipe.matmul(x, q), recipe.round_trip(x, q)
        assert (y.shape, y.dtype) == ((*leading, 24), dtype)
        assert (seen.shape, seen.dtype) == (x.shape, dtype)
        assert recipe.dequantize(q).dtype == torch.float32
        assert torch.equal(x, kept), "the caller's activations were changed"
        assert torch.equal(y.reshape(-1, 24), recipe.matmul(x.reshape(-1, 40), q))

    def test_no_tokens_are_no_error(self, name: str) -> None:
        recipe = RECIPES.get(name)
        assert recipe.matmul(torch.zeros(0, 40), recipe.quantize(gaussian(24, 40, seed=0))).shape == (0, 24)

    def test_activations_without_memory_order_are_the_same(self, name: str) -> None:
        recipe, x = RECIPES.get(name), gaussian(8, 40, seed=1)
        q = quantized(recipe, gaussian(24, 40, seed=0))
        assert torch.equal(recipe.matmul(x.t().contiguous().t(), q), recipe.matmul(x, q))

    @pytest.mark.parametrize("split", ["columns", "rows"])
    def test_the_product_of_two_ranks_is_no_worse_than_that_of_one(self, name: str, split: Split) -> None:
        recipe, x, weight = RECIPES.get(name), gaussian(64, 256, seed=1), gaussian(256, 256, seed=0)
        weight[:128, :128] *= 5  # the parts have other scales
        parts = weight.chunk(2, 0 if split == "columns" else 1)
        given = x.chunk(2, 1) if split == "rows" else (x, x)
        assert [recipe.shape_problem(*part.shape, split) for part in parts] == [None, None]
        products = [recipe.matmul(own, quantized(recipe, part)) for own, part in zip(given, parts, strict=True)]
        product = torch.cat(products, 1) if split == "columns" else sum(products)
        alone = relative(recipe.matmul(x, quantized(recipe, weight)), x @ weight.t())
        assert relative(product, x @ weight.t()) <= 1.02 * alone


@each_recipe
@pytest.mark.parametrize("columns", [40, 1500])
class TestStacks:
    """Weights of several experts in one stack."""

    def test_its_parts_are_single_weights(self, name: str, columns: int) -> None:
        recipe = RECIPES.get(name)
        stack, weights = stacked(recipe, columns)
        for expert, weight in enumerate(weights):
            part, alone = stack.of_expert(expert), quantized(recipe, weight)
            assert torch.equal(recipe.dequantize(part), recipe.dequantize(alone))
            assert part.stored_bytes == alone.stored_bytes
        assert stack.stored_bytes == len(weights) * alone.stored_bytes

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_grouped_product_is_that_of_each_group(self, name: str, columns: int, dtype: torch.dtype) -> None:
        """To the bit; an expert may have no tokens, and what comes out behind the last group is anything."""
        recipe, x = RECIPES.get(name), gaussian(24, columns, seed=1).to(dtype)
        stack, weights = stacked(recipe, columns)
        for ends in ([5, 5, 14, 20], [0, 0, 0, 20], [20, 20, 20, 20], [0, 0, 0, 0]):
            product = recipe.grouped_matmul(x, stack, torch.tensor(ends, dtype=torch.int32))
            assert (product.shape, product.dtype) == ((24, 24), dtype)
            for start, end, weight in zip([0, *ends], ends, weights, strict=False):
                assert torch.equal(product[start:end], recipe.matmul(x[start:end], quantized(recipe, weight)))

    def test_no_tokens_at_all(self, name: str, columns: int) -> None:
        stack, _ = stacked(RECIPES.get(name), columns)
        ends = torch.zeros(4, dtype=torch.int32)
        assert RECIPES.get(name).grouped_matmul(torch.zeros(0, columns), stack, ends).shape == (0, 24)


def stacked(recipe: Recipe, columns: int) -> tuple[QuantizedWeight, Tensor]:
    """Four weights [24, columns], and their copies in one stack."""
    weights = gaussian(4, 24, columns, seed=0)
    stack = recipe.allocate(weights.shape, weights.device)
    for expert, weight in enumerate(weights):
        part = stack.of_expert(expert)
        if part.smoothing is not None:
            part.smoothing.copy_(quantized(recipe, weight).smoothing)
        recipe.encode(weight, part)
    return stack, weights
