"""`--empty-unused-memory-level`: 1 after the backward pass, 2 also after the update."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.trainer.optimizer import Optimization


@pytest.mark.parametrize(
    ("level", "device", "expected"), [(0, "cuda", 0), (1, "cuda", 1), (2, "cuda", 2), (2, "cpu", 0)]
)
def test_cached_memory_goes_back_as_often_as_asked(
    monkeypatch: pytest.MonkeyPatch, level: int, device: str, expected: int
) -> None:
    released = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(1))
    policy = SimpleNamespace(device=torch.device(device))
    optimization = SimpleNamespace(_empty_cache_level=level, policy=policy)
    for moment in (1, 2):
        Optimization.release_memory(optimization, moment)
    assert len(released) == expected
