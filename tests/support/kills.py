"""Runs that are killed at a named moment and started again.

A rank that dies takes the others along, as it does under torchrun.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.forks import Fork
from tests.support.ranks import free_port, rank_environment
from tests.support.runs import served_lists, shared_environments

KILLED = -signal.SIGKILL
MARK = "TESTS_KILLS_FOLDER"
"""A variable that every process a rank starts inherits."""


@dataclass(frozen=True)
class Kill:
    """Rank ``rank`` dies the ``nth`` time it comes to ``point``, or after ``seconds``."""

    rank: int = 0
    point: str = ""
    nth: int = 1
    seconds: float = 0.0


@dataclass(frozen=True)
class Story:
    """A run that is launched until it ends by itself: once with each kill, then without."""

    name: str
    argv: Sequence[str]
    kills: Sequence[Kill] = ()
    omit: str = ""
    """An item of the saved state that every launch forgets: the negative control."""


def tell(
    stories: Sequence[Story], folder: Path, ranks: int, timeout: float, own_servers: bool = False
) -> dict[str, list[list[int]]]:
    """The exit codes of every launch of each story, rank by rank; output goes to ``folder``.

    ``own_servers``: each launch starts its environment server, as a run of a user does, and takes it along.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shared = {} if own_servers else served_lists([story.argv for story in stories])
    end = time.monotonic() + timeout
    codes: dict[str, list[list[int]]] = {}
    for story in stories:
        codes[story.name] = []
        for number, kill in enumerate([*story.kills, None]):
            launched = _launch(story, kill, ranks, folder / f"{story.name}.{number}", end, shared)
            codes[story.name].append(launched)
            if launched == [0] * ranks:
                break  # it came to its end before the kill
    return codes


def _launch(
    story: Story, kill: Kill | None, ranks: int, log: Path, end: float, shared: Mapping[str, str]
) -> list[int]:
    port = free_port()
    jobs = [[list(story.argv), asdict(kill) if kill and kill.rank == rank else None, story.omit, shared]
            for rank in range(ranks)]  # fmt: skip
    forks = [_start(job, rank, ranks, port, log) for rank, job in enumerate(jobs)]
    deadline = time.monotonic() + kill.seconds if kill is not None and kill.seconds else None
    try:
        while None in (codes := [fork.poll() for fork in forks]):
            assert time.monotonic() < end, f"{story.name} hangs at {kill}, see {log}.*"
            late = deadline is not None and time.monotonic() > deadline
            if late:
                forks[kill.rank].kill()
                deadline = None
            elif any(codes):  # of None and 0
                _kill(forks)
            time.sleep(0.005)
    finally:
        _kill(forks)
    return [fork.wait() for fork in forks]


def _kill(forks: Sequence[Fork]) -> None:
    for fork in forks:
        fork.kill()


def _start(job: list[Any], rank: int, ranks: int, port: int, log: Path) -> Fork:
    environment = rank_environment(rank, ranks, port) | {MARK: str(log.parent)}
    with log.with_name(f"{log.name}.{rank}.log").open("wb") as stream:
        return Fork(["-m", "tests.support.kills", json.dumps(job)], environment, stream, stream, rank)


