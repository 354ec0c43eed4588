"""Tensor-parallel sums in the order of the ranks, over gloo: the same bits whatever is added up beside them."""

from __future__ import annotations

import pytest

from tests.support.ranks import joined, run_ranks

ROWS, HIDDEN, INNER = 8, 12, 16


def on_rank() -> None:
    """Sums, their gradients, and a row-parallel linear in the shapes of rollouts and of training."""
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    from megatron_rl.platform.megatron import reduce_in_rank_order

    with joined() as (rank, ranks):
        group = dist.group.WORLD
        reduce_in_rank_order()
        reduce_in_rank_order()
        generator = torch.Generator().manual_seed(4)
        parts = [torch.randn(ROWS, 1, HIDDEN, generator=generator).bfloat16() for _ in range(ranks)]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        expected = total.bfloat16()
        for rows in (1, 3, ROWS):  # decode steps of a few rows, and numbers that the ranks cannot share evenly
            own = parts[rank][:rows].clone()
            assert torch.equal(mappings.reduce_from_tensor_model_parallel_region(own, group=group), expected[:rows])
            odd = mappings.reduce_from_tensor_model_parallel_region(own[..., :1], group=group)
            assert torch.equal(odd, expected[:rows, :, :1])

        leaf, slope = parts[rank].clone().requires_grad_(), torch.randn(ROWS, 1, HIDDEN).bfloat16()
        mappings.reduce_from_tensor_model_parallel_region(leaf, group=group).backward(slope)
        assert torch.equal(leaf.grad, slope)
        leaf = parts[rank].clone().requires_grad_()
        share = mappings.reduce_scatter_to_sequence_parallel_region(leaf, group=group)
        assert torch.equal(share, expected.chunk(ranks)[rank])
        slopes = torch.arange(ROWS).bfloat16()[:, None, None].expand(ROWS, 1, HIDDEN)
        share.backward(slopes.chunk(ranks)[rank])
        assert torch.equal(leaf.grad, slopes)
        _check_linear(rank, ranks)


def _check_linear(rank: int, ranks: int) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    outputs = []
    for sequence_parallel in (False, True):
        config = TransformerConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, tensor_model_parallel_size=ranks,
            sequence_parallel=sequence_parallel, use_cpu_initialization=True, params_dtype=torch.bfloat16,
        )  # fmt: skip
        linear = RowParallelLinear(
            INNER, HIDDEN, config=config, init_method=lambda weight: weight, bias=False, input_is_parallel=True,
            skip_bias_add=True, tp_group=dist.group.WORLD,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(9)
        shapes = (HIDDEN, INNER), (ROWS, 1, INNER)
        weight, tokens = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
        with torch.no_grad():
            linear.weight.copy_(weight.chunk(ranks, 1)[rank])
        own = tokens.chunk(ranks, -1)[rank].contiguous()
        outputs.append(linear(own)[0].detach())
        if not sequence_parallel:
            with torch.no_grad():  # a decode step
                assert torch.equal(torch.cat([linear(row)[0] for row in own.split(1)]), outputs[0])
    assert torch.equal(outputs[1], outputs[0].chunk(ranks)[rank])
    torch.testing.assert_close(outputs[0], tokens @ weight.t(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_over_ranks_have_one_order(ranks: int) -> None:
    run_ranks("tests.unit.platform.test_rank_order:on_rank", ranks)
