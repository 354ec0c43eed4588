"""What the test of quotas runs on two ranks; no model is built."""

from __future__ import annotations

import time
from typing import Any

from megatron_rl.algorithms.filters import signal
from megatron_rl.platform.groups import shut_down
from megatron_rl.rollout.dynamic_sampling import Quota
from tests.distributed.programs import join
from tests.support.rollouts import graded_group

GOOD, EQUAL = graded_group([0.0, 1.0]), graded_group([1.0, 1.0])


def replicas() -> dict[str, Any]:
    """Two replicas: rank 1 answers after 0.5 s, and its engine's first step is as long. Rank 0 looks on meanwhile.

    Then rank 1 leaves before anything is finished.
    """
    groups = join(1)
    quota = Quota(3, range(6), signal.Filter(), groups)
    own = ({0: GOOD, 2: EQUAL, 4: GOOD}, {1: GOOD, 3: GOOD})[groups.rank]
    looks, started = 0, time.monotonic()
    while not quota.is_met(own if groups.rank == 0 or time.monotonic() - started > 0.5 else {}, idle=False):
        looks += 1
        time.sleep(0.5 if groups.rank == 1 and looks == 20 else 0.001)
    agreed = quota.states[: quota.num_needed], quota.num_needed
    quota = Quota(1, range(2), signal.Filter(), groups)
    if groups.rank == 1:
        quota.leave()
    while not quota.is_met({}, idle=False):
        time.sleep(0.001)
    shut_down()
    return {"agreed": agreed, "looks": looks, "left": quota.was_left}


def copy() -> dict[str, Any]:
    """One copy of a model on two ranks, of which the second is slower."""
    groups = join(2)
    quota = Quota(2, range(2), signal.Filter(), groups)
    look = 1
    while not quota.is_met({0: GOOD, 1: GOOD} if look > 20 else {}, idle=False):
        time.sleep(0.002 * groups.rank)
        look += 1
    shut_down()
    return {"states": quota.states, "look": look}
