"""How near the product must come to the oracle. Each tolerance is at least five times what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from tests.oracles.algorithm import Settings
from tests.oracles.models import read_model
from tests.oracles.step import read_records, recompute

LOGPROB = 2e-5
"""Nats, of a token; measured: 2.5e-6."""
ADVANTAGE = 2e-6
"""Measured: 1.3e-7."""
METRIC = 3e-5
"""Of a metric, relative above 1; measured: 5e-6 after four updates, 2e-7 after one."""
WEIGHT = 2e-6
"""Of a weight that the step moved by about the learning rate, 0.01, an update; measured: 4.4e-7."""


def differences(model: Path, export: Path, records: Path, metrics: Mapping[str, float], settings: Settings,
                quantized: bool = False) -> list[str]:  # fmt: skip
    """What the product made otherwise than the oracle, one line each; none is the promise.

    ``quantized`` rollouts are not compared with the plain model's log-probs: the correction's metrics are.
    """
    drawn = read_records(records)
    expected = recompute(model, drawn, settings)
    found = []
    for number, (record, logprobs) in enumerate(zip(drawn, expected.logprobs, strict=True)):
        if not quantized:
            found += _apart(f"log-probs of sample {number}", record.engine, logprobs, LOGPROB)
        if (record.update is not None) != expected.in_loss[number]:
            found.append(f"sample {number} goes into update {record.update}; in the loss: {expected.in_loss[number]}")
        elif record.update is not None:
            found += _apart(f"advantage of sample {number}", record.advantage, expected.advantages[number], ADVANTAGE)
    for name, value in expected.metrics.items():
        found += _apart(name, metrics[name], value, METRIC * max(1.0, abs(value)))
    ended = dict(read_model(export).named_parameters())
    for name, parameter in expected.model.named_parameters():
        found += _apart(name, ended[name].detach(), parameter.detach(), WEIGHT)
    return found


def _apart(what: str, seen: float | torch.Tensor, expected: float | torch.Tensor, tolerance: float) -> list[str]:
    seen, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (seen, expected))
    distance = float((seen - expected).abs().max()) if seen.numel() else 0.0
    if distance <= tolerance:  # False for NaN
        return []
    values = f": {seen:.8g}, {expected:.8g} expected" if seen.dim() == 0 else ""
    return [f"{what} is off by {distance:.2g}, {tolerance:.2g} allowed{values}"]
