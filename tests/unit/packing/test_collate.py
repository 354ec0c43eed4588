"""Collation on the worked example of ``PackedBatch``."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.errors import TrainingError
from megatron_rl.packing.collate import collate
from megatron_rl.types import Sample


def sample(tokens: list[int], prompt_length: int, **changes: object) -> Sample:
    """A sample whose log-prob at index t is -t, and 9 where none belongs."""
    logprobs = torch.tensor([9.0] * prompt_length + [-float(t) for t in range(prompt_length, len(tokens))])
    fields = {"advantage": 1.0, "inference_logprobs": logprobs, "sample_id": 7} | changes
    return Sample(token_ids=torch.tensor(tokens), prompt_length=prompt_length, **fields)


# P0 A0 E and Q0 B0
FIRST = sample([10, 11, 12], 1, advantage=0.5, sample_id=4)
SECOND = sample([20, 21], 1, advantage=-2.0, sample_id=2)


def test_two_samples_end_to_end() -> None:
    batch = collate([FIRST, SECOND], "cpu")
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 21]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.lengths == (3, 2)
    assert batch.loss_mask.tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -2.0, -2.0]
    assert batch.inference_logprobs.tolist() == [0.0, -1.0, -2.0, 0.0, -1.0]
    assert batch.sample_ids == (4, 2)
    assert batch.num_loss_tokens == 3
    assert batch.padding == 0


def test_padding_is_a_sequence_of_its_own_without_loss() -> None:
    batch = collate([FIRST, SECOND], "cpu", round_to=4)
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 21, 0, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert batch.lengths == (3, 2, 3)
    assert batch.loss_mask.tolist() == [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -2.0, -2.0, 0.0, 0.0, 0.0]
    assert batch.inference_logprobs.tolist() == [0.0, -1.0, -2.0, 0.0, -1.0, 0.0, 0.0, 0.0]
    assert batch.sample_ids == (4, 2)
    assert batch.num_loss_tokens == 3
    assert batch.padding == 3


def test_no_padding_where_none_is_needed() -> None:
    assert collate([FIRST, SECOND], "cpu", round_to=5).lengths == (3, 2)


def test_dtypes() -> None:
    batch = collate([FIRST], "cpu", round_to=2)
    assert batch.token_ids.dtype == batch.position_ids.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32
    for values in (batch.loss_mask, batch.advantages, batch.inference_logprobs):
        assert values.dtype == torch.float32


def test_a_supervised_sample_has_no_inference_logprobs() -> None:
    batch = collate([sample([1, 2, 3], 1, inference_logprobs=torch.zeros(0)), SECOND], "cpu")
    assert batch.inference_logprobs.tolist() == [0.0, 0.0, 0.0, 0.0, -1.0]


def test_a_prompt_logprob_that_is_nan_does_not_reach_the_batch() -> None:
    logprobs = torch.tensor([torch.nan, -1.0])
    assert collate([sample([1, 2], 1, inference_logprobs=logprobs)], "cpu").inference_logprobs.tolist() == [
        0.0,
        -1.0,
    ]


@pytest.mark.parametrize("prompt_length", [0, 3])
def test_a_prompt_that_leaves_no_predecessor_or_is_too_long_is_refused(prompt_length: int) -> None:
    broken = Sample(torch.tensor([1, 2]), prompt_length, 0.0, torch.zeros(2), sample_id=31)
    with pytest.raises(TrainingError, match=f"sample 31 has a prompt of {prompt_length}"):
        collate([FIRST, broken], "cpu")


def test_misaligned_logprobs_and_empty_batches_are_refused() -> None:
    with pytest.raises(TrainingError, match="1 inference log-probs for 2 tokens"):
        collate([sample([1, 2], 1, inference_logprobs=torch.zeros(1))], "cpu")
    with pytest.raises(TrainingError, match="at least one sample"):
        collate([], "cpu")


def test_what_the_model_read_carries_no_loss() -> None:
    """``P0 A0 E | R0 R1 | A1 E`` beside ``Q0 B0``: the replies R are in the batch, and outside the loss."""
    talk = Sample(
        token_ids=torch.tensor([5, 1, 9, 7, 8, 2, 9]),
        prompt_length=1,
        advantage=2.0,
        inference_logprobs=torch.tensor([0.0, -1.0, -2.0, 0.0, 0.0, -3.0, -4.0]),
        environment_spans=((3, 5),),
    )
    plain = Sample(torch.tensor([6, 3]), 1, -1.0, torch.tensor([0.0, -5.0]), sample_id=1)
    for samples, masks in (
        ((talk, plain), [0, 1, 1, 0, 0, 1, 1, 0, 1]),
        ((plain, talk), [0, 1, 0, 1, 1, 0, 0, 1, 1]),
    ):
        batch = collate(samples, "cpu", round_to=1)
        assert batch.loss_mask.tolist() == masks
        assert batch.num_loss_tokens == sum(masks)
    assert talk.num_loss_tokens == 4


@pytest.mark.parametrize("spans", [((0, 2),), ((3, 5), (4, 6)), ((5, 8),), ((4, 3),)])
def test_spans_that_contradict_the_sample_are_refused(spans) -> None:
    sample = Sample(torch.arange(7), 1, 1.0, torch.zeros(7), 4, spans)
    with pytest.raises(TrainingError, match="sample 4 .*environment's tokens"):
        collate([sample], "cpu")
