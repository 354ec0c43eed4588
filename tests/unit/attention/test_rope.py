"""Rotation from tables equals megatron's own."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.models.attention.plan import RopeTable
from megatron_rl.models.gradients import rotate
from megatron_rl.platform.groups import ParallelGroups
from tests.support.tiny import tiny_config, tiny_policy


@pytest.mark.parametrize("changes", [{}, {"rotary_percent": 0.5}, {"rotary_base": 500}])
def test_equals_megatron(one_rank: ParallelGroups, changes: dict[str, float]) -> None:
    # Not at the top: megatron must be imported after it has been prepared.
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    policy = tiny_policy(tiny_config(**changes))
    positions = torch.tensor([0, 5, 3, 47, 1, 1])
    heads = torch.randn(6, 1, 4, 8)
    angles = policy.gpt.rotary_pos_emb.get_emb(48)[positions]
    expected = _apply_rotary_pos_emb_bshd(heads, angles)
    actual = rotate(heads, *policy.ropes["main"].at(positions, torch.float32))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(actual, heads)


def test_the_part_beyond_the_rotary_share_passes_unchanged(one_rank: ParallelGroups) -> None:
    policy = tiny_policy(tiny_config(rotary_percent=0.5))
    heads = torch.randn(3, 1, 4, 8)
    rotated = rotate(heads, *policy.ropes["main"].at(torch.tensor([7, 8, 9]), torch.float32))
    assert torch.equal(rotated[..., 4:], heads[..., 4:])
    assert not torch.allclose(rotated[..., :4], heads[..., :4])


def test_scores_depend_on_distance_alone(one_rank: ParallelGroups) -> None:
    rope = tiny_policy().ropes["main"]
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(query_at: int, key_at: int) -> float:
        turned = [
            rotate(heads, *rope.at(torch.tensor([position]), torch.float32))
            for heads, position in ((query, query_at), (key, key_at))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(4, 9), abs=1e-3)


def test_interleaved_layouts_are_refused(one_rank: ParallelGroups) -> None:
    embedding = tiny_policy().gpt.rotary_pos_emb
    embedding.rotary_interleaved = True
    with pytest.raises(ValueError, match="interleaved"):
        RopeTable(embedding, 16)
