"""Quantised linear layers and rollouts on one GPU. Run with: bash tests/run.sh tests/gpu

What a CPU cannot show: the 8-bit tensor-core products against the dequantised ones, and that a captured graph
sees a refresh.
"""

from __future__ import annotations

import pytest
import torch

from megatron_rl.registry import RECIPES
from tests.gpu.test_gpu_engine import _generate, _trainer_logprobs
from tests.support.tiny import tiny_config, tiny_policy

pytestmark = pytest.mark.gpu

ON_GPU = [name for name in RECIPES.names() if name != "none"]


def _recipe(name: str):
    recipe = RECIPES.get(name)
    problem = recipe.device_problem(torch.cuda.get_device_capability())
    if problem is not None:
        pytest.skip(problem)
    return recipe


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize("tokens", [1, 5, 17, 64, 300])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (200, 136), (3584, 3584)])
@pytest.mark.parametrize("name", ON_GPU)
def test_the_product_is_that_of_the_dequantised_numbers(name: str, rows: int, columns: int, tokens: int):
    """bf16 output: 8 bits of mantissa, hence the tolerance."""
    recipe = _recipe(name)
    q = recipe.quantize(_random(rows, columns))
    x = _random(tokens, columns)
    twin = recipe.round_trip(x.float(), q) @ recipe.dequantize(q).t()
    error = (recipe.matmul(x, q).float() - twin).norm() / twin.norm()
    assert error < 1e-2


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (200, 136), (1536, 2048)])
@pytest.mark.parametrize("name", ON_GPU)
def test_a_grouped_product_is_that_of_each_expert(name: str, rows: int, columns: int):
    """Also of an expert without tokens; rows that come behind the last group do no harm."""
    recipe, weights = _recipe(name), _random(4, rows, columns)
    stack, x = recipe.allocate(weights.shape, weights.device), _random(40, columns)
    for expert, weight in enumerate(weights):
        recipe.encode(weight, stack.of_expert(expert))
    ends = [3, 3, 20, 33]
    product = recipe.grouped_matmul(x, stack, torch.tensor(ends, dtype=torch.int32, device="cuda")).float()
    for start, end, expert in zip([0, *ends], ends, range(4), strict=False):
        part = stack.of_expert(expert)
        twin = recipe.round_trip(x[start:end].float(), part) @ recipe.dequantize(part).t()
        assert (product[start:end] - twin).norm() <= 1e-2 * twin.norm()


@pytest.mark.parametrize("name", ON_GPU)
def test_a_captured_product_sees_a_refresh(name: str):
    recipe = _recipe(name)
    weight, x = _random(256, 256), _random(8, 256)
    q = recipe.quantize(weight)
    addresses = [tensor.data_ptr() for tensor in q.tensors]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        recipe.matmul(x, q)  # kernels compile before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = recipe.matmul(x, q)
    weight.mul_(-0.5)
    recipe.encode(weight, q)
    graph.replay()
    assert [tensor.data_ptr() for tensor in q.tensors] == addresses
    assert torch.equal(captured, recipe.matmul(x, q))


@pytest.mark.parametrize("name", ON_GPU)
def test_engine_and_emulation_agree(name: str, one_rank):
    """The engine's log-probs against the trainer's quantised forward pass, in bf16."""
    from megatron_rl.quantization.linears import QuantizedLinears

    policy = tiny_policy(tiny_config(bf16=True))
    linears = QuantizedLinears(policy.gpt, _recipe(name))
    with linears.installed():
        groups = _generate(policy, greedy=False)
        gap = _trainer_logprobs(policy, groups, one_rank)
    assert gap.mean() < 0.05


@pytest.mark.parametrize("name", ON_GPU)
def test_a_refresh_takes_no_memory(name: str, one_rank):
    from megatron_rl.quantization.linears import QuantizedLinears

    policy = tiny_policy(tiny_config(bf16=True))
    linears = QuantizedLinears(policy.gpt, _recipe(name))
    linears.refresh()
    torch.cuda.reset_peak_memory_stats()
    linears.refresh()
    first = torch.cuda.max_memory_allocated()
    for _ in range(100):
        linears.refresh()
    assert torch.cuda.max_memory_allocated() == first
