"""GRPO runs of several ranks on ONE GPU over NCCL, each compared with a run of one rank: right or wrong, not fast.

    python -m tests.gpu.several_ranks --out DIR              21 runs, three at a time: 6 minutes of an H200
    python -m tests.gpu.several_ranks --out DIR NAME ...     these runs, and those that they are compared with

First a check of NCCL itself (20 s): does it accept the ranks, what does a collective cost, can one be captured and
replayed. Then three steps a run of a random model with four layers. Runs in fp32 must draw the tokens of one rank; runs
in 16 and 8 bits must come near. The exit code counts the runs that failed or differ. DIR gets a log a run and
``several_ranks.json``. Without a CUDA device everything runs over gloo in fp32, which rehearses the comparisons, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tests.gpu import runs
from tests.gpu.ranks_on_one_gpu import OUT_OF_TIME, ROOT, end_all, launch

STEPS = 3
SECONDS = 360.0
LIMIT = 150.0
"""Seconds of a launch."""
PATIENCE = 10.0
"""Times as long for a rehearsal on few and busy cores."""
AT_ONCE = 3
LEAST = 15.0
"""With less time left no launch is begun."""
DENSE, MOE = "qwen3", "qwen3_moe"
TP2, SP, PP2 = "--tensor-model-parallel-size=2", "--sequence-parallel", "--pipeline-model-parallel-size=2"
EP2, CP2 = "--expert-model-parallel-size=2", "--context-parallel-size=2"
VPP = "--num-virtual-stages-per-pipeline-rank=2"
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAP = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
FP8, INT8, BF16 = "--rl-rollout-quantization=fp8", "--rl-rollout-quantization=int8", "--bf16"
LORA = f"--lora-rank=4 {INT8} {BF16}"
REPLAY = f"{FP8} --rl-router-replay {BF16}"
ENGINE = f"--transformer-impl=transformer_engine {BF16}"


@dataclass(frozen=True)
class Run:
    """A training run, perhaps continued with other layouts."""

    ranks: int
    flags: str
    family: str = DENSE
    of: str | None = None
    """The run of one rank that it is compared with."""
    resumed: tuple[tuple[int, str], ...] = ()
    """Ranks and flags of each ``--resume``, after one step of the launch before."""
    gap: float = 1e-3
    """Largest mean absolute mismatch, in nats."""
    norm: float = 2e-3
    """Largest relative difference of the first gradient norm."""
    same: float = 1.0
    """Least share of the first step's completions that are equal to those of one rank."""


SIXTEEN = {"gap": 0.03, "norm": 0.15, "same": 0.3}
EIGHT = {"gap": 0.25, "norm": 0.25, "same": 0.1}
RUNS = {
    # The most important first: the last ones are left out where time runs out.
    "one": Run(1, DISTRIBUTED),
    "TP2 SP": Run(2, f"{TP2} {SP} {DISTRIBUTED}", of="one"),
    "PP2": Run(2, f"{PP2} {DISTRIBUTED}", of="one"),
    "DP2 overlap": Run(2, OVERLAP, of="one"),
    "one fp8": Run(1, f"{FP8} {BF16} {DISTRIBUTED}"),
    "TP2 SP fp8": Run(2, f"{TP2} {SP} {FP8} {BF16} {DISTRIBUTED}", of="one fp8", **EIGHT),
    "one experts": Run(1, f"{REPLAY} {DISTRIBUTED}", MOE),
    "EP2 fp8 replay": Run(2, f"{EP2} {REPLAY} {DISTRIBUTED}", MOE, "one experts", **EIGHT),
    "VPP": Run(2, f"{PP2} {VPP} {DISTRIBUTED}", of="one"),
    "TP2 x PP2": Run(4, f"{TP2} {PP2} {SP} {DISTRIBUTED}", of="one"),
    "resume TP2, PP2, 1": Run(
        2, f"{TP2} {DISTRIBUTED}", of="one", resumed=((2, f"{PP2} {DISTRIBUTED}"), (1, DISTRIBUTED))
    ),
    "one bf16": Run(1, f"{BF16} {DISTRIBUTED}"),
    # Equal bits of two runs are not promised on a GPU: the line only says how many there are.
    "one bf16 again": Run(1, f"{BF16} {DISTRIBUTED}", of="one bf16", **SIXTEEN),
    "one bf16 resumed": Run(
        1, f"{BF16} {DISTRIBUTED}", of="one bf16", resumed=((1, f"{BF16} {DISTRIBUTED}"),), **SIXTEEN
    ),
    "CP2": Run(2, f"{CP2} {BF16} {DISTRIBUTED}", of="one bf16", **SIXTEEN),
    "TP2 SP bf16": Run(2, f"{TP2} {SP} {BF16} {DISTRIBUTED}", of="one bf16", **SIXTEEN),
    "one LoRA int8": Run(1, LORA),
    "TP2 LoRA int8": Run(2, f"{TP2} {LORA}", of="one LoRA int8", **EIGHT),
    "one TE": Run(1, f"{ENGINE} {DISTRIBUTED}"),
    "TP2 SP TE": Run(2, f"{TP2} {SP} {ENGINE} {DISTRIBUTED}", of="one TE", **SIXTEEN),
    "TP2 PP2 EP2 fp8": Run(
        4, f"{TP2} {SP} {PP2} {EP2} --expert-tensor-parallel-size=1 {REPLAY} {DISTRIBUTED}", MOE, "one experts", **EIGHT
    ),
}


