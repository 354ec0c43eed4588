"""Peak memory of the log-prob pass at a large vocabulary: ours, fused with the output layer, and the naive one.

    python tools/benchmark/logprob_memory.py --json FILE

A cell of the table is a process of its own: what it needs beyond its inputs, at the peak. From logits the input
is [T, V] in the model's dtype; from hidden states it is [T, H] and the output layer's weight, so that the logits
count, too. ``forward`` is without gradient, ``backward`` both passes; with entropy, it is part of the loss.
On a CPU the peak is the resident set's, on CUDA the allocator's; CPU seconds of one thread stand beside it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.fused_logprobs import projected_logprobs
from megatron_rl.algorithms.logprobs import selected_logprobs
from megatron_rl.metrics.table import format_table
from tools.benchmark.common import prepare, provenance, write_record

WAYS = {"logits": ("naive", "ours"), "hidden": ("naive", "ours", "fused")}
"""Who competes, by what the pass starts from."""
PASSES = ("forward", "forward+entropy", "backward", "backward+entropy")


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    start: str
    way: str
    kind: str
    tokens: int
    vocab: int
    hidden: int
    dtype: str


def make_inputs(cell: Cell, device: torch.device) -> list[Tensor]:
    """Filled in place: a temporary in fp32 would be the peak."""
    shapes = [(cell.tokens, cell.vocab)]
    if cell.start == "hidden":
        shapes = [(cell.tokens, cell.hidden), (cell.vocab, cell.hidden)]
    dtype = getattr(torch, cell.dtype)
    inputs = [torch.empty(shape, dtype=dtype, device=device).normal_(std=0.5) for shape in shapes]
    return [each.requires_grad_(cell.kind.startswith("backward")) for each in inputs]


def naive(logits: Tensor, ids: Tensor, entropy: bool) -> Tensor:
    """What one would write: an fp32 log-softmax over everything."""
    table = logits.float().log_softmax(-1)
    total = table[:-1].gather(1, ids[1:, None]).sum()
    return total + (table.exp() * table).sum(-1)[:-1].sum() if entropy else total


def score(cell: Cell, inputs: Sequence[Tensor], ids: Tensor, positions: Tensor) -> Tensor:
    """The sum of one sequence's log-probs, less that of its entropies."""
    entropy = cell.kind.endswith("entropy")
    if cell.way == "fused":
        function, tensors = projected_logprobs, tuple(inputs)
    else:
        function, tensors = selected_logprobs, (inputs[0] if cell.start == "logits" else inputs[0] @ inputs[1].t(),)
    if cell.way == "naive":
        return naive(*tensors, ids, entropy)
    kind = "differentiable" if entropy else "none"
    result = function(*tensors, ids, positions, vocab_size=cell.vocab, entropy=kind)
    return result.logprobs.sum() - (result.entropy.sum() if entropy else 0.0)


def measure(cell: Cell) -> dict[str, float]:
    """Peak bytes beyond the inputs, and CPU seconds; in a process that has done nothing else."""
    prepare()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    small = replace(cell, tokens=4, vocab=128)
    one_pass(small, make_inputs(small, device))  # code that is loaded at the first use is no tensor
    inputs = make_inputs(cell, device)
    before, started = _peak_so_far(device), time.process_time()
    value = one_pass(cell, inputs)
    return {"bytes": _peak_so_far(device) - before, "seconds": time.process_time() - started, "value": value}


def one_pass(cell: Cell, inputs: Sequence[Tensor]) -> float:
    """The pass of the cell; its value."""
    device = inputs[0].device
    ids, positions = torch.arange(cell.tokens, device=device) % cell.vocab, torch.arange(cell.tokens, device=device)
    backward = cell.kind.startswith("backward")
    with torch.set_grad_enabled(backward):
        total = score(cell, inputs, ids, positions)
        if backward:
            total.backward()
    return total.item()


def _peak_so_far(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_elsewhere(cell: Cell) -> dict[str, float]:
    """`measure` in a new process: a peak cannot be taken back."""
    command = [sys.executable, str(Path(__file__).resolve()), "--cell", json.dumps(asdict(cell))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["it was killed"])[-1]
        raise SystemExit(f"{cell.way} from {cell.start}, {cell.kind}: {reason}; use fewer --tokens")
    return json.loads(result.stdout.splitlines()[-1])


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All cells, one after the other, and what ours needs relative to the naive way."""
    sizes = (arguments.tokens, arguments.vocab, arguments.hidden, arguments.dtype)
    peaks: dict[str, dict[str, dict[str, float]]] = {}
    seconds: dict[str, dict[str, dict[str, float]]] = {}
    passes = arguments.passes
    for start in arguments.start:
        ways = WAYS[start]
        found = {way: {kind: measure_elsewhere(Cell(start, way, kind, *sizes)) for kind in passes} for way in ways}
        require_same_values(found)
        peaks[start] = {way: {kind: each["bytes"] for kind, each in row.items()} for way, row in found.items()}
        seconds[start] = {way: {kind: each["seconds"] for kind, each in row.items()} for way, row in found.items()}
    ratios = {
        start: {
            f"{way}/naive": {kind: peaks[start][way][kind] / max(peaks[start]["naive"][kind], 1) for kind in passes}
            for way in WAYS[start]
            if way != "naive"
        }
        for start in arguments.start
    }
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "cell")}
    return {
        "peak_bytes": peaks,
        "ratio": ratios,
        "cpu_seconds": seconds,
        "logits_bytes": arguments.tokens * arguments.vocab * getattr(torch, arguments.dtype).itemsize,
        "fp32_logits_bytes": arguments.tokens * arguments.vocab * 4,
        "settings": settings,
        **provenance("logprob_memory"),
    }


def require_same_values(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """All ways compute the same sum."""
    for kind in next(iter(found.values())):
        values = [row[kind]["value"] for row in found.values()]
        if max(values) - min(values) > 2e-3 * abs(values[0]):
            raise SystemExit(f"{kind}: the ways disagree, {values}: their memory means nothing")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; the default vocabulary is Qwen2's."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.logprob_memory")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=64, help="small: the weight and its gradient are no logits")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the model")
    parser.add_argument("--start", nargs="+", choices=tuple(WAYS), default=list(WAYS), help="what the pass starts from")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record."""
    arguments = parse(argv)
    if arguments.cell:
        print(json.dumps(measure(Cell(**json.loads(arguments.cell)))))
        return
    record = run(arguments)
    rows = [
        [f"{start}: {way}", *(f"{peak / 2**20:,.0f} ({record['cpu_seconds'][start][way][kind]:.1f} s)"
                              for kind, peak in row.items())]
        for start, ways in record["peak_bytes"].items()
        for way, row in ways.items()
    ]  # fmt: skip
    print(format_table(["MiB beyond the inputs, from", *arguments.passes], rows))
    print(f"the logits: {record['logits_bytes'] / 2**20:,.0f} MiB, in fp32 {record['fp32_logits_bytes'] / 2**20:,.0f}")
    write_record(arguments.json, record)


if __name__ == "__main__":
    main()
