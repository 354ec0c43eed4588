"""Whole runs, as a user starts them, in as few processes as possible.

A first run in a process takes longer than the next ones: commands that may share a process are given to `run_many`
together. Where a fresh process matters (a resume), call it twice.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.forks import Fork
from tests.support.ranks import free_port, rank_environment

TINY: dict[str, Any] = {
    "num-layers": 2, "hidden-size": 32, "ffn-hidden-size": 64, "num-attention-heads": 4,
    "group-query-attention": True, "num-query-groups": 2, "swiglu": True, "disable-bias-linear": True,
    "add-qkv-bias": True, "untie-embeddings-and-output-weights": True, "seq-length": 48,
    "make-vocab-size-divisible-by": 8, "init-method-std": 0.2, "embedding-init-method-std": 0.5,
    "lr": 1e-2, "min-lr": 1e-3, "train-iters": 4,
}  # fmt: skip
RL: dict[str, Any] = {
    "perform-rl-step": True, "grpo-group-size": 4, "grpo-prompts-per-step": 4, "rl-max-new-tokens": 16,
    "micro-batch-size": 2,
}  # fmt: skip
LIST, KEPT_SERVERS = "--langrl-env-config", 3
SUPERVISED: dict[str, Any] = {"global-batch-size": 8, "micro-batch-size": 2}


@dataclass(frozen=True)
class Outcome:
    """How a run ended, on every rank."""

    codes: tuple[int, ...]
    output: str
    """What the ranks wrote, one after the other."""

    def check(self, code: int = 0) -> Outcome:
        """Fails the test, with the output, unless every rank ended with ``code``."""
        assert set(self.codes) == {code}, f"exit codes {self.codes}:\n{self.output[-8000:]}"
        return self


def command(flags: Mapping[str, Any]) -> list[str]:
    """``{"lr": 1, "swiglu": True, "seed": None}`` -> ``--lr 1 --swiglu``."""
    argv: list[str] = []
    for name, value in flags.items():
        if value is not None and value is not False:
            argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return argv


def run_many(
    commands: Sequence[Sequence[str]], ranks: int = 1, timeout: float = 600.0, largest_file: int | None = None
) -> list[Outcome]:
    """Run ``train_rl.py`` with each argument list, one after the other, in one process a rank.

    A list that begins with the path of a script, ``tools/x.py``, runs that one's ``main``, on rank 0 alone.
    ``largest_file``: bytes that a file can have, as of ``ulimit -f``; what is written beyond fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"commands": [list(argv) for argv in commands], "shared": served_lists(commands)}))
        argv = ["-m", "tests.support.runs", str(job)]
        started = []
        for rank in range(ranks):
            with (Path(folder) / f"start.{rank}.log").open("wb") as log:
                environment = rank_environment(rank, ranks, 0)
                started.append(Fork(argv, environment, log, log, rank, largest_file=largest_file))
        try:
            for process in started:
                process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"the runs hang:\n{_written(folder)}") from error
        finally:
            for process in started:
                process.kill()
                process.wait()
        return [_outcome(Path(folder), index, ranks) for index in range(len(commands))]


def run(argv: Sequence[str], ranks: int = 1, timeout: float = 600.0) -> Outcome:
    """One run in a fresh process a rank."""
    return run_many([argv], ranks, timeout)[0]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what depends on the clock, or on what became of the environment server."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("environment/", "engine/", "timing_s/", "perf/throughput", "perf/rollout_")
    return [
        {name: value for name, value in row.items() if name != "time" and not name.startswith(timed)} for row in rows
    ]


def facts_of(run_dir: Path) -> dict[str, Any]:
    """``run.json``."""
    return json.loads((run_dir / "run.json").read_text())


def copy_as_of(step: int, whole: Path, copy: Path) -> None:
    """``copy`` is the run ``whole`` as a kill after its save of ``step`` would have left it, with nothing later."""
    shutil.copytree(whole, copy)
    for later in [*copy.glob("checkpoints/step_*"), *copy.glob("checkpoints/iter_*"), *copy.glob("rollouts/step_*")]:
        if int(later.stem.partition("_")[2]) > step:
            shutil.rmtree(later) if later.is_dir() else later.unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    (copy / "run.json").write_text(json.dumps(facts_of(whole) | {"status": "running"}))


def _outcome(folder: Path, index: int, ranks: int) -> Outcome:
    codes, texts = [], []
    for rank in range(ranks):
        code, log = folder / f"{index}.{rank}.code", folder / f"{index}.{rank}.log"
        if not log.exists():
            log = folder / f"start.{rank}.log"
        codes.append(int(code.read_text()) if code.exists() else -1)
        texts.append(log.read_text(errors="replace"))
    return Outcome(tuple(codes), "".join(texts))


def _written(folder: str) -> str:
    return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(Path(folder).glob("*.log")))


_SERVERS: dict[tuple[str, frozenset[tuple[str, str]]], Any] = {}
"""By list and environment variables, the one that was used last at the end."""


