"""Tokens that several samples begin with run through the model once: where they lie by hand, and what it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms.batch import Sample
from megatron_rl.algorithms.context import SharedPrompts, repeated
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.packing import prompt_of, prompt_pieces, skipped_tokens
from megatron_rl.trainer.scoring import Scorer
from tests.support.samples import make_sample, random_samples, with_prompts
from tests.support.tiny import tiny_config, tiny_policy

CPU = torch.device("cpu")


def test_by_hand_the_example_of_the_class() -> None:
    share = SharedPrompts.of([4, 5, 2], [0, 2, 0])
    assert share.local.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 10]
    assert share.keys.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8]
    assert (share.query_lengths, share.key_lengths) == ((4, 3, 2), (4, 5, 2))
    assert share.query_borders.tolist() == [0, 4, 7, 9] and share.key_borders.tolist() == [0, 4, 9, 11]


def test_by_hand_what_the_sequence_before_has_from_one_further_before() -> None:
    """``A B C``, ``A B D E`` and ``A B D F``: B stands twice, because C and D are predicted from it."""
    share = SharedPrompts.of([3, 4, 4], [0, 1, 2])
    assert share.local.tolist() == [0, 1, 2, 4, 5, 6, 9, 10]
    assert share.keys.tolist() == [0, 1, 2, 0, 3, 4, 5, 0, 3, 6, 7]


def test_the_gradient_of_a_token_is_the_sum_over_its_sequences() -> None:
    cells = torch.tensor([[1.0], [2.0]], requires_grad=True)
    given = repeated(cells, torch.tensor([0, 1, 0]))
    assert given.tolist() == [[1.0], [2.0], [1.0]]
    (given * torch.tensor([[1.0], [10.0], [100.0]])).sum().backward()
    assert cells.grad.tolist() == [[101.0], [10.0]]


def test_a_sum_of_bf16_gradients_is_rounded_once() -> None:
    """256 + 1 is 256 in bf16, however often 1 is added."""
    cells = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    repeated(cells, torch.zeros(257, dtype=torch.int64)).backward(torch.tensor([256.0] + [1.0] * 256).bfloat16())
    assert cells.grad.item() == 512


def routed(sample: Sample, experts: list[int]) -> Sample:
    return replace(sample, routing=torch.tensor(experts, dtype=torch.uint8).view(-1, 1, 1))


def test_by_hand_what_is_skipped() -> None:
    """The last token in common is not, because what is predicted from it differs; of equal samples neither."""
    samples = [make_sample(tokens) for tokens in ([1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 5, 6], [9, 1], [9])]
    assert skipped_tokens(samples) == [0, 2, 4, 0, 0]


def test_tokens_that_went_to_other_experts_are_not_shared() -> None:
    first, second = (make_sample([1, 2, 3, tail]) for tail in (4, 5))
    assert skipped_tokens([routed(first, [0, 1, 2, 3]), routed(second, [0, 1, 2, 7])]) == [0, 2]
    assert skipped_tokens([routed(first, [0, 1, 2, 3]), routed(second, [0, 7, 2, 3])]) == [0, 0]


def test_by_hand_pieces() -> None:
    """Two prompts of which 4 and 2 tokens can be shared: 10 + (9 - 4) fit 15, one more does not."""
    one, other = (111, 4), (222, 2)
    pieces, costs = prompt_pieces([10, 5, 9, 8, 6], [one, other, one, one, other], 15)
    assert (pieces, costs) == ([[0, 2], [1, 4], [3]], [15, 9, 8])


def test_a_sample_that_fits_nowhere_is_a_piece() -> None:
    """`pack` names it."""
    assert prompt_pieces([30, 3], [(1, 2), (1, 2)], 15) == ([[0], [1]], [30, 3])


def test_prompts_are_told_by_their_tokens_and_length() -> None:
    first, same, longer, other = (
        make_sample(tokens, prompt_length=count)
        for tokens, count in (([1, 2, 3, 4], 3), ([1, 2, 3, 9, 9], 3), ([1, 2, 3, 4, 5], 4), ([1, 7, 3, 4], 3))
    )
    assert prompt_of(first) == prompt_of(same) and prompt_of(first)[1] == 2
    assert len({prompt_of(sample) for sample in (first, longer, other)}) == 3
    assert prompt_of(make_sample([1, 2], prompt_length=1))[1] == 0


@pytest.mark.parametrize("round_to", [1, 8])
@pytest.mark.parametrize("kind", [{}, {"untie_embeddings_and_output_weights": False, "qk_layernorm": True}])
def test_log_probs_are_those_without_sharing(one_rank: ParallelGroups, kind: dict, round_to: int) -> None:
    """Of 40 samples with 5 prompts of 12 tokens; the model runs less than three quarters of the tokens."""
    policy = tiny_policy(tiny_config(**kind))
    scorer = Scorer(policy, one_rank, 0.8)
    samples = with_prompts(random_samples(40), 5, length=12)
    found = []
    for shares in (False, True):
        batches = BatchBuilder(64, round_to, CPU, one_rank, shares_prompts=shares).pack(samples, seed=0)
        ran = [one.samples.token_ids if one.packing.share is None else one.packing.share.local for one in batches]
        assert all(tokens.numel() <= 64 and tokens.numel() % round_to == 0 for tokens in ran)
        rows = {
            sample_id: row
            for batch, values in zip(batches, scorer.logprobs(batches), strict=True)
            for sample_id, row in zip(batch.samples.sample_id, values.split(batch.packing.lengths), strict=False)
        }
        found.append((rows, sum(tokens.numel() for tokens in ran)))
    (whole, all_tokens), (shared, fewer) = found
    assert whole.keys() == shared.keys() == set(range(40))
    assert fewer < all_tokens * 3 / 4
    for sample_id, row in whole.items():
        torch.testing.assert_close(shared[sample_id], row, rtol=0, atol=2e-6)
