"""``megatron-rl doctor``: whether this machine can run what the project does; one line each, with the fix.

    ok       it is fine
    warning  a run works, but slower or smaller than it could
    error    it would stop a run

The exit code is 1 if there is an error.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

import megatron_rl
from megatron_rl.errors import one_line
from megatron_rl.metrics.logging import configure_logging

if TYPE_CHECKING:
    from packaging.requirements import Requirement

GIB = 2**30
OPTIONAL = ("wandb",)
"""A run does without: it has flags of its own."""
FEWEST_FILES = 4096
MASTER_PORT = 29500


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    what: str
    text: str


def main(words: Sequence[str]) -> int:
    """Return the exit code: 0, or 1 if something would stop a run."""
    if words:
        sys.stdout.write(f"usage: megatron-rl doctor\n\n{__doc__}\n")
        return 0 if words[0] in ("-h", "--help") else 2
    configure_logging(rank=1)
    code = 0
    for check in CHECKS:
        for level, what, text in _guarded(check):
            sys.stdout.write(f"{level:<8} {what:<14} {one_line(text)}\n")
            sys.stdout.flush()
            code = 1 if level == "error" else code
    return code


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What breaks here would break in a run, and must not hide the other lines."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - libraries of this machine raise whatever they like
        yield Finding("error", check.__name__, f"{type(error).__name__}: {error}")


def _found(what: str, text: str, fault: str | None, level: str = "warning") -> Finding:
    """``fault`` at that level; ``text`` where there is none."""
    return Finding("ok", what, text) if fault is None else Finding(level, what, fault)


def packages() -> Iterator[Finding]:
    """Check Python and the versions that setup.py asks for."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    yield Finding("ok", "megatron-rl", f"{megatron_rl.__version__} in {Path(megatron_rl.__file__).parent}")
    try:
        installed = distribution("megatron-rl")
    except PackageNotFoundError:
        text = "megatron-rl is not installed, so versions are not compared; pip install ."
        yield Finding("warning", "packages", text)
        return
    own, wanted = platform.python_version(), installed.metadata["Requires-Python"]
    fault = f"{own} is not {wanted}; make the environment with one that is"
    yield _found("python", own, None if SpecifierSet(wanted).contains(own) else fault, "error")
    good = 0
    for requirement in map(Requirement, installed.requires or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        fault = _misfit(requirement)
        if fault is None:
            good += 1
            continue
        level = "warning" if requirement.name in OPTIONAL else "error"
        yield Finding(level, requirement.name, f"{fault}; pip install '{requirement.name}{requirement.specifier}'")
    yield Finding("ok", "packages", f"{good} have the versions that setup.py asks for")


def _misfit(requirement: Requirement) -> str | None:
    try:
        there = version(requirement.name)
    except PackageNotFoundError:
        return "is not installed"
    fits = requirement.specifier.contains(there, prereleases=True)
    return None if fits else f"{there} is installed, {requirement.specifier} is needed"


def devices() -> Iterator[Finding]:
    """Check torch, GPUs, and what ranks talk through."""
    import torch
    import torch.distributed as dist

    from megatron_rl.platform.device import bf16_speedup

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    yield Finding("ok", "torch", f"{torch.__version__}, built for {built_for}")
    if not torch.cuda.is_available():
        advice = "install the driver for it" if torch.version.cuda else "install torch built for CUDA"
        fault = f"there is a GPU that torch cannot use; {advice}" if Path("/dev/nvidia0").exists() else None
        yield _found("cuda", "no GPU: runs use the CPU, which is for trying things out", fault, "error")
        gain = bf16_speedup()
        pays = "--bf16 pays" if gain > 1.2 else "leave --bf16 out"
        yield Finding("ok", "bf16", f"products are {gain:.1f} times as fast as fp32's: {pays}")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{facts.name}, {facts.major}.{facts.minor}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        fault = f"{text}; nvidia-smi says who has the rest"
        yield _found(f"gpu {index}", text, None if free >= 0.9 * total else fault)
    if torch.cuda.is_available():
        if dist.is_nccl_available():
            yield Finding("ok", "nccl", ".".join(map(str, torch.cuda.nccl.version())))
        else:
            yield Finding("error", "nccl", "this torch has none, so GPUs cannot talk; install torch built for CUDA")
    if not dist.is_gloo_available():
        yield Finding("error", "gloo", "this torch has none, and ranks talk through it; install another build")


def kernels() -> Iterator[Finding]:
    """Try attention kernels against plain torch."""
    import torch

    from megatron_rl.models.attention.backend import BACKENDS, Requirements
    from megatron_rl.models.attention.selection import facts_of, fault_of_cache, fault_of_packed
    from megatron_rl.platform import current_platform

    device = current_platform().device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = Requirements(dtype, dtype, 64), 4, 2, device
    for name in BACKENDS.names():
        backend = BACKENDS.get(name)
        absent = backend.problem(facts_of(device))
        if absent is not None:
            yield Finding("ok", name, f"not used: {absent}")
            continue
        parts = [fault_of_packed(backend.packed, *shape)] if backend.packed is not None else []
        if backend.cache is not None and backend.cache.layout == "blocks":
            parts.append(fault_of_cache(backend.cache, *shape))
        faults = [f"{fault}; --attention-backend auto passes it over" for fault in parts if fault]
        yield _found(name, "attention agrees with plain torch", next(iter(faults), None))
    if device.type == "cuda":
        import triton  # a run on GPUs has kernels of ours

        yield Finding("ok", "triton", triton.__version__)
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        level = "error" if device.type == "cuda" else "warning"
        yield Finding(level, "compiler", "there is no C compiler, which Triton needs; apt-get install gcc")


def machine() -> Iterator[Finding]:
    """Check memory, disk and files."""
    scratch, shared = tempfile.gettempdir(), "/dev/shm"
    wanted = [
        ("memory", psutil.virtual_memory().available, 4, "end other programs, or take a larger machine"),
        ("disk", shutil.disk_usage(".").free, 10, "checkpoints go here; --run-dir names another place"),
        ("temporary", shutil.disk_usage(scratch).free, 1, f"make room in {scratch}, or set TMPDIR"),
    ]
    if os.path.isdir(shared):
        advice = "ranks of one machine exchange data there; start the container with --ipc=host or --shm-size=16g"
        wanted.append(("shared memory", shutil.disk_usage(shared).free, 1, advice))
    for what, free, gib, advice in wanted:
        text = f"{free / GIB:.1f} GiB free"
        yield _found(what, text, None if free >= gib * GIB else f"{text}; {advice}")
    if not os.access(".", os.W_OK):
        yield Finding("warning", "directory", f"{Path.cwd()} cannot be written; give --run-dir elsewhere")
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{files} at most"
    yield _found("open files", text, None if files >= FEWEST_FILES else f"{text}; ulimit -n {most}")


def network() -> Iterator[Finding]:
    """Check what ranks and the environment server listen on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname(), timeout=5):
            yield Finding("ok", "ports", "a server on 127.0.0.1 can be reached")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", MASTER_PORT))
        except OSError as error:
            text = f"{MASTER_PORT} is taken ({error.strerror}): on several machines give another --master-port"
            yield Finding("warning", "master port", text)
    name = socket.gethostname()
    try:
        yield Finding("ok", "host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        advice = "put it into /etc/hosts, or set GLOO_SOCKET_IFNAME to the name of the network"
        yield Finding("warning", "host name", f"{name} has no address ({error}); {advice}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (packages, devices, kernels, machine, network)
"""In the order of the report."""
