"""Grading in processes that can be killed: no completion and no environment holds or ends the caller.

::

    workers     WorkerPool: what the server and the graders use
    slot        one worker at a time: deadline, death, retry        patience    how long to wait for it
    spawning    asks the fork server
    forkserver  forks workers with sympy imported                   worker      the loop inside a worker
    limits      what a worker may use                               channel     JSON over a socket
"""

from megatron_rl.environments.pool.limits import Limits, in_worker
from megatron_rl.environments.pool.workers import WorkerPool

__all__ = ["Limits", "WorkerPool", "in_worker"]
