"""What the command does, for Python: `megatron_rl.train`, `steps`, `evaluate` and `generate`.

    import megatron_rl

    summary = megatron_rl.train({"load_hf": "Qwen/Qwen2.5-0.5B-Instruct", "perform_rl_step": True, ...}, nproc=8)
    texts = megatron_rl.generate(summary.run_dir, ["What is 2 + 3?"], temperature=0.7)
    for number, metrics in megatron_rl.steps(config="run.yaml", lr=1e-6): ...

Flags are those of the command, as its words or as a mapping; names may have underscores. Call from the main thread: as
in the command, Ctrl-C saves and stops.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.callbacks import Callback, RunControl
from megatron_rl.cli.model import model_config
from megatron_rl.cli.options import Ranks
from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import all_spellings
from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.main import NO_UPDATE, every_problem, main
from megatron_rl.metrics.jsonl import read_json_object
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.signals import StopRequest

Flags = Sequence[str] | Mapping[str, Any]
_ONE_PROCESS = "callbacks and steps() are for one process; with several name classes: --callbacks file.py:Class"


@dataclass(frozen=True)
class Summary:
    """The result of a run."""

    run_dir: Path
    status: str
    """``finished`` or ``stopped``."""
    steps: int
    updates: int
    evaluation: Mapping[str, Mapping[str, float]]
    """``before`` and ``after``: measure -> mean over environments; empty without an evaluation."""
    values: Mapping[str, Any]
    """All of ``summary.json``."""


class Step(NamedTuple):
    """A finished step of `steps`; what is added to ``metrics``, or changed, is logged."""

    number: int
    metrics: dict[str, float]


def train(flags: Flags, nproc: int = 1, callbacks: Sequence[Callback] = ()) -> Summary:
    """Train on ``nproc`` ranks of this machine; with 1, in this process, where it calls ``callbacks``.

    Raises:
        ConfigError: every problem of the flags, before anything is started.
        MegatronRLError: the run failed; says why, and where its record is.
    """
    if callbacks and nproc > 1:
        raise ConfigError([_ONE_PROCESS])
    words = _words(flags)
    directory = _checked(words, nproc)
    if nproc == 1:
        for _ in _stepped(words, directory, callbacks):
            pass
    else:
        from megatron_rl.cli.launch import launch

        command = ["megatron-rl", "train", "--nproc", str(nproc), *words]
        _check_code(launch(Ranks(nproc=nproc), "megatron_rl.cli.train:rank", words, command), directory)
    values = read_json_object(directory.summary)
    if not values:
        raise MegatronRLError(f"the run in {directory.path} was stopped before it began")
    return Summary(directory.path, values["status"], values["steps"], values["updates"], values.get("eval", {}), values)


def steps(flags: Flags = (), *, callbacks: Sequence[Callback] = (), **more: Any) -> Iterator[Step]:
    """Train in this process and yield after each step; the run waits while the loop's body runs.

    Leaving the loop, also by an error, ends the run: the step is logged and saved. So does Ctrl-C. Flags of ``more``
    come after ``flags``. Raises as `train`, a failed run out of the loop.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError([_ONE_PROCESS])
    words = [*_words(flags), *_words(more)]
    return _stepped(words, _checked(words, nproc=1), callbacks)


def evaluate(flags: Flags, nproc: int = 1) -> Summary:
    """Evaluate the weights of ``load``, ``pretrained_checkpoint`` or ``load_hf``; see `train`."""
    return train([*_words(flags), "--eval-only"], nproc)


