"""`--exit-grace-seconds`: a running rollout is cancelled that long after the request to stop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_rl import signals
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.rollouter import Rollouter
from megatron_rl.signals import StopRequest
from tests.support.toy import toy_tokenizer
from tests.unit.rollout.test_rollouter import ScriptedEngine, grade_at_once, make_requests


@pytest.mark.parametrize(("grace", "later", "cancelled"), [(0, 0, True), (10, 9, False), (10, 11, True)])
def test_a_rollout_is_cancelled_after_its_grace(
    one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch, grace: float, later: float, cancelled: bool
) -> None:
    stop = StopRequest()
    stop.reason = "SIGTERM"  # at 0 by the clock
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: later))
    rollouter = Rollouter(ScriptedEngine([3]), toy_tokenizer(), one_rank, grade_at_once, stop, grace_seconds=grace)
    assert (rollouter.run(make_requests(1), 9, 4) is None) is cancelled
    rollouter.close()
