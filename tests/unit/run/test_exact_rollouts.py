"""When --batch-invariant-mode takes the log-probs of rollouts for the trainer's."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.run.rl import rollout_is_exact
from tests.support.tiny import tiny_config

MODE = {"batch_invariant_mode": True, "bf16": True}


@pytest.mark.parametrize(
    ("flags", "device", "harnesses", "wanted"),
    [
        (MODE, "cuda", (), True),
        (MODE, "cpu", (), False),
        ({"bf16": True}, "cuda", (), False),
        (MODE, "cuda", ("agent",), False),  # whose calls may have another temperature than the trainer's
        (MODE | {"rl_partial_rollouts": True}, "cuda", (), False),
    ],
)
def test_only_where_both_score_the_same_distribution(flags, device, harnesses, wanted) -> None:
    assert rollout_is_exact(tiny_config(**flags), torch.device(device), harnesses) == wanted
