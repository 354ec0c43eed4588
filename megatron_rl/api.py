"""What the command does, for Python: `megatron_rl.train`, `evaluate` and `generate`.

    import megatron_rl

    summary = megatron_rl.train({"load_hf": "Qwen/Qwen2.5-0.5B-Instruct", "perform_rl_step": True, ...}, nproc=8)
    texts = megatron_rl.generate(summary.run_dir, ["What is 2 + 3?"], temperature=0.7)

Flags are those of the command, as its words or as a mapping; names may have underscores. Call from the main thread: as
in the command, Ctrl-C saves and stops.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.cli.model import model_config
from megatron_rl.cli.options import Ranks
from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import all_flags
from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.main import NO_UPDATE, every_problem, main
from megatron_rl.metrics.jsonl import read_json_object
from megatron_rl.metrics.rundir import RunDirectory

Flags = Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    run_dir: Path
    status: str
    """``finished`` or ``stopped``."""
    steps: int
    updates: int
    evaluation: Mapping[str, Mapping[str, float]]
    """``before`` and ``after``: measure -> mean over environments; empty without an evaluation."""
    values: Mapping[str, Any]
    """All of ``summary.json``."""


def train(flags: Flags, nproc: int = 1) -> Summary:
    """Train on ``nproc`` ranks of this machine; with 1, in this process.

    Raises:
        ConfigError: every problem of the flags, before anything is started.
        MegatronRLError: the run failed; says why, and where its record is.
    """
    words = _words(flags)
    config, problems = read_config(words, nproc)
    if found := every_problem(config, problems, nproc):
        raise ConfigError(found)
    directory = RunDirectory(Path(config.logging.run_dir))
    with _handlers_kept():
        code = _run(words, nproc)
    if code not in (0, NO_UPDATE):
        why = directory.read_facts().get("error", f"exit code {code}")
        raise MegatronRLError(f"the run in {directory.path} failed: {why}")
    values = read_json_object(directory.summary)
    if not values:
        raise MegatronRLError(f"the run in {directory.path} was stopped before it began")
    return Summary(
        directory.path, values["status"], values["steps"], values["updates"], values.get("eval", {}), values
    )


def evaluate(flags: Flags, nproc: int = 1) -> Summary:
    """Evaluate the weights of ``load``, ``pretrained_checkpoint`` or ``load_hf``; see `train`."""
    return train([*_words(flags), "--eval-only"], nproc)


def generate(
    model: str | Path, prompts: Sequence[str | Sequence[Mapping[str, str]]], *, raw: bool = False, **flags: Any
) -> list[str]:
    """One answer to each of ``prompts``, in this process.

    Args:
        model: a Hugging Face directory or name, a run directory, or a checkpoint.
        prompts: what a user says, or chat messages.
        raw: texts are the beginning of what the model goes on with.
        flags: ``temperature``, ``top_p``, ``top_k``, ``max_new_tokens``, and those of a run.

    Raises:
        ConfigError: every problem of the model, the flags and the prompts.
    """
    config = model_config(str(model), _words(flags), world_size=1, at_once=max(1, min(64, len(prompts))))
    from megatron_rl.generation import as_prompt, open_generator  # imports torch, which wrong flags need not wait for

    with open_generator(config) as generator:
        texts = [prompt if raw else as_prompt(generator.tokenizer, prompt) if isinstance(prompt, str) else tuple(prompt)
                 for prompt in prompts]  # fmt: skip
        return [answer.text for answer in generator.answers(texts)]


def _run(words: Sequence[str], nproc: int) -> int:
    if nproc == 1:
        return main(["megatron_rl.train", *words], is_checked=True)
    from megatron_rl.cli.launch import launch

    command = ["megatron-rl", "train", "--nproc", str(nproc), *words]
    return launch(Ranks(nproc=nproc), "megatron_rl.cli.train:rank", words, command)


def _words(flags: Flags) -> list[str]:
    if not isinstance(flags, Mapping):
        return [str(word) for word in flags]
    known = {text: (flag, on) for flag in all_flags() for text, on in flag.spellings.items()}
    words: list[str] = []
    for name, value in flags.items():
        spelling = name.replace("_", "-")
        flag, on = known.get(spelling, (None, True))
        if value is None:
            continue
        if flag is not None and flag.kind is bool:
            words.append(flag.typed(value == on))
        else:  # also a short name, or one that gets the usual hint
            many = isinstance(value, list | tuple)
            words += [f"--{spelling}", *map(str, value if many else (value,))]
    return words


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """A run installs its own, see `megatron_rl.signals`."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    earlier = [(number, signal.getsignal(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in earlier:
            signal.signal(number, handler)
