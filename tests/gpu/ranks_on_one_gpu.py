"""Start several ranks on one GPU over NCCL, and measure first whether NCCL accepts that.

    torchrun --nproc-per-node=2 ... -m tests.gpu.ranks_on_one_gpu       the check, on every rank; rank 0 prints JSON

NCCL refuses two ranks on one GPU of one host, which it tells by a hash of the host's name. ``NCCL_HOSTID`` replaces the
name: with another one for each rank, NCCL connects the ranks by sockets on the loopback interface. ONE torchrun starts
all ranks of a run, through a shell that sets the variable from the rank's number. Without a CUDA device the ranks talk
over gloo, and the variable has no effect.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0", "NCCL_RAS_ENABLE": "0",
    "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_MAX_NCHANNELS": "1", "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "CUDA_VISIBLE_DEVICES": "0",
}  # fmt: skip
"""Sockets only: every faster way between ranks would find that they share a GPU. What the user has set counts."""
SHELL = 'export NCCL_HOSTID="rank$RANK"; exec "$@"'
OUT_OF_TIME = -1
_started: set[int] = set()
"""Process groups of launches under way."""


class Ended(NamedTuple):
    """How a launch ended."""

    code: int
    """Exit code of torchrun, or `OUT_OF_TIME`."""
    seconds: float


def launch(
    ranks: int, words: Sequence[str], log: Path, limit: float, extra: Mapping[str, str] | None = None
) -> Ended:
    """Run ``python words`` on that many ranks for at most ``limit`` seconds, with ``extra`` environment variables."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python",
        "/bin/sh", "-c", SHELL, "sh", sys.executable, *words,
    ]  # fmt: skip
    given = ENVIRONMENT | os.environ | (extra or {})
    paths = [(extra or {}).get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")]
    given["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    started = time.monotonic()
    with log.open("ab") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=given, stdout=file, stderr=file, start_new_session=True)
        _started.add(process.pid)
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = OUT_OF_TIME
        _kill(process.pid)  # also after a torchrun that died: ranks that it left behind would hold the GPU
        process.wait()
        _started.discard(process.pid)
    return Ended(code, time.monotonic() - started)


def end_all(*_: object) -> None:
    """Kill all launches and this process: a handler of signals."""
    for group in tuple(_started):
        _kill(group)
    os._exit(124)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def check_collectives() -> dict[str, Any]:
    """Return milliseconds of collectives on this rank; on CUDA also of one captured in a CUDA graph.

    Raises:
        AssertionError: a collective gave a wrong result.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, size, found = dist.get_rank(), dist.get_world_size(), dict[str, Any]()
    for name, count in (("4 KiB", 2**10), ("8 MiB", 2**21)):
        numbers = torch.full((count,), float(rank + 1), device=device)
        found[f"all-reduce {name} ms"] = _milliseconds(lambda sent=numbers: dist.all_reduce(sent, dist.ReduceOp.MAX))
        assert numbers.eq(size).all(), numbers[:4]
    if cuda:
        parts = torch.arange(size, device=device) + 10 * rank
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        assert received.tolist() == [rank + 10 * peer for peer in range(size)], received
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["captured all-reduce ms"] = _captured(size, device)
    dist.barrier()
    dist.destroy_process_group()
    return found


def _captured(size: int, device: torch.device) -> float:
    numbers, stream = torch.ones(256, device=device), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        dist.all_reduce(numbers)  # NCCL connects before the capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        dist.all_reduce(numbers)
    numbers.fill_(1)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert numbers.eq(size).all(), numbers[:4]
    return _milliseconds(graph.replay)


def _milliseconds(work: Callable[[], object], repeats: int = 8) -> float:
    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    work()
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return round(1e3 * (time.perf_counter() - started) / repeats, 2)


if __name__ == "__main__":
    is_first, measured = os.environ["RANK"] == "0", check_collectives()
    if is_first:
        print(json.dumps(measured), flush=True)