def served_lists(commands: Sequence[Sequence[str]]) -> dict[str, str]:
    """By its text, where a list of environments that the commands name is served, to all runs of this process.

    A list with paths is served by each run's process alone, as is one with options of the server.
    """
    from megatron_rl.environments.process import EnvironmentServerProcess
    from megatron_rl.errors import EnvironmentFault

    found: dict[str, str] = {}
    variables = frozenset(item for item in os.environ.items() if not item[0].startswith("PYTEST_"))
    for listed in {Path(words[1]) for argv in commands for words in pairwise(argv) if words[0] == LIST}:
        text = listed.read_text() if listed.is_file() else "/"
        if "/" in text or ".py" in text:
            continue
        server = _SERVERS.pop((text, variables), None)
        if server is None or server.fault is not None:
            folder = Path(tempfile.mkdtemp(prefix="served_"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            shutil.copyfile(listed, folder / "list.yaml")
            server = EnvironmentServerProcess(folder / "list.yaml", folder)
            try:
                server.__enter__()
            except EnvironmentFault:  # each run shall say so
                continue
            atexit.register(server.__exit__)
        _SERVERS[text, variables] = server
        found[text] = str(server.address_file)
    for key in list(_SERVERS)[: -max(len(found), KEPT_SERVERS)]:
        _SERVERS.pop(key).__exit__()
    return found


def _main(job: Path) -> None:
    """What each rank's process does."""
    with shared_environments(json.loads(job.read_text())["shared"]):
        _run_all(job)


@contextlib.contextmanager
def shared_environments(given: Mapping[str, str]) -> Iterator[None]:
    """Let the commands of this process share servers and surveys of their lists: with all that have ``given``, too."""
    from megatron_rl.run.preflight import inputs

    # It costs a Python process: the commands share what was found in a list that they share.
    inputs.survey_list = functools.cache(functools.partial(_survey, inputs.survey_list, given))
    with _shared_servers(given):
        yield


def _survey(survey: Any, given: Mapping[str, str], path: str | Path, *seconds: float, demonstrations: bool) -> Any:
    """What ``survey`` finds, kept beside the list's server if that is shared."""
    from megatron_rl.environments.loading import Surveyed

    text = Path(path).read_text() if Path(path).is_file() else ""
    if text not in given:
        return survey(path, *seconds, demonstrations=demonstrations)
    kept = Path(given[text]).with_name(f"surveyed.{demonstrations}.json")
    if not kept.exists():
        found = survey(path, *seconds, demonstrations=demonstrations)
        written = kept.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps([asdict(each) for each in found]))
        written.replace(kept)
    return [Surveyed.from_json(row) for row in json.loads(kept.read_text())]


def _run_all(job: Path) -> None:
    rank = os.environ["RANK"]
    for index, argv in enumerate(json.loads(job.read_text())["commands"]):
        with (job.parent / f"{index}.{rank}.log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        code = -1
        try:
            code = _script(argv) if argv[0].endswith(".py") else _train(argv, job.parent / f"{index}.port")
        except Exception:  # noqa: BLE001 - what a user would see as a traceback
            traceback.print_exc()
        gc.collect()  # process groups hold sockets until then: dozens of runs would have thousands of descriptors
        gc.freeze()  # what is left stays, as imported modules and caches do: the next collection need not visit it
        sys.stdout.flush()
        (job.parent / f"{index}.{rank}.code").write_text(str(code))


@contextlib.contextmanager
def _shared_servers(given: Mapping[str, str]) -> Iterator[None]:
    """Let commands that name the same list share its server: starting one takes as long as a short run."""
    from megatron_rl.environments.child import HARNESS_PROCESSES, LOAD_SECONDS
    from megatron_rl.run import environments

    start, count, started = environments.EnvironmentServerProcess, environments.EnvironmentCounters, {}
    usual = {"port": 0, "start_timeout": LOAD_SECONDS, "harness_processes": HARNESS_PROCESSES}

    @contextlib.contextmanager
    def shared(config_path: str, directory: Path, **options: Any) -> Iterator[Any]:
        listed = Path(config_path)
        text = listed.read_text() if listed.is_file() else ""
        key = (config_path, text, *options.items())
        if text in given and options == usual:
            server = SimpleNamespace(address_file=Path(given[text]), restarts=0)
        else:
            if key not in started or started[key].fault is not None:
                started[key] = start(config_path, directory, **options).__enter__()
            server = started[key]
        address = Path(os.path.realpath(directory)) / "environment_server.json"
        if address == server.address_file:
            yield server
            return
        address.parent.mkdir(parents=True, exist_ok=True)
        address.unlink(missing_ok=True)  # of a run that was killed
        address.symlink_to(server.address_file)
        try:
            yield server
        finally:
            address.unlink()

    def counted(*server: Any) -> Any:
        counters = count(*server)
        counters.since_last_call()
        return counters

    environments.EnvironmentServerProcess, environments.EnvironmentCounters = shared, counted
    yield
    for server in started.values():
        server.__exit__()


def _train(argv: list[str], agreed: Path) -> int:
    from megatron_rl.main import main

    _agree_on_a_port(agreed)
    return main(["train_rl.py", *argv])


def _script(argv: list[str]) -> int:
    return runpy.run_path(argv[0])["main"](argv[1:]) if os.environ["RANK"] == "0" else 0


def _agree_on_a_port(agreed: Path) -> None:
    """Rank 0 chooses at the last moment: a port that is free now may be taken in a minute. Alone, none is needed."""
    if os.environ["WORLD_SIZE"] == "1":
        os.environ.pop("MASTER_PORT", None)
        return
    if os.environ["RANK"] == "0":
        written = agreed.with_suffix(".tmp")
        written.write_text(str(free_port()))
        written.replace(agreed)
    while not agreed.exists():
        time.sleep(0.01)
    os.environ["MASTER_PORT"] = agreed.read_text()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))


def records_of(path: Path) -> list[dict[str, Any]]:
    """The samples in a file of ``rollouts/``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