@dataclass
class Result:
    """What came of a run."""

    verdict: str
    """``ok``, ``WRONG`` (it differs from one rank), ``FAIL``, ``skipped`` or ``not begun``."""
    why: str = ""
    seconds: float = 0.0
    steps: int = 0
    norms: list[float] = field(default_factory=list)
    """Gradient norms, one a step."""
    gap: float = 0.0
    """The mean mismatch of the worst step, in nats."""
    generation_seconds: list[float] = field(default_factory=list)
    graphs: int = 0
    """Lines of the log that say which CUDA graphs were captured."""
    is_capture_refused: bool = False
    drawn: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    """Step -> task and number of the sample -> token ids."""


def words(name: str, out: Path, number: int, *, cuda: bool) -> list[str]:
    """Return the training command of the run's launch ``number``, behind the interpreter."""
    run = RUNS[name]
    command = [
        "train_rl.py", "--perform-rl-step", f"--load-hf={out / run.family}", f"--run-dir={folder_of(name, out)}",
        f"--langrl-env-config={out / 'environments.yaml'}", f"--train-iters={STEPS}", "--grpo-prompts-per-step=8",
        "--grpo-group-size=4", "--seq-length=128", "--micro-batch-size=4", "--lr=1e-4", "--lr-decay-style=constant",
        "--rl-max-new-tokens=12", "--distributed-timeout-minutes=2", "--rl-decode-steps-per-sync=4",
    ]  # fmt: skip
    if cuda:  # two graphs: with several ranks every capture holds collectives, which take their time here
        command += ["--enable-cuda-graph", "--inference-dynamic-batching-num-cuda-graphs=2"]
    flags = (run.flags, *(flags for _, flags in run.resumed))[number]
    command += [flag for flag in flags.split() if cuda or flag != BF16]  # products in bf16 are slow on most CPUs
    return command + ["--resume"] * (number > 0) + ["--exit-interval=1"] * (number < len(run.resumed))


def folder_of(name: str, out: Path) -> Path:
    """Return the run's directory."""
    return out / "runs" / name.replace(" ", "_").replace(",", "")


def train(name: str, out: Path, until: float, *, cuda: bool) -> Result:
    """Train, as long as `time.monotonic` is before ``until``, and read what came of it."""
    run, log, seconds, extra = RUNS[name], out / f"{folder_of(name, out).name}.log", 0.0, dict[str, str]()
    if "transformer_engine" in run.flags and importlib.util.find_spec("transformer_engine") is None:
        if cuda:
            return Result("skipped", "Transformer Engine is not installed")
        extra["PYTHONPATH"] = str(ROOT / "tests/support/fake_transformer_engine")
    for number, ranks in enumerate((run.ranks, *(ranks for ranks, _ in run.resumed))):
        limit = min(LIMIT * (1 if cuda else PATIENCE), until - time.monotonic())
        if limit < LEAST:
            return Result("not begun", "no time was left", seconds)
        ended = launch(ranks, words(name, out, number, cuda=cuda), log, limit, extra)
        seconds += ended.seconds
        if ended.code:
            lines = log.read_text(errors="replace").splitlines()
            said = [line for line in lines if " ERROR " in line or "Error" in line]
            why = said[0][-200:] if said else f"exit code {ended.code}"
            return Result("FAIL", "out of time" if ended.code == OUT_OF_TIME else why, seconds)
    return read(folder_of(name, out), log, seconds)


