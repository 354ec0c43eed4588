"""Two tensor-parallel ranks give the log-probs, entropies and gradients of one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl.algorithms.logprobs import selected_logprobs
from tests.support.ranks import joined, run_ranks

NUM_RANKS = 2
SHARD = 6
TOKENS = torch.tensor([3, 4, 0, 2, 1, 4, 3])
POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1, 2])


def test_two_ranks_equal_one() -> None:
    run_ranks("tests.unit.algorithms.test_selected_logprobs_parallel:on_rank", NUM_RANKS)


def on_rank() -> None:
    with joined() as (rank, _):
        # 12: all columns are real. 9: the second rank has padding. 5: it has nothing else.
        for vocab_size in (12, 9, 5):
            for scale in (1.0, 300.0):
                _compare(rank, vocab_size, scale)
                _compare_fused(rank, vocab_size, scale)


def _compare(rank: int, vocab_size: int, scale: float) -> None:
    """``scale`` 300 puts ranks hundreds of nats apart, where a careless sum of exponentials overflows."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = scale * torch.randn(7, NUM_RANKS * SHARD, generator=generator)
    tokens = (TOKENS * 3 + 1) % vocab_size
    columns = slice(rank * SHARD, (rank + 1) * SHARD)
    whole = logits.clone().requires_grad_()
    shard = logits[:, columns].clone().requires_grad_()
    settings = {"vocab_size": vocab_size, "temperature": 0.7, "entropy": "differentiable"}

    expected = selected_logprobs(whole, tokens, POSITIONS, **settings)
    actual = selected_logprobs(
        shard, tokens, POSITIONS, vocab_start=rank * SHARD, tensor_group=dist.group.WORLD, **settings
    )
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], atol=2e-4, rtol=1e-5)

    weights = torch.linspace(-1.0, 2.0, 7)
    for logprobs, entropy in (expected, actual):
        (weights * (logprobs + 0.3 * entropy)).sum().backward()
    torch.testing.assert_close(shard.grad, whole.grad[:, columns], atol=1e-5 * scale, rtol=1e-5)


def _compare_fused(rank: int, vocab_size: int, scale: float) -> None:
    """From hidden states and a shard of the output layer's weight; against the whole logits on one rank."""
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    weight = scale * torch.randn(NUM_RANKS * SHARD, 4, generator=generator, dtype=torch.float64)
    tokens = (TOKENS * 3 + 1) % vocab_size
    rows = slice(rank * SHARD, (rank + 1) * SHARD)
    whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    shard = [hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()]
    settings = {"vocab_size": vocab_size, "temperature": 0.7, "entropy": "differentiable"}

    expected = selected_logprobs(whole[0] @ whole[1].t(), tokens, POSITIONS, **settings)
    split = {"vocab_start": rank * SHARD, "tensor_group": dist.group.WORLD}
    actual = selected_logprobs(shard[0], tokens, POSITIONS, weight=shard[1], **split, **settings)
    torch.testing.assert_close(actual, expected)

    weights = torch.linspace(-1.0, 2.0, 7, dtype=torch.float64)
    for logprobs, entropy in (expected, actual):
        (weights * (logprobs + 0.3 * entropy)).sum().backward()
    dist.all_reduce(shard[0].grad)  # what the model's copy_to_tensor_model_parallel_region does
    torch.testing.assert_close(shard[0].grad, whole[0].grad)
    torch.testing.assert_close(shard[1].grad, whole[1].grad[rows])
