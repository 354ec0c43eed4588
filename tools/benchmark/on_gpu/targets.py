"""What the figures are held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tools.benchmark.on_gpu.measure import Row
from tools.benchmark.on_gpu.sections import SectionRecord

ROOFLINE_RATIO = 1.3
GRAPH_SPEEDUP = {"decode_0.5B": 2.0, "decode_7B": 1.2}
"""A 7B's step of 4 ms leaves the host little to wait for; a 0.5B's is shorter than its launches."""
REQUANTISE_MS = 7.0
BATCH = 32


@dataclass(frozen=True)
class Target:
    """One claim and the figure for it."""

    claim: str
    of: str
    limit: float
    measured: float | None
    """None where it was not measured."""
    smaller_is_better: bool = True

    @property
    def verdict(self) -> str:
        """``pass``, ``FAIL`` or ``not measured``."""
        if self.measured is None:
            return "not measured"
        met = self.measured <= self.limit if self.smaller_is_better else self.measured >= self.limit
        return "pass" if met else "FAIL"


def targets(sections: Mapping[str, SectionRecord]) -> list[Target]:
    """All of them, measured or not."""
    middle = _rows(sections, "decode_7B")
    claims = []
    for kind in _formats(middle) or ["bf16"]:
        ratios = [row["ratio"] for row in middle if row["format"] == kind and row["batch"] == BATCH and row["ratio"]]
        claim = f"7B decode at batch {BATCH}, context 1k: times the roofline"
        claims.append(Target(claim, kind, ROOFLINE_RATIO, min(ratios, default=None)))
    for name, speedup in GRAPH_SPEEDUP.items():
        rows = _rows(sections, name)
        for kind in _formats(rows) or ["bf16"]:
            of = f"{name.removeprefix('decode_')} {kind}"
            claim = f"CUDA graphs over eager, the least at batch <= {BATCH}"
            claims.append(Target(claim, of, speedup, _graph_speedup(rows, kind), smaller_is_better=False))
    times = [row["ms"] for row in _rows(sections, "requantise", "ms") if row["recipe"] == "fp8"]
    claims.append(Target("re-quantisation of the 7B: ms", "fp8", REQUANTISE_MS, min(times, default=None)))
    return claims


def _rows(sections: Mapping[str, SectionRecord], name: str, needed: str = "step_ms") -> list[Row]:
    return [row for row in sections[name].rows if needed in row] if name in sections else []


def _formats(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["format"] for row in rows))


def _graph_speedup(rows: list[Row], kind: str) -> float | None:
    """Of the batch size where it is smallest; None where none was measured both ways."""
    of_kind = [row for row in rows if row["format"] == kind and row["batch"] <= BATCH]
    eager = {row["batch"]: row["step_ms"] for row in of_kind if not row["graphs"]}
    graphs = {row["batch"]: row["step_ms"] for row in of_kind if row["graphs"]}
    return min((eager[batch] / graphs[batch] for batch in eager.keys() & graphs.keys()), default=None)