def read(run_dir: Path, log: Path, seconds: float) -> Result:
    """Return what a run that ended well has left."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    drawn = {}
    for file in sorted((run_dir / "rollouts").glob("step_*.jsonl")):
        samples = map(json.loads, file.read_text().splitlines())
        drawn[int(file.stem[5:])] = {f"{each['task_id']} {each['sample']}": each["token_ids"] for each in samples}
    text = log.read_text(errors="replace")
    return Result(
        "ok", "", seconds, rows[-1]["step"], [row.get("actor/grad_norm", float("nan")) for row in rows],
        max(row.get("training/rollout_logprob_gap_mean", 0.0) for row in rows),
        [round(row.get("timing_s/gen", 0.0), 2) for row in rows], text.count("decode graphs:"),
        "no CUDA graph could be captured" in text, drawn,
    )  # fmt: skip


def compared(run: Run, one: Result, own: Result) -> tuple[list[str], str]:
    """Return what is wrong with ``own``, and how near it is to ``one``, the run of one rank."""
    shares = [_share(one.drawn[step], own.drawn.get(step, {})) for step in sorted(one.drawn)]
    norm = abs(own.norms[0] / one.norms[0] - 1) if one.norms[0] else float("inf")
    bits = sum(a == b for a, b in zip(one.norms, own.norms, strict=False))
    wrong = []
    if not shares or shares[0] < run.same:
        wrong.append(f"step 1 draws {(shares or [0])[0]:.2f} of the completions of one rank, not {run.same:g}")
    if not norm <= run.norm:  # also NaN
        wrong.append(f"the first gradient norm is {norm:.1e} off, more than {run.norm:g}")
    if not own.gap <= run.gap:
        wrong.append(f"the mean mismatch is {own.gap:.1e}, more than {run.gap:g}")
    if own.steps != one.steps:
        wrong.append(f"{own.steps} steps, not {one.steps}")
    if own.is_capture_refused:
        wrong.append("a CUDA graph was refused")
    equal = " ".join(f"{share:.2f}" for share in shares)
    return wrong, f"equal completions {equal}, first norm {norm:.1e} off, {bits} norms equal to the bit"


def _share(one: Mapping[str, list[int]], own: Mapping[str, list[int]]) -> float:
    return sum(own.get(name) == tokens for name, tokens in one.items()) / max(len(one), 1)


def judge(name: str, found: Mapping[str, Result]) -> str:
    """Set the verdict of a run that ended, and return what its line says."""
    run, own = RUNS[name], found[name]
    if own.verdict != "ok":
        return own.why
    text = f"mean mismatch {own.gap:.1e}, generation {own.generation_seconds} s, {own.graphs} lines of graphs"
    if run.of is None:
        return text
    one = found[run.of]
    if one.verdict != "ok":
        own.verdict = "FAIL"  # a comparison that could not be made has not passed
        return f"{run.of!r} did not end well, so there is nothing to compare with; {text}"
    wrong, near = compared(run, one, own)
    own.verdict = "WRONG" if wrong else "ok"
    return "; ".join([*wrong, near, text])


def with_their_references(names: Sequence[str]) -> list[str]:
    """Return ``names``, each behind the run that it is compared with; all runs without names."""
    return list(dict.fromkeys(name for wanted in names or RUNS for name in (RUNS[wanted].of, wanted) if name))


def write_models(out: Path, names: Iterable[str]) -> None:
    """Write the models of these runs, and their tasks. Four layers are two virtual stages on each of two ranks."""
    out.mkdir(parents=True, exist_ok=True)
    runs.write_tasks(out)
    for family in {RUNS[name].family for name in names}:
        runs.write_model(out / family, family, num_hidden_layers=4)


def check_nccl(out: Path) -> tuple[bool, str]:
    """Return whether two ranks could talk to each other, and the figures or the end of the log."""
    log = out / "collectives.log"
    ended = launch(2, ["-m", "tests.gpu.ranks_on_one_gpu"], log, 90 if torch.cuda.is_available() else 900)
    text = log.read_text(errors="replace")
    figures = [line for line in text.splitlines() if line.startswith("{")]
    return ended.code == 0, figures[-1] if figures else text[-300:]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: how many runs failed or differ from one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {'; '.join(RUNS)}")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for models, runs, logs and the record")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no launch after these")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in RUNS]:
        parser.error(f"there is no run {unknown[0]!r}; use one of {'; '.join(RUNS)}")
    cuda, started, out = torch.cuda.is_available(), time.monotonic(), arguments.out.absolute()
    until, names = started + arguments.seconds * (1 if cuda else PATIENCE), with_their_references(arguments.names)
    write_models(out, names)
    print(f"on {'one GPU' if cuda else 'a CPU over gloo: a rehearsal'}; logs in {out}", flush=True)
    works, said = check_nccl(out)
    print(f"{'ok' if works else 'FAIL':9} collectives: {said}", flush=True)
    if not works:
        return 1  # no run of several ranks can work
    found, record = dict[str, Result](), {"collectives": said}
    with ThreadPoolExecutor(AT_ONCE if cuda else 1) as pool:
        waiting = {name: pool.submit(train, name, out, until, cuda=cuda) for name in names}
        for name, future in waiting.items():
            found[name] = future.result()
            line = judge(name, found)
            record[name] = asdict(found[name]) | {"drawn": None, "said": line}
            (out / "several_ranks.json").write_text(json.dumps(record, indent=1))
            print(f"{found[name].verdict:9} {name}, {found[name].seconds:.0f} s: {line}", flush=True)
    failed = sum(result.verdict in ("FAIL", "WRONG") for result in found.values())
    print(f"{len(names) - failed} of {len(names)} as they should be, {time.monotonic() - started:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_all)
    sys.exit(main())
