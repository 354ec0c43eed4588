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
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Literal

import psutil

import megatron_rl
from megatron_rl.errors import one_line
from megatron_rl.metrics.logging import configure_logging

GIB = 2**30
OPTIONAL = ("wandb",)
"""A run does without: it has flags of its own."""
FEWEST_FILES = 4096
MASTER_PORT = 29500


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Literal["ok", "warning", "error"]
    what: str
    text: str


def main(words: Sequence[str]) -> int:
    """0, or 1 if something would stop a run."""
    if words:
        sys.stdout.write(f"usage: megatron-rl doctor\n\n{__doc__}\n")
        return 0 if words[0] in ("-h", "--help") else 2
    configure_logging(rank=1)
    findings = []
    for check in CHECKS:
        for finding in _guarded(check):
            sys.stdout.write(f"{finding.level:<8} {finding.what:<14} {one_line(finding.text)}\n")
            sys.stdout.flush()
            findings.append(finding)
    return int(any(finding.level == "error" for finding in findings))


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What breaks here would break in a run, and must not hide the other lines."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - libraries of this machine raise whatever they like
        yield Finding("error", check.__name__, f"{type(error).__name__}: {error}")


def packages() -> Iterator[Finding]:
    """Python and the versions that setup.py asks for."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    yield Finding("ok", "megatron-rl", f"{megatron_rl.__version__} in {Path(megatron_rl.__file__).parent}")
    try:
        installed = distribution("megatron-rl")
    except PackageNotFoundError:
        text = "megatron-rl is not installed, so versions are not compared; pip install ."
        yield Finding("warning", "packages", text)
        return
    wanted = installed.metadata["Requires-Python"]
    fits = SpecifierSet(wanted).contains(platform.python_version())
    yield Finding("ok", "python", platform.python_version()) if fits else Finding(
        "error", "python", f"{platform.python_version()} is not {wanted}; make the environment with one that is"
    )
    good = 0
    for line in installed.requires or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        fault = _misfit(requirement)
        if fault is None:
            good += 1
            continue
        level = "warning" if requirement.name in OPTIONAL else "error"
        yield Finding(level, requirement.name, f"{fault}; pip install '{requirement.name}{requirement.specifier}'")
    yield Finding("ok", "packages", f"{good} have the versions that setup.py asks for")


def _misfit(requirement: object) -> str | None:
    try:
        there = version(requirement.name)
    except PackageNotFoundError:
        return "is not installed"
    fits = requirement.specifier.contains(there, prereleases=True)
    return None if fits else f"{there} is installed, {requirement.specifier} is needed"


def devices() -> Iterator[Finding]:
    """torch, GPUs, and what ranks talk through."""
    import torch
    import torch.distributed as dist

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    yield Finding("ok", "torch", f"{torch.__version__}, built for {built_for}")
    has_driver = Path("/dev/nvidia0").exists()
    if not torch.cuda.is_available():
        if has_driver:
            advice = "install the driver for it" if torch.version.cuda else "install torch built for CUDA"
            yield Finding("error", "cuda", f"there is a GPU that torch cannot use; {advice}")
        else:
            yield Finding("ok", "cuda", "no GPU: runs use the CPU, which is for trying things out")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{facts.name}, {facts.major}.{facts.minor}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        yield _fine_if(free >= 0.9 * total, f"gpu {index}", text, "nvidia-smi says who has the rest")
    if torch.cuda.is_available():
        if dist.is_nccl_available():
            yield Finding("ok", "nccl", ".".join(map(str, torch.cuda.nccl.version())))
        else:
            yield Finding("error", "nccl", "this torch has none, so GPUs cannot talk; install torch built for CUDA")
    if not dist.is_gloo_available():
        yield Finding("error", "gloo", "this torch has none, and ranks talk through it; install another build")


def kernels() -> Iterator[Finding]:
    """Attention kernels, tried against plain torch."""
    import torch

    from megatron_rl.models.attention.backend import Requirements
    from megatron_rl.models.attention.selection import facts_of, fault_of_cache, fault_of_packed
    from megatron_rl.platform import current_platform
    from megatron_rl.registry import BACKENDS

    device = current_platform().device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = Requirements(dtype, dtype, 64), 4, 2, device
    for name in BACKENDS.names():
        backend = BACKENDS.get(name)
        absent = backend.problem(facts_of(device))
        if absent is not None:
            yield Finding("ok", f"{name}", f"not used: {absent}")
            continue
        parts = [fault_of_packed(backend.packed, *shape)] if backend.packed is not None else []
        if backend.cache is not None and backend.cache.layout == "blocks":
            parts.append(fault_of_cache(backend.cache, *shape))
        fault = next(filter(None, parts), None)
        yield Finding("ok", name, "attention agrees with plain torch") if fault is None else Finding(
            "warning", name, f"{fault}; --attention-backend auto passes it over"
        )
    if device.type == "cuda":
        import triton  # a run on GPUs has kernels of ours

        yield Finding("ok", "triton", triton.__version__)
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        level = "error" if device.type == "cuda" else "warning"
        yield Finding(level, "compiler", "there is no C compiler, which Triton needs; apt-get install gcc")


def machine() -> Iterator[Finding]:
    """Memory, disk, files."""
    memory = psutil.virtual_memory()
    yield _enough("memory", memory.available, 4 * GIB, "end other programs, or take a larger machine")
    yield _enough("disk", shutil.disk_usage(".").free, 10 * GIB, "checkpoints go here; --run-dir names another place")
    scratch = Path(tempfile.gettempdir())
    yield _enough("temporary", shutil.disk_usage(scratch).free, GIB, f"make room in {scratch}, or set TMPDIR")
    shared = Path("/dev/shm")
    if shared.is_dir():
        advice = "ranks of one machine exchange data there; start the container with --ipc=host or --shm-size=16g"
        yield _enough("shared memory", shutil.disk_usage(shared).free, GIB, advice)
    if not os.access(".", os.W_OK):
        yield Finding("warning", "directory", f"{Path.cwd()} cannot be written; give --run-dir elsewhere")
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _fine_if(files >= FEWEST_FILES, "open files", f"{files} at most", f"ulimit -n {most}")


def _enough(what: str, found: int, wanted: int, advice: str) -> Finding:
    return _fine_if(found >= wanted, what, f"{found / GIB:.1f} GiB free", advice)


def _fine_if(is_fine: bool, what: str, text: str, advice: str) -> Finding:
    return Finding("ok", what, text) if is_fine else Finding("warning", what, f"{text}; {advice}")


def network() -> Iterator[Finding]:
    """What ranks and the environment server listen on."""
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
