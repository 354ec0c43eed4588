"""Which groups count for dynamic sampling."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.algorithms.filters import mean_reward, signal
from megatron_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("rewards", "differ", "within"),
    [
        ([0.0, 1.0], True, True),
        ([1.0, 1.0, 1.0, 0.0], True, True),
        ([1.0] * 9 + [0.0], True, False),  # 0.9
        ([0.0] * 9 + [1.0], True, False),  # 0.1
        ([1.0] * 4 + [0.0], True, True),  # 0.8, which fp32 makes 0.800000012
        ([0.5, 0.5], False, False),
    ],
)
def test_rewards_that_count(rewards: list[float], differ: bool, within: bool) -> None:
    assert signal.Filter()(torch.tensor(rewards)) is differ
    assert mean_reward.Filter()(torch.tensor(rewards)) is within


def test_bounds() -> None:
    quarter = torch.tensor([0.0, 0.0, 0.0, 1.0])
    assert mean_reward.Filter(low=0.25, high=0.25)(quarter)
    assert not mean_reward.Filter(low=0.26)(quarter)
    assert not mean_reward.Filter(low=0, high=0.24)(quarter)
    with pytest.raises(ConfigError, match="low=0.9 is above high=0.8"):
        mean_reward.Filter(low=0.9)
