"""How near the product must come to the oracle. Each tolerance is at least five times what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.oracles.algorithm import Settings
from tests.oracles.models import read_model
from tests.oracles.step import Record, StepResult, read_records, recompute

LOGPROB = 2e-5
"""Nats, of a token in the first step; measured: 2.5e-6."""
LATER_LOGPROB = 2e-4
"""The same in a later one, whose weights are those of the updates before; measured: 2.8e-5 after four updates."""
ADVANTAGE = 2e-6
"""Measured: 1.3e-7."""
METRIC = 3e-5
"""Of a metric, relative above 1; measured: 5e-6 after four updates, 2e-7 after one."""
WEIGHT = 2e-6
"""Of a weight that the step moved by about the learning rate, 0.01, an update; measured: 4.4e-7."""


@dataclass(frozen=True)
class Outputs:
    """What a run of the product left behind."""

    model: Path
    """It began with this."""
    export: Path
    """What it ended with, in the Hugging Face format."""
    records: Sequence[Path]
    """Of each step."""
    metrics: Sequence[Mapping[str, float]]
    """Of each step."""


def differences(seen: Outputs, settings: Settings, quantized: bool = False) -> list[str]:
    """What the product made otherwise than the oracle, one line each; none is the promise.

    ``quantized`` rollouts are not compared with the plain model's log-probs: the correction's metrics are.
    """
    drawn = [read_records(path) for path in seen.records]
    expected, model = recompute(seen.model, drawn, settings)
    found = []
    for number, parts in enumerate(zip(drawn, expected, seen.metrics, strict=True), start=1):
        tolerance = math.inf if quantized else LOGPROB if number == 1 else LATER_LOGPROB
        found += [f"step {number}: {line}" for line in _step(*parts, tolerance)]
    ended = dict(read_model(seen.export).named_parameters())
    for name, parameter in model.named_parameters():
        found += _apart(name, ended[name].detach(), parameter.detach(), WEIGHT)
    return found


def _step(
    records: list[Record], expected: StepResult, metrics: Mapping[str, float], tolerance: float
) -> Iterator[str]:
    """``tolerance`` is that of the recorded log-probs."""
    for number, (record, logprobs) in enumerate(zip(records, expected.logprobs, strict=True)):
        yield from _apart(f"log-probs of sample {number}", record.engine, logprobs, tolerance)
        if (record.update is not None) != expected.in_loss[number]:
            yield f"sample {number} goes into update {record.update}; in the loss: {expected.in_loss[number]}"
        elif record.update is not None:
            what = f"advantage of sample {number}"
            yield from _apart(what, record.advantage, expected.advantages[number], ADVANTAGE)
    for name, value in expected.metrics.items():
        yield from _apart(name, metrics[name], value, METRIC * max(1.0, abs(value)))


def _apart(what: str, seen: float | torch.Tensor, expected: float | torch.Tensor, tolerance: float) -> list[str]:
    seen, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (seen, expected))
    distance = float((seen - expected).abs().max()) if seen.numel() else 0.0
    if distance <= tolerance:  # False for NaN
        return []
    values = f": {seen:.8g}, {expected:.8g} expected" if seen.dim() == 0 else ""
    return [f"{what} is off by {distance:.2g}, {tolerance:.2g} allowed{values}"]
