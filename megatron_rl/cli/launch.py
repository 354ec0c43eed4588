"""Ranks started on torchrun's own launcher, without its banner and its report of exit codes; and what a rank runs.

    python -m megatron_rl.cli.launch LAUNCHER MODULE:FUNCTION WORDS      a rank, as `launch` starts it

torchrun answers a signal by asking its ranks to stop and killing them 30 s later, and ends with 1 and a traceback
itself. Here a signal is passed on and the ranks end when they have saved; the exit code is theirs.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import select
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import psutil

from megatron_rl.cli.options import Ranks
from megatron_rl.environments.child import die_with_parent
from megatron_rl.main import RUN_ERROR
from megatron_rl.signals import TYPED_COMMAND, with_streams

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

logger = logging.getLogger(__name__)

RANK_MODULE = "megatron_rl.cli.launch"
ENDED_BY_SIGNAL = 128
"""What a shell adds to the number of the signal that has ended a process."""
_LOOK_AGAIN_S = 0.2


def launch(ranks: Ranks, entry: str, words: Sequence[str], command: Sequence[str]) -> int:
    """Run ``entry``, "module:function", with ``words`` on all ranks of this machine; the exit code.

    It is that of the rank that failed first, 128 + n where signal n has ended it, and 0 if none failed.

    Args:
        command: the words that were typed, for ``command.txt``.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    if "LOGLEVEL" not in os.environ:  # torch's own switch for what its launcher says
        for name in ("torch.distributed.run", "torch.distributed.elastic"):
            logging.getLogger(name).addHandler(logging.NullHandler())
            logging.getLogger(name).propagate = False
    arguments = parse_args([*_launcher_flags(ranks), "-m", RANK_MODULE, str(os.getpid()), entry, *words])
    with _environment(ranks, command), forwarding_signals() as told:
        try:
            run(arguments)
        except ChildFailedError as failed:
            return _exit_code(failed, stopped=bool(told))
        except (DistError, RendezvousError) as error:
            where = f"--master-addr {ranks.master_addr} --master-port {ranks.master_port}"
            logger.error("the %d machines did not find each other at %s: %s", ranks.nnodes, where, error)
            return RUN_ERROR
    return 0


def _launcher_flags(ranks: Ranks) -> list[str]:
    flags = [f"--nproc-per-node={ranks.nproc}", f"--max-restarts={ranks.max_restarts}", "--signals-to-handle=SIGQUIT"]
    if ranks.nnodes == 1:
        return [*flags, "--standalone"]
    place = (f"--master-addr={ranks.master_addr}", f"--master-port={ranks.master_port}")
    return [*flags, f"--nnodes={ranks.nnodes}", f"--node-rank={ranks.node_rank}", *place]


@contextlib.contextmanager
def _environment(ranks: Ranks, command: Sequence[str]) -> Iterator[None]:
    """What the ranks inherit."""
    added = {TYPED_COMMAND: shlex.join(command)}
    if ranks.nproc > 1 and "OMP_NUM_THREADS" not in os.environ:
        added["OMP_NUM_THREADS"] = "1"  # as torchrun does, which warns in ten lines
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _exit_code(failed: ChildFailedError, stopped: bool) -> int:
    rank, failure = failed.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode
    number = signal.Signals(-failure.exitcode)
    if stopped and number == signal.SIGTERM:  # ours, before the rank could take it up
        return 0
    logger.error("rank %d was ended by %s", rank, number.name)
    return ENDED_BY_SIGNAL + number


@contextlib.contextmanager
def forwarding_signals() -> Iterator[set[int]]:
    """Pass Ctrl-C, SIGTERM and, unless ``nohup`` ignores it, SIGHUP on to the ranks; yield the ids of those told.

    A thread does so: the main thread may be waiting for another machine, where Python's handlers do not run. A rank
    hears the first signal as SIGTERM, because SIGINT in a Python that is starting is a traceback; another Ctrl-C as
    SIGINT, which ends it at once.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    earlier = {number: signal.signal(number, lambda *_: None) for number in numbers}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    told: set[int] = set()
    thread = threading.Thread(target=_forward, args=(reader, told), daemon=True)
    thread.start()
    try:
        yield told
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(writer)  # which ends the thread
        thread.join()
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _forward(reader: int, told: set[int]) -> None:
    """Until the other end of the pipe is closed."""
    asked = False
    with open(reader, "rb", buffering=0) as pipe:
        while True:
            if select.select([pipe], [], [], _LOOK_AGAIN_S if asked else None)[0]:
                number = pipe.read(1)
                if not number:
                    return
                name = signal.Signals(number[0])
                if not asked:
                    logger.info("%s: the ranks finish and save; Ctrl-C once more ends them at once", name.name)
                elif name == signal.SIGINT:
                    _tell(_ranks(), signal.SIGINT)
                asked = True
            if asked:  # also those that have been started since
                new = [rank for rank in _ranks() if rank.pid not in told]
                _tell(new, signal.SIGTERM)
                told.update(rank.pid for rank in new)


def _ranks() -> list[psutil.Process]:
    """A child that does not run its program yet is none: it would lose the signal."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if RANK_MODULE in child.cmdline():
                found.append(child)
    return found


def _tell(ranks: Sequence[psutil.Process], number: signal.Signals) -> None:
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            rank.send_signal(number)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))  # before the imports that take seconds
    module, function = sys.argv[2].split(":")
    code = with_streams(getattr(importlib.import_module(module), function))(sys.argv[3:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # too late: see `megatron_rl.cli.entry`
    sys.exit(code)
