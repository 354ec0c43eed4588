"""`--exit-grace-seconds`: a running rollout is cancelled that long after the request to stop."""

from __future__ import annotations

import time

import pytest

from megatron_rl import signals
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout import Rollouter
from megatron_rl.signals import StopRequest


@pytest.mark.parametrize(("grace", "later", "cancelled"), [(0, 0, True), (10, 9, False), (10, 11, True)])
def test_a_rollout_is_cancelled_after_its_grace(
    one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch, grace: float, later: float, cancelled: bool
) -> None:
    stop = StopRequest()
    rollouter = Rollouter(None, None, one_rank, None, stop, grace_seconds=grace)
    assert not rollouter._must_stop(steps=8)
    stop._handle(signals.signal.SIGTERM, None)
    asked = time.monotonic()
    monkeypatch.setattr(signals.time, "monotonic", lambda: asked + later)
    assert rollouter._must_stop(steps=8) is cancelled
    rollouter.close()
