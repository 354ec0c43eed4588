"""Operations of torch that the engine stands on or may come to, before anything is built on them.

Run with: bash tests/run.sh tests/gpu
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional

from megatron_rl.quantization.formats import FP8
from megatron_rl.registry import RECIPES

pytestmark = pytest.mark.gpu


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16()


def _captured(work: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 6, 7, 9, 130])
def test_blockwise_products_of_any_number_of_tokens_under_capture(tokens: int) -> None:
    """The scales of 1 x 128 segments lie column by column; whether cuBLAS wants M in fours is not documented."""
    recipe = RECIPES.get("fp8_block")
    problem = recipe.device_problem(torch.cuda.get_device_capability())
    if problem is not None:
        pytest.skip(problem)
    q, x = recipe.quantize(_random(512, 1024)), _random(tokens, 1024)
    graph, captured = _captured(lambda: recipe.matmul(x, q))
    x.copy_(_random(tokens, 1024) * 0.5)
    graph.replay()
    twin = recipe.round_trip(x.float(), q) @ recipe.dequantize(q).t()
    assert (captured.float() - twin).norm() < 1e-2 * twin.norm()


def test_grouped_products_with_empty_groups_under_capture() -> None:
    """What a quantised mixture of experts would need: the groups' borders are read from the device at replay."""
    tokens, groups, rows, columns = 64, 4, 128, 256
    x = _random(tokens, columns).to(FP8)
    weight = _random(groups * rows, columns).to(FP8).view(groups, rows, columns)
    of_tokens = torch.rand(tokens, device="cuda") + 0.5
    of_channels = torch.rand(groups, rows, device="cuda") + 0.5
    borders = torch.tensor([16, 16, 48, 64], dtype=torch.int32, device="cuda")

    def work() -> torch.Tensor:
        return torch._scaled_grouped_mm(
            x, weight.transpose(-2, -1), of_tokens, of_channels, offs=borders, out_dtype=torch.bfloat16
        )

    graph, captured = _captured(work)
    for ends in ([16, 16, 48, 64], [0, 32, 32, 64], [64, 64, 64, 64]):
        borders.copy_(torch.tensor(ends))
        graph.replay()
        start, twin = 0, torch.zeros(tokens, rows, device="cuda")
        for group, end in enumerate(ends):
            twin[start:end] = x[start:end].float() @ weight[group].float().t()
            twin[start:end] *= of_tokens[start:end, None] * of_channels[group]
            start = end
        assert (captured.float() - twin).norm() < 1e-2 * twin.norm()


def test_flash_attention_over_slots_with_lengths_on_the_device_under_capture() -> None:
    """``seqused_k`` says how much of each slot counts; grown lengths must be seen at replay."""
    slots, longest, heads, kv_heads, width = 6, 256, 8, 2, 128
    keys, values = _random(slots * longest, kv_heads, width), _random(slots * longest, kv_heads, width)
    query = _random(slots, heads, width)
    each_row = torch.arange(slots + 1, dtype=torch.int32, device="cuda")
    lengths = torch.tensor([1, 7, 64, 128, 200, 255], dtype=torch.int32, device="cuda")

    def work() -> torch.Tensor:
        return torch.ops.aten._flash_attention_forward(
            query, keys, values, each_row, each_row * longest, 1, longest, 0.0, False, False, seqused_k=lengths
        )[0]

    graph, captured = _captured(work)
    for grown in (0, 1):
        lengths.add_(grown)
        graph.replay()
        for slot, length in enumerate(lengths.tolist()):
            of_slot = slice(slot * longest, slot * longest + length)
            twin = functional.scaled_dot_product_attention(
                query[slot][None, :, None].float(),
                keys[of_slot].transpose(0, 1)[None].float(),
                values[of_slot].transpose(0, 1)[None].float(),
                enable_gqa=True,
            )[0, :, 0]
            assert (captured[slot].float() - twin).abs().max() < 2e-2


def test_the_tokens_that_a_loss_selects_are_those_of_the_cpu(one_rank) -> None:
    from dataclasses import replace

    from megatron_rl.algorithms.losses import kl_cov
    from tests.distributed.pick_programs import parts_of, selected

    def moved(record):
        return replace(record, **{name: one.cuda() for name, one in vars(record).items() if torch.is_tensor(one)})

    loss, (part,) = kl_cov.Loss(share=0.05), parts_of(packs=3)
    there = [replace(moved(batch), packing=moved(batch.packing), samples=moved(batch.samples)) for batch in part]
    for own, other in zip(selected(loss, part, one_rank), selected(loss, there, one_rank), strict=True):
        assert torch.equal(own.selected, other.selected.cpu())
