"""CPU seconds of a whole GRPO step: ours against TRL's GRPOTrainer.

    python tools/benchmark/step.py --against trl --json FILE

The quickstart's step: 16 prompts x 16 completions of the arithmetic task, generated, graded, turned
into advantages and one update. Same weights (the Hugging Face twin of our model, after the
quickstart's supervised start), same prompts in the same order, the same grader called in process,
the same sampling, loss, clipping and AdamW, fp32, one thread; every step starts from those weights,
so that all steps are of the same kind. TRL runs its own loop with logging, saving and gradient
checkpointing off, SDPA attention, one ``generate`` call and one update a step.

What differs, because the systems do: TRL generates until the longest answer has ended and trains on
padded rows; ours drops rows that have ended and packs. TRL trains on groups whose rewards are all equal
(advantage 0), ours leaves them out unless --keep-groups-without-signal, and its mean over tokens then
counts the others only; "share_of_groups_with_signal" of the record says how many there were. TRL adds
1e-4 to the standard deviation, ours 1e-6. Both compute entropy; only ours records the log-prob of every
sampled token and compares it with the trainer's. What megatron-core needs to run without CUDA wraps
torch's factories for both, about 1 % of TRL's time.

TRL is no dependency: ``pip install trl==1.16.0 -c constraints.txt`` for this benchmark.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config import RLConfig
from megatron_rl.errors import MegatronRLError
from megatron_rl.metrics.table import format_table
from megatron_rl.models import PolicyModel, build_model
from megatron_rl.parallel import initialize, seed_everything, shut_down
from megatron_rl.platform import current_platform
from tools.benchmark.common import Round, Shape, benchmark_config, compete, prepare, provenance, write_record
from tools.benchmark.own_step import OurStep
from tools.benchmark.step_task import Judge, QuickstartTask, warm_start

SEQ_LENGTH = 64
"""Prompts of the task have at most 10 tokens."""
MISSING = (
    "trl: not available ({reason}); install it with: pip install trl==1.16.0 -c constraints.txt "
    "(only this comparison needs it)"
)
STANDARD_ERRORS = 6.0
"""Means that differ by more than this are not of the same policy."""


class Step(Protocol):
    """A contender."""

    judge: Judge

    def __call__(self) -> None:
        """One GRPO step."""
        ...

    def close(self) -> None:
        """Leave nothing running."""
        ...


def rl_config(arguments: argparse.Namespace) -> RLConfig:
    """The quickstart's second command, with a constant learning rate and no mismatch correction: TRL has none."""
    flags = [
        *(f"--grpo-prompts-per-step={arguments.prompts}", f"--grpo-group-size={arguments.group}"),
        *(f"--rl-max-new-tokens={arguments.new_tokens}", f"--micro-batch-size={arguments.micro_batch}"),
        *("--grpo-clamp-eps-lower=0.2", "--grpo-clamp-eps-upper=0.28", "--grpo-kl-beta=0", "--rl-correction=none"),
        *("--lr=8e-4", "--lr-decay-style=constant", "--weight-decay=0", "--clip-grad=1.0"),
        *("--adam-beta1=0.9", "--adam-beta2=0.95", "--use-distributed-optimizer"),
    ]
    if arguments.keep_groups_without_signal:
        flags.append("--rl-keep-zero-variance-groups")
    return benchmark_config(arguments.shape, SEQ_LENGTH, *flags)


def warm_config(arguments: argparse.Namespace) -> RLConfig:
    """The quickstart's first command, but for the schedule: a cosine, which scales with --warm-start."""
    updates = max(arguments.warm_start, 1)
    return benchmark_config(
        arguments.shape, SEQ_LENGTH, "--micro-batch-size=16", "--lr=4e-3", "--min-lr=4e-4",
        "--lr-decay-style=cosine", f"--train-iters={updates}", f"--lr-warmup-iters={min(20, updates - 1)}",
        "--weight-decay=0.01", "--clip-grad=1.0", "--adam-beta1=0.9", "--adam-beta2=0.95",
        "--use-distributed-optimizer",
    )  # fmt: skip


@contextlib.contextmanager
def contenders(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Step]]:
    """``ours`` and, if asked for and installed, ``trl``; both from the same warm-started weights."""
    config, platform = rl_config(arguments), current_platform()
    groups = initialize(config.parallel, platform)
    with contextlib.ExitStack() as stack:
        stack.callback(shut_down)
        seed_everything(arguments.seed)
        task = QuickstartTask.build(folder / "tokenizer", arguments.prompts, arguments.seed)
        started = build_model(config, platform, task.tokenizer.vocab_size)
        warm_start(started, warm_config(arguments), groups, task, arguments.warm_start)
        policy = build_model(config, platform, task.tokenizer.vocab_size)
        policy.gpt.load_state_dict(started.gpt.state_dict())
        steps: dict[str, Step] = {"ours": OurStep(policy, config, groups, task)}
        if arguments.against == "trl":
            trl = trl_step(started, task, config, arguments.trl_micro_batch, folder / "trl")
            steps |= {} if trl is None else {"trl": trl}
        for step in steps.values():
            stack.callback(step.close)
        yield steps


