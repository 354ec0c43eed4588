"""Runs in which memory runs out where a test says; one process a rank for all of them."""

from __future__ import annotations

import contextlib
import gc
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ON_A_GPU = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
_HUGE = 2**60
"""Bytes that no machine has."""


def failing_runs(runs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Of every ``(argv, where, call)`` the exit code and what this rank wrote.

    ``where`` is ``rollout`` (the engine is given a group and raises as CUDA's allocator would), ``loss`` or
    ``optimizer`` (the host's allocator refuses); it fails on rank 0 the ``call``-th time.
    """
    if os.environ["WORLD_SIZE"] == "1":
        os.environ.pop("MASTER_PORT")  # alone it is not needed, and a second run would find it in use
    outcomes = []
    for argv, where, call in runs:
        with _failing(where, call):
            outcomes.append(_run(argv))
    return outcomes


@contextlib.contextmanager
def _failing(where: str, call: int) -> Iterator[None]:
    from megatron.core.optimizer import ChainedOptimizer

    from megatron_rl.algorithms.objective import PolicyObjective
    from megatron_rl.inference.rollout_engine import RolloutEngine

    owner, name, fail = {
        "rollout": (RolloutEngine, "submit", _as_on_a_gpu),
        "loss": (PolicyObjective, "__call__", _on_the_host),
        "optimizer": (ChainedOptimizer, "step_with_ready_grads", _on_the_host),
    }[where]
    original = getattr(owner, name)
    setattr(owner, name, _counted(original, call, fail))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _counted(original: Callable[..., Any], call: int, fail: Callable[[], None]) -> Callable[..., Any]:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call and os.environ["RANK"] == "0":
            fail()
        return original(*args, **kwargs)

    return counted


def _as_on_a_gpu() -> None:
    raise torch.OutOfMemoryError(ON_A_GPU)


def _on_the_host() -> None:
    torch.empty(_HUGE, dtype=torch.uint8)


def _run(argv: Sequence[str]) -> list[Any]:
    from megatron_rl.main import main

    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        code = main(["train_rl.py", *argv])
    return [code, output.getvalue()]


def watched_runs(runs: Sequence[Sequence[str]], tight: bool) -> list[dict[str, Any]]:
    """Of every ``argv``: what is alive at the end of each step.

    ``tight``: the KV cache finds no room beside training, and goes after every rollout.
    """
    os.environ.pop("MASTER_PORT")
    return [_watched(argv, tight) for argv in runs]


def _watched(argv: Sequence[str], tight: bool) -> dict[str, Any]:
    from megatron_rl.run.memory.phases import Phases
    from megatron_rl.run.reporting import Reporter

    report, hold = Reporter.step, Phases.hold
    steps: list[dict[str, int]] = []
    caches: list[Any] = []

    def counted(self: Reporter, *args: Any) -> None:
        report(self, *args)
        steps.append(alive())

    def held(self: Phases, *given: Any) -> Any:
        residency = hold(self, *given)
        residency.training_need = _HUGE if tight else 0
        caches.append(residency)
        return residency

    Reporter.step, Phases.hold = counted, held
    try:
        code, output = _run(argv)
    finally:
        Reporter.step, Phases.hold = report, hold
    (residency,) = caches
    found = {"code": code, "output": output, "generation": residency.generation, "steps": steps}
    found["released"] = residency.is_released
    return found


def alive() -> dict[str, int]:
    """Tensors that Python knows, the bytes behind them, and the process's resident bytes."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return {
        "tensors": len(tensors),
        "bytes": sum(storages.values()),
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
    }