def points() -> dict[str, tuple[Any, str, str]]:
    """Name -> owner, attribute, and whether death comes ``before`` or ``after`` it."""
    import megatron_rl.checkpoint.layout as layout
    import megatron_rl.checkpoint.manager as manager
    from megatron_rl.algorithms.objective import PolicyObjective
    from megatron_rl.environments.client import EnvironmentClient
    from megatron_rl.inference.rollout_engine import RolloutEngine
    from megatron_rl.metrics.jsonl import JsonlWriter
    from megatron_rl.rollout.evaluation import Evaluator
    from megatron_rl.rollout.journal import RolloutJournal, StepJournal
    from megatron_rl.run.reporting import Reporter
    from megatron_rl.trainer.batches import BatchBuilder
    from megatron_rl.trainer.optimizer import Optimization
    from megatron_rl.trainer.samples import SampleBuilder

    return {
        "rollout": (RolloutEngine, "_postprocess", "after"),
        "grade_asked": (EnvironmentClient, "grade", "before"),
        "journal_written": (StepJournal, "add", "after"),
        "journal_closed": (StepJournal, "close", "after"),
        "advantages": (SampleBuilder, "build", "before"),
        "packed": (BatchBuilder, "updates", "after"),
        "loss": (PolicyObjective, "__call__", "after"),
        "optimizer_due": (Optimization, "step", "before"),
        "optimizer_done": (Optimization, "step", "after"),
        "records": (Reporter, "records", "before"),
        "evaluation": (Evaluator, "evaluate", "after"),
        "metrics_row": (JsonlWriter, "write", "torn"),
        "save_begun": (manager, "save_tensors", "before"),
        "save_tensors": (manager, "save_tensors", "after"),
        "save_state": (manager, "write_run_state", "after"),
        "save_listed": (layout, "write_manifest", "after"),
        "save_renamed": (layout, "write_text_atomic", "before"),
        "save_committed": (manager, "commit", "after"),
        "journal_forgotten": (RolloutJournal, "forget", "after"),
    }


def stage_points() -> dict[str, tuple[Any, str, str]]:
    """Of a micro-batch on a pipeline stage, amid a step."""
    import megatron.core.pipeline_parallel.schedules as schedules

    return {
        "stage_forward": (schedules, "forward_step", "after"),
        "stage_backward": (schedules, "backward_step", "before"),
    }


def harness_points() -> dict[str, tuple[Any, str, str]]:
    """Of a sample whose harness calls the model."""
    from megatron_rl.rollout.harnesses import Harnesses

    return {"call_answered": (Harnesses, "add_answer", "after"), "sample_ended": (Harnesses, "_end", "after")}


def background_points() -> dict[str, tuple[Any, str, str]]:
    """The same of a save in the background."""
    import megatron_rl.checkpoint.manager as manager
    from megatron_rl.checkpoint.saving import BackgroundSave

    return {
        "background_planned": (manager, "save_tensors", "after"),
        "background_forked": (BackgroundSave, "__init__", "after"),
        "background_written": (BackgroundSave, "begin_to_commit", "before"),
        "background_committing": (manager, "commit", "before"),
    }


def arm(kill: Kill, owner: Any, attribute: str, moment: str) -> None:
    """From now on the ``nth`` call is the last thing this process does."""
    original, calls = getattr(owner, attribute), 0

    @functools.wraps(original)
    def last(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == kill.nth and moment == "torn":
            with given[0].path.open("ab") as metrics:
                metrics.write(b'{"step": 3, "ti')
        if calls == kill.nth and moment != "after":
            _die()
        result = original(*given, **named)
        if calls == kill.nth:
            _die()
        return result

    setattr(owner, attribute, last)


def forget(item: str) -> None:
    """From now on a resume does without ``item``: ``optimizer``, a component's state, or one field of it."""
    from megatron_rl.checkpoint import tensors
    from megatron_rl.checkpoint.state import StateRegistry

    if item == "optimizer":
        load = tensors.load
        tensors.load = lambda directory, policy, _, critic: load(directory, policy, critic=critic)
        return
    component, _, field = item.partition(".")
    register = StateRegistry.register

    def forgetful(self: StateRegistry, name: str, owner: Any, **how: bool) -> Any:
        blank = owner.state_dict()
        register(self, name, owner, **how)
        if name == component:
            owner.load_state_dict({**owner.state_dict(), field: blank[field]} if field else blank)
        return owner

    StateRegistry.register = forgetful


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _main() -> int:
    """What each rank's process does."""
    from megatron_rl.main import main

    argv, kill, omit, shared = json.loads(sys.argv[1])
    if kill and kill["point"]:
        arm(Kill(**kill), *(points() | stage_points() | harness_points() | background_points())[kill["point"]])
    if omit:
        forget(omit)
    with shared_environments(shared):
        return main(["train_rl.py", *argv])


def random_kills(count: int, ranks: int, longest: float, seed: int) -> list[Kill]:
    """Kills after random times, up to ``longest`` seconds after the launch."""
    draw = random.Random(seed)
    return [Kill(draw.randrange(ranks), seconds=draw.uniform(0.05, longest)) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(_main())
