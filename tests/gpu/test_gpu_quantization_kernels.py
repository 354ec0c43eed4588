"""The Triton kernels of quantised rollouts, compiled. Run with: bash tests/run.sh tests/gpu"""

from __future__ import annotations

import pytest
import torch

from megatron_rl.quantization.formats import FP8
from megatron_rl.registry import RECIPES
from tests.unit.quantization.test_grouped_kernel import GroupedChecks, on, stack_of
from tests.unit.quantization.test_kernels import (
    CODE_TYPES,
    KernelChecks,
    eager_rows,
    eager_segments,
    numbers,
    quantize_rows,
    quantize_segments,
    same,
)
from tests.unit.quantization.test_thin_kernel import ThinChecks

pytestmark = pytest.mark.gpu
COLUMNS = 4096


class TestGroupedCompiled(GroupedChecks):
    """The checks of the interpreter, and a graph."""

    device = "cuda"
    bf16_error = 0.0
    # On Hopper and B200 torch's own grouped product takes over, which gives bf16.
    fp8_error = 2**-8 if torch.cuda.is_available() and torch.cuda.get_device_capability() in ((9, 0), (10, 0)) else 1e-5

    def test_one_graph_serves_any_sizes_of_groups(self):
        """Also none, and experts whose tokens fill several tiles; nothing is read by the host."""
        recipe, q = RECIPES.get("int8"), stack_of("int8", 8, 272, COLUMNS)
        x, held = numbers(200, COLUMNS, torch.float32).cuda(), on("cuda", q)
        ends = torch.full((8,), 200, dtype=torch.int32, device="cuda")
        recipe.grouped_by_kernel(x, held, ends)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            product = recipe.grouped_by_kernel(x, held, ends)
        for borders in ([25, 50, 75, 100, 125, 150, 175, 200], [0, 0, 0, 199, 199, 199, 199, 200], [0] * 8):
            ends.copy_(torch.tensor(borders))
            graph.replay()
            wanted = recipe.grouped_matmul(x.cpu(), q, ends.cpu())
            assert torch.equal(product[: borders[-1]].cpu(), wanted[: borders[-1]])


class TestThinCompiled(ThinChecks):
    """The checks of the interpreter."""

    device = "cuda"
    fp8_error = 2e-3  # a tile of 64 inputs is added up in 14 bits


class TestCompiled(KernelChecks):
    """The checks of the interpreter, and the shapes of a model."""

    device = "cuda"
    bf16_error = 0.0

    @CODE_TYPES
    def test_rows_of_a_model(self, code_type):
        from megatron_rl.quantization.kernels import requantize_rows

        values = numbers(300, COLUMNS, torch.bfloat16, "outliers")
        wanted, wanted_scales = eager_rows(values, code_type)
        codes, scales = quantize_rows(values.cuda(), code_type)
        same(codes, wanted)
        same(scales, wanted_scales)
        requantize_rows(values.cuda(), codes.zero_(), scales.zero_())
        same(codes, wanted)
        same(scales, wanted_scales)

    def test_segments_of_a_model(self):
        values = numbers(100, COLUMNS, torch.bfloat16, "wide")
        codes, scales = quantize_segments(values.cuda(), power_of_two=True)
        wanted, wanted_scales = eager_segments(values, True)
        same(codes, wanted)
        same(scales, wanted_scales)

    @pytest.mark.parametrize("tokens", [1, 16, 17, 64, 100, 256, 1100])
    def test_products_of_a_model(self, tokens):
        codes, weight = self.int8(tokens, COLUMNS), self.int8(272, COLUMNS)
        # fp64 holds these integers exactly and has a fast product; fp32 rounds the largest once
        assert torch.equal(self.sums(codes, weight), (codes.double() @ weight.double().t()).float())

    def test_a_captured_graph_reads_the_refreshed_weight(self):
        """Quantise and multiply in a graph; new tokens and a re-quantised weight give the new product."""
        from megatron_rl.quantization.kernels import int8_matmul, requantize_rows

        tokens = numbers(8, COLUMNS, torch.bfloat16).cuda()
        weight = numbers(512, COLUMNS, torch.bfloat16).cuda()
        codes = torch.zeros(512, COLUMNS, dtype=torch.int8, device="cuda")
        scales = torch.ones(512, 1, device="cuda")

        def product() -> torch.Tensor:
            token_codes, token_scales = quantize_rows(tokens, torch.int8)
            return int8_matmul(token_codes, codes, token_scales, scales)

        requantize_rows(weight, codes, scales)
        product()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = product()
        for factor in (1.0, -3.0):
            tokens.mul_(factor).add_(0.25)
            requantize_rows(weight.mul_(1.5).roll(1, 0), codes, scales)
            graph.replay()
            assert torch.equal(captured, product())
            exact = tokens.float() @ weight.roll(1, 0).float().t()
            assert (captured.float() - exact).norm() < 0.03 * exact.norm()

    def test_a_captured_quantiser_gives_the_eager_codes(self):
        first, second = numbers(8, COLUMNS, torch.bfloat16), numbers(8, COLUMNS, torch.bfloat16, "wide")
        tokens = first.cuda()
        quantize_rows(tokens, FP8), quantize_segments(tokens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows, segments = quantize_rows(tokens, FP8), quantize_segments(tokens)
        tokens.copy_(second)
        graph.replay()
        for ours, theirs in ((rows, eager_rows(second, FP8)), (segments, eager_segments(second, False))):
            same(ours[0], theirs[0])
            same(ours[1], theirs[1])


@pytest.mark.parametrize("tokens", [1, 130, 4096])
@pytest.mark.parametrize("name", [name for name in RECIPES.names() if name != "none"])
def test_products_of_gradients_are_those_of_a_cpu(name, tokens):
    """`--rl-train-backward quantized`: the same codes, so what differs is bf16 of the product."""
    recipe, weight = RECIPES.get(name), numbers(512, 384, torch.bfloat16)
    gradient, x = numbers(tokens, 512, torch.bfloat16), numbers(tokens, 384, torch.bfloat16)
    q, held = recipe.quantize(weight), recipe.quantize(weight.cuda())
    pairs = [
        (recipe.input_gradient(gradient.cuda(), weight.cuda(), held), recipe.input_gradient(gradient, weight, q)),
        (recipe.weight_gradient(gradient.cuda(), x.cuda()), recipe.weight_gradient(gradient, x)),
    ]
    for found, wanted in pairs:
        assert found.dtype == torch.bfloat16
        error = (found.cpu().float() - wanted.float()).norm() / wanted.float().norm()
        assert error < 0.01
