"""One run at a time writes into a run directory, and into a directory of checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from pathlib import Path

from megatron_rl.config import RLConfig
from megatron_rl.errors import Problem, one_line

FILE_NAME = ".lock"

logger = logging.getLogger(__name__)


def lock(config: RLConfig, held: contextlib.ExitStack) -> list[Problem]:
    """Keep other starts out of what this one writes to until ``held`` is closed; a line where another has it.

    One rank calls it. The lock is the kernel's and is gone with the process, however that ends. It is of the process
    (`lockf`) and not of the open file (`flock`), which a fork that still writes a checkpoint would keep. So nothing
    else in this process may open the file: to close it anywhere gives the lock up.
    """
    places = {"run_dir": config.logging.run_dir, "save": config.checkpoint.save}
    if config.training.eval_only:
        del places["save"]  # a training command's, which is only read
    for name, directory in places.items():
        path = Path(directory) / FILE_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path.open("ab+", buffering=0))
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError:
            file.seek(0)
            holder = one_line(file.read(500).decode(errors="replace")) or "another process"
            text = f"is in use by {holder}; wait until that run has ended, stop it, or choose another directory"
            return [config.problem(name, text)]
        except OSError as error:  # a network file system without locks, a full disk
            logger.warning("%s is not locked (%s): see to it that no other run writes there", directory, error.strerror)
    return []