def trl_step(
    policy: PolicyModel, task: QuickstartTask, config: RLConfig, micro_batch: int, directory: Path
) -> Step | None:
    """TRL's contender; without TRL one line says how to install it."""
    try:
        from tools.benchmark.trl_step import TrlStep
    except ImportError as missing:
        print(MISSING.format(reason=missing), file=sys.stderr)
        return None
    from tools.benchmark.twin import hugging_face_twin

    return TrlStep(hugging_face_twin(policy, SEQ_LENGTH).train(), task, config, micro_batch, directory)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build both from the same weights, measure, check that they had the same work to do."""
    prepare()
    with tempfile.TemporaryDirectory() as folder, contenders(arguments, Path(folder)) as steps:

        def timed(name: str):
            return lambda _: (steps[name](), 1)[1]

        rounds = compete({name: timed(name) for name in steps}, arguments.rounds)
        seen = {name: step.judge for name, step in steps.items()}
        if "trl" in seen:
            require_same_work(seen["ours"], seen["trl"])
        facts = {name: judge.facts() for name, judge in seen.items()}
        signal = steps["ours"].metrics["training/signal_share"]
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "shape")}
    return {
        **summarise(rounds),
        "work": facts,
        "share_of_groups_with_signal": signal,
        "settings": {"shape": asdict(arguments.shape), **settings},
        **provenance("step"),
    }


def summarise(rounds: Sequence[Round]) -> dict[str, Any]:
    """Median CPU seconds a step, and quotients of a round's own: ``ours/trl`` of 0.5 is half of the seconds."""
    seconds = [{name: 1 / steps_per_second for name, steps_per_second in each.items()} for each in rounds]
    names = list(seconds[0])
    columns = {name: [each[name] for each in seconds] for name in names}
    pairs = [("ours", "trl"), ("trl", "ours")] if "trl" in names else []
    ratios = {f"{a}/{b}": [each[a] / each[b] for each in seconds] for a, b in pairs}
    return {
        "cpu_seconds_per_step": {name: statistics.median(values) for name, values in columns.items()},
        "spread": {name: [min(values), max(values)] for name, values in columns.items()},
        "ratio": {pair: statistics.median(values) for pair, values in ratios.items()},
        "ratio_spread": {pair: [min(values), max(values)] for pair, values in ratios.items()},
        "rounds": seconds,
    }


def require_same_work(ours: Judge, theirs: Judge) -> None:
    """Both sample the same policy on the same prompts, so rewards and lengths agree but for chance.

    Raises:
        MegatronRLError: they do not: the seconds mean nothing.
    """
    for name in ("rewards", "lengths"):
        a, b = getattr(ours, name), getattr(theirs, name)
        error = sum(statistics.pvariance(values) / len(values) for values in (a, b)) ** 0.5
        difference = abs(statistics.fmean(a) - statistics.fmean(b))
        # Samples of one prompt resemble one another, which the plain standard error does not know.
        if difference > STANDARD_ERRORS * error + 1e-6:
            raise MegatronRLError(
                f"mean {name} differ, {statistics.fmean(a):.3f} and {statistics.fmean(b):.3f}, by more than "
                f"{STANDARD_ERRORS} standard errors of {error:.4f}: speeds mean nothing"
            )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; the defaults are the quickstart's step."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.step")
    parser.add_argument("--against", choices=("trl", "nobody"), default="trl")
    parser.add_argument("--shape", type=Shape.parse, default=Shape(64, 3), help="hidden size x layers: 64x3")
    parser.add_argument("--prompts", type=int, default=16, help="a step")
    parser.add_argument("--group", type=int, default=16, help="completions a prompt")
    parser.add_argument("--new-tokens", type=int, default=44, help="at most, a completion")
    parser.add_argument("--micro-batch", type=int, default=64, help=f"ours packs as many times {SEQ_LENGTH} tokens")
    parser.add_argument("--trl-micro-batch", type=int, help="samples a forward pass of TRL's update; all of a step")
    parser.add_argument("--warm-start", type=int, default=1500, metavar="UPDATES", help="supervised, before")
    parser.add_argument("--keep-groups-without-signal", action="store_true", help="ours trains on them, too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args(argv)
    samples = arguments.prompts * arguments.group
    arguments.trl_micro_batch = arguments.trl_micro_batch or samples
    if samples % arguments.trl_micro_batch:
        parser.error(f"--trl-micro-batch {arguments.trl_micro_batch} does not divide the {samples} samples of a step")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record."""
    arguments = parse(argv)
    record = run(arguments)
    spread, ratio = record["spread"], record["ratio"]
    rows = [
        [name, f"{seconds:.3f}", "{:.3f} .. {:.3f}".format(*spread[name]), ratio.get(f"ours/{name}")]
        for name, seconds in record["cpu_seconds_per_step"].items()
    ]
    print(format_table(["step", "CPU s / step", "spread", "ours / it"], rows))
    write_record(arguments.json, record)


if __name__ == "__main__":
    main()
