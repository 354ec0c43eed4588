"""The memory of the log-prob pass, in small: all ways agree, and a cell measures what it allocates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.benchmark.test_quantization import run
from tools.benchmark import logprob_memory
from tools.benchmark.logprob_memory import PASSES, WAYS, Cell


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("start", WAYS)
def test_all_ways_compute_the_same(start: str, kind: str) -> None:
    found = {}
    for way in WAYS[start]:
        cell = Cell(start, way, kind, tokens=12, vocab=50, hidden=8, dtype="float32")
        torch.manual_seed(1)
        inputs = logprob_memory.make_inputs(cell, torch.device("cpu"))
        value = logprob_memory.one_pass(cell, inputs)
        assert value < -12  # log-probs, about -log 50 each
        found[way] = {"value": value, "grads": [each.grad for each in inputs]}
    for result in found.values():
        assert result["value"] == pytest.approx(found["naive"]["value"], rel=1e-5)
        for grad, expected in zip(result["grads"], found["naive"]["grads"], strict=True):
            assert (grad is None) == (kind.startswith("forward"))
            if grad is not None:
                torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def test_ways_that_disagree_are_refused() -> None:
    row = {"forward": {"value": -10.0, "bytes": 1.0, "seconds": 1.0}}
    other = {"forward": {"value": -11.0, "bytes": 1.0, "seconds": 1.0}}
    with pytest.raises(SystemExit, match="the ways disagree"):
        logprob_memory.require_same_values({"naive": row, "ours": other})


def test_a_run(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    sizes = ["--tokens=256", "--vocab=40000", "--start", "logits", "--passes", "forward"]
    shown = run(["-m", "tools.benchmark.logprob_memory"], *sizes, "--json", str(path))
    assert "logits: naive" in shown
    record = json.loads(path.read_text())
    assert record["logits_bytes"] == 256 * 40000 * 2
    naive, ours = (record["peak_bytes"]["logits"][way]["forward"] for way in ("naive", "ours"))
    # naively a copy in fp32 and its log-softmax; ours a few chunks of 2^20 logits
    assert naive > 2 * record["fp32_logits_bytes"] * 0.9
    assert ours < record["fp32_logits_bytes"]
    assert record["ratio"]["logits"]["ours/naive"]["forward"] == pytest.approx(ours / naive)
    assert record["command"].startswith("python -m tools.benchmark.logprob_memory --tokens=256")
