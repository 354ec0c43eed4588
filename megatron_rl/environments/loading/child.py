"""The process in which author's modules are loaded (``supervise`` starts it)."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from megatron_rl.environments.loader import reason_of
from megatron_rl.environments.loading.stages import WORK
from megatron_rl.environments.pool.channel import receive, send
from megatron_rl.environments.pool.limits import die_with_parent
from megatron_rl.errors import ConfigError

REQUEST_SECONDS = 60.0


def main(descriptor: int) -> None:
    """Does the work that is asked for on the socket ``descriptor``, and ends whatever still runs by then."""
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    request = receive(channel, REQUEST_SECONDS)
    die_with_parent(request["parent"])
    _bound_memory()
    try:
        result = WORK[request["work"]](lambda stage: send(channel, {"stage": asdict(stage)}), **request["arguments"])
        answer = {"result": result}
    except ConfigError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        answer = {"problems": error.lines}
    except BaseException as error:  # noqa: BLE001 - an author's module may raise anything
        traceback.print_exc()
        answer = {"raised": f"raised {reason_of(error)}"}
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or replaced by a module
        sys.stdout.flush()
        sys.stderr.flush()
    send(channel, answer)
    os._exit(0)  # threads and exit handlers of the modules have no say


def _bound_memory() -> None:
    """Half of the machine's, and the first to go when the kernel runs short: the caller has work to keep."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or half < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (half, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main(int(sys.argv[1]))
