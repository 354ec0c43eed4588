"""How a weight is drawn and cut, by hand."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.errors import ConfigError
from megatron_rl.families import Parameter
from megatron_rl.families.parts import EMBEDDING
from megatron_rl.models.parameters import part_of, refuse_buffers
from megatron_rl.platform.groups import ParallelGroups
from tests.support.tiny import tiny_config, tiny_policy

WHOLE = torch.arange(8).view(4, 2)


@pytest.mark.parametrize(
    ("cut", "blocks", "parts"),
    [
        (None, 1, [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2),
        ("rows", 1, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        # gate and up projection, each cut by itself
        ("rows", 2, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        ("columns", 1, [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]),
    ],
)
def test_what_two_ranks_hold_of_a_weight(cut: str | None, blocks: int, parts: list[list[list[int]]]) -> None:
    parameter = Parameter("weight", (4, 2), cut, 2, blocks)
    assert [part_of(WHOLE, parameter, rank).tolist() for rank in range(2)] == parts


def test_weights_have_the_spread_that_flags_say(one_rank: ParallelGroups) -> None:
    """Embedding 0.5, and 0.2 but for what is added to the residual stream: 0.2 / sqrt(2 x 4 layers)."""
    config = tiny_config(num_layers=4, init_method_std=0.2, embedding_init_method_std=0.5)
    found = {name: weight for name, weight in tiny_policy(config).named_parameters() if weight.dim() > 1}
    assert len(found) == 2 + 4 * 4
    for name, weight in found.items():
        added = "linear_proj" in name or "linear_fc2" in name
        expected = 0.5 if name == EMBEDDING else 0.2 / 8**0.5 if added else 0.2
        assert weight.std().item() == pytest.approx(expected, rel=0.1), name


def test_rows_that_only_pad_the_vocabulary_are_zero_and_shift_no_number(one_rank: ParallelGroups) -> None:
    tables = []
    for divisor in (8, 40):
        policy = tiny_policy(tiny_config(make_vocab_size_divisible_by=divisor))
        tables.append(dict(policy.named_parameters())[EMBEDDING].detach())
    plain, padded = tables
    assert (len(plain), len(padded)) == (32, 40)
    assert torch.equal(padded[:32], plain) and not padded[32:].any()


class _Router(torch.nn.Module):
    """megatron-core's router has a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens_per_expert", torch.zeros(4), persistent=False)


def test_weights_in_a_buffer_are_refused_by_name() -> None:
    """They would be neither loaded from Hugging Face's files nor in the reference policy."""
    router = _Router()
    refuse_buffers([torch.nn.Sequential(router)])
    router.register_buffer("expert_bias", torch.zeros(4))
    with pytest.raises(ConfigError, match=r"keeps 0\.expert_bias in a buffer, which checkpoints and the reference"):
        refuse_buffers([torch.nn.Linear(2, 2), torch.nn.Sequential(router)])
