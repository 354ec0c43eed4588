"""Count the files of the library that the second step of a run executes, from its rollout to its last metric.

    python tools/second_step.py FLAGS       those of `megatron-rl train`, on one rank, with --train-iters 3 or more

Functions that were called count; modules that were only imported do not. The environment server is another process and
does not count either.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

LIBRARY = str(Path(__file__).resolve().parents[1] / "megatron_rl") + os.sep


def watch(step: Callable[..., Any], seen: set[str]) -> Callable[..., Any]:
    """Wrap the step function so that ``seen`` gets the files called from the beginning of step 2 to that of step 3."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            seen.add(frame.f_code.co_filename.removeprefix(LIBRARY))

    def watched(run: Any, number: int) -> Any:
        profile = note if number == 2 else None
        threading.setprofile(profile)
        sys.setprofile(profile)
        return step(run, number)

    return watched


def main(argv: list[str]) -> int:
    """Train, and print the files and how many they are."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    from megatron_rl import loop
    from megatron_rl.main import main as train

    seen: set[str] = set()
    loop.rl_step = watch(loop.rl_step, seen)
    code = train([argv[0], "--perform-rl-step", *argv[1:]])
    print(*sorted(seen), sep="\n")
    print(f"{len(seen)} files")
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
