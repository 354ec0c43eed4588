"""Collation on the worked example of ``TokenBatch``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms.batch import SAMPLE_FIELDS, Sample
from megatron_rl.errors import TrainingError
from megatron_rl.trainer.packing import collate
from tests.support.samples import make_sample
from tests.support.scoring import routing_of
from tests.support.tokens import padding_of


def sample(tokens: list[int], prompt_length: int, **changes: object) -> Sample:
    """A sample whose log-prob at index t is -t, and 9 where none belongs."""
    logprobs = torch.tensor([9.0] * prompt_length + [-float(t) for t in range(prompt_length, len(tokens))])
    return make_sample(tokens, prompt_length, **{"inference_logprobs": logprobs, "sample_id": 7} | changes)


# P0 A0 E and Q0 B0
FIRST = sample([10, 11, 12], 1, reward=0.5, sample_id=4, versions=torch.full((3,), 3))
SECOND = sample([20, 21], 1, reward=-2.0, sample_id=2)


def test_two_samples_end_to_end() -> None:
    batch = collate([FIRST, SECOND], "cpu")
    assert batch.samples.token_ids.tolist() == [10, 11, 12, 20, 21]
    assert batch.packing.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.packing.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.packing.lengths == (3, 2)
    assert batch.loss_mask.tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert batch.rewards.tolist() == [0.0, 0.0, 0.5, 0.0, -2.0]
    assert batch.sequence_index.tolist() == [0, 0, 0, 1, 1]
    assert batch.versions.tolist() == [3, 3, 3, 0, 0]
    assert batch.inference_logprobs.tolist() == [0.0, -1.0, -2.0, 0.0, -1.0]
    assert batch.samples.sample_id == (4, 2)
    assert padding_of(batch) == 0


def test_each_token_has_its_version() -> None:
    mixed = sample([1, 2, 3, 4, 5, 6], 1, versions=torch.tensor([3, 3, 3, 4, 4, 6]))
    batch = collate([SECOND, mixed, FIRST], "cpu")
    assert batch.versions.tolist() == [0, 0, *(3, 3, 3, 4, 4, 6), 3, 3, 3]


def test_padding_is_a_sequence_of_its_own_without_loss() -> None:
    batch = collate([FIRST, SECOND], "cpu", round_to=4)
    assert batch.samples.token_ids.tolist() == [10, 11, 12, 20, 21, 0, 0, 0]
    assert batch.packing.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.packing.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert batch.packing.lengths == (3, 2, 3)
    assert batch.loss_mask.tolist() == [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert batch.rewards.tolist() == [0.0, 0.0, 0.5, 0.0, -2.0, 0.0, 0.0, 0.0]
    assert batch.sequence_index.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert batch.inference_logprobs.tolist() == [0.0, -1.0, -2.0, 0.0, -1.0, 0.0, 0.0, 0.0]
    assert batch.samples.sample_id == (4, 2)
    assert padding_of(batch) == 3


def test_routing_goes_by_layer_and_padding_has_none() -> None:
    first, second = (replace(s, routing=torch.arange(100 * i, 100 * i + 4 * s.length).view(s.length, 2, 2).byte())
                     for i, s in enumerate((FIRST, SECOND)))  # fmt: skip
    batch = collate([first, second], "cpu", round_to=4)
    nobody = [255, 255]
    assert routing_of(batch).tolist() == [
        [[0, 1], [4, 5], [8, 9], [100, 101], [104, 105], nobody, nobody, nobody],
        [[2, 3], [6, 7], [10, 11], [102, 103], [106, 107], nobody, nobody, nobody],
    ]
    assert collate([FIRST, SECOND], "cpu", round_to=4).samples.routing is None


def test_no_padding_where_none_is_needed() -> None:
    assert collate([FIRST, SECOND], "cpu", round_to=5).packing.lengths == (3, 2)


def test_dtypes() -> None:
    batch = collate([FIRST], "cpu", round_to=2)
    assert batch.samples.token_ids.dtype == batch.packing.position_ids.dtype == torch.int64
    assert batch.packing.cu_seqlens.dtype == torch.int32
    for values in (batch.loss_mask, batch.rewards, batch.inference_logprobs):
        assert values.dtype == torch.float32


def test_a_prompt_logprob_that_is_nan_does_not_reach_the_batch() -> None:
    logprobs = torch.tensor([torch.nan, -1.0])
    assert collate([sample([1, 2], 1, inference_logprobs=logprobs)], "cpu").inference_logprobs.tolist() == [
        0.0,
        -1.0,
    ]


def test_a_sample_without_a_prompt_is_refused() -> None:
    broken = make_sample([1, 2], 0, sample_id=31)
    with pytest.raises(TrainingError, match="sample 31 has no prompt"):
        collate([FIRST, broken], "cpu")


def test_what_the_model_read_carries_no_loss() -> None:
    """``P0 A0 E | R0 R1 | A1 E`` beside ``Q0 B0``: the replies R are in the batch, and outside the loss."""
    logprobs = torch.tensor([0.0, -1.0, -2.0, 0.0, 0.0, -3.0, -4.0])
    talk = make_sample([5, 1, 9, 7, 8, 2, 9], reward=2.0, read=((3, 5),), inference_logprobs=logprobs)
    plain = make_sample([6, 3], reward=-1.0, inference_logprob=-5.0, sample_id=1)
    for samples, masks in (
        ((talk, plain), [0, 1, 1, 0, 0, 1, 1, 0, 1]),
        ((plain, talk), [0, 1, 0, 1, 1, 0, 0, 1, 1]),
    ):
        batch = collate(samples, "cpu", round_to=1)
        assert batch.loss_mask.tolist() == masks
        assert batch.rewards[batch.rewards != 0].sort().values.tolist() == [-1.0, 2.0]


def test_a_reward_stands_at_the_last_token_that_the_policy_wrote() -> None:
    """``P0 A0 E | R0 R1``: the environment had the last word."""
    sample = make_sample(range(5), reward=1.5, read=((3, 5),))
    assert collate([sample], "cpu").rewards.tolist() == [0.0, 0.0, 1.5, 0.0, 0.0]


def test_every_field_of_a_sample_is_in_the_batch() -> None:
    """Of a token a row for each, of a sequence a number for each; what is on the host has none for padding."""
    of_tokens = ((s, torch.zeros(s.length, 2, 2).byte(), torch.zeros(s.length).long()) for s in (FIRST, SECOND))
    first, second = (replace(s, routing=routing, turn=turn) for s, routing, turn in of_tokens)
    batch = collate([first, second], "cpu", round_to=4)
    for name, kind in SAMPLE_FIELDS.items():
        found = getattr(batch.samples, name)
        if kind.on_host:
            assert found == (4, 2)
        else:
            assert found.shape[0] == (8 if kind.per_token else 3), name
            assert found.dtype == (kind.dtype or torch.uint8), name