def generate(
    model: str | Path, prompts: Sequence[str | Sequence[Mapping[str, str]]], *, raw: bool = False, **flags: Any
) -> list[str]:
    """Generate one answer to each of ``prompts``, in this process.

    Args:
        model: a Hugging Face directory or name, a run directory, or a checkpoint.
        prompts: what a user says, or chat messages.
        raw: texts are the beginning of what the model goes on with.
        flags: ``temperature``, ``top_p``, ``top_k``, ``max_new_tokens``, and those of a run.

    Raises:
        ConfigError: every problem of the model, the flags and the prompts.
    """
    chats = [prompt for prompt in prompts if not (raw and isinstance(prompt, str))]
    config = model_config(str(model), _words(flags), 1, max(1, min(64, len(prompts))), chats)
    from megatron_rl.generation import as_prompt, open_generator  # imports torch, which wrong flags need not wait for

    with open_generator(config) as generator:
        texts = [prompt if raw else as_prompt(generator.tokenizer, prompt) if isinstance(prompt, str) else tuple(prompt)
                 for prompt in prompts]  # fmt: skip
        return [answer.text for answer in generator.answers(texts)]


def _checked(words: Sequence[str], nproc: int) -> RunDirectory:
    """Return where the run of ``words`` writes; ``ConfigError`` has everything that is wrong with them."""
    config, problems = read_config(words, nproc)
    if found := every_problem(config, problems, nproc):
        raise ConfigError(found)
    return RunDirectory(Path(config.logging.run_dir))


def _check_code(code: int, directory: RunDirectory) -> None:
    if code not in (0, NO_UPDATE):
        why = directory.read_facts().get("error", f"exit code {code}")
        raise MegatronRLError(f"the run in {directory.path} failed: {why}")


class _Turns(Callback):
    """Gives each step to another thread, and waits for that thread before the next one."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop, self.goes_on = stop, threading.Semaphore(0)
        self.finished: queue.SimpleQueue[Step | None] = queue.SimpleQueue()  # None when the run has ended

    def on_step(self, run: RunControl, step: int, metrics: dict[str, float]) -> None:
        self.finished.put(Step(step, metrics))
        while not self.goes_on.acquire(timeout=1.0):
            if self._stop.requested or not threading.main_thread().is_alive():  # asking tells the watchdog: no hang
                return run.stop("the process ends")


def _stepped(words: Sequence[str], directory: RunDirectory, callbacks: Sequence[Callback]) -> Iterator[Step]:
    """See `steps`. A thread of its own keeps the run's event loop apart from that of a notebook."""
    stop, code = StopRequest(), Future()
    turns = _Turns(stop)

    def run() -> None:
        try:
            code.set_result(main(["megatron_rl.steps", *words], None, None, True, [*callbacks, turns], stop))
        except BaseException as error:  # noqa: BLE001  (raised again where the steps are waited for)
            code.set_exception(error)
        finally:
            turns.finished.put(None)

    with _caught(stop):
        threading.Thread(target=run, name="megatron-rl").start()
        try:
            for step in iter(turns.finished.get, None):
                yield step
                turns.goes_on.release()
        finally:
            stop.ask("the loop over its steps was left")
            turns.goes_on.release()
            _check_code(code.result(), directory)


def _words(flags: Flags) -> list[str]:
    if not isinstance(flags, Mapping):
        return [str(word) for word in flags]
    known = all_spellings()
    words: list[str] = []
    for name, value in flags.items():
        spelling = name.replace("_", "-")
        flag, on = known.get(spelling, (None, True))
        if value is None:
            continue
        if flag is not None and flag.kind is bool:
            words.append(flag.typed(value == on))
        elif isinstance(value, bool):  # of a switch without effect
            words.append(f"--{spelling}" if value else f"--no-{spelling}")
        else:  # also a short name, or one that gets the usual hint
            many = isinstance(value, list | tuple)
            words += [f"--{spelling}", *map(str, value if many else (value,))]
    return words


@contextlib.contextmanager
def _caught(stop: StopRequest) -> Iterator[None]:
    """Take signals as requests to stop, if this thread may, and give them back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    earlier = [(number, signal.getsignal(number)) for number in numbers]
    stop.catch()
    try:
        yield
    finally:
        for number, handler in earlier:
            signal.signal(number, handler)
