"""The sections, their budgets, and what a run of them reports while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tools.benchmark.on_gpu import decode, products, roofline, training
from tools.benchmark.on_gpu.measure import Bench, Row, guarded

Event = dict[str, Any]
"""``{"section": NAME}`` with one of ``begin``, ``row``, or ``end`` (seconds, why it stopped early, ceilings)."""


@dataclass(frozen=True)
class Section:
    """One part of the benchmark."""

    measure: Callable[[Bench], Iterator[Row]]
    budget: float
    """Seconds after which it measures nothing more; looked at between measurements."""


SECTIONS: dict[str, Section] = {
    "roofline": Section(roofline.roofline, 10),
    "products": Section(products.products, 35),
    "activations": Section(products.activations, 10),
    "requantise": Section(products.requantise, 25),
    "decode_0.5B": Section(decode.decode_small, 50),
    "decode_7B": Section(decode.decode_middle, 190),
    "decode_32B": Section(decode.decode_large, 150),
    "attention": Section(decode.attention, 90),
    "prefill": Section(training.prefill, 20),
    "training": Section(training.training, 20),
    "grpo": Section(training.grpo, 30),
}


def run_sections(bench: Bench, names: Sequence[str], until: float) -> Iterator[Event]:
    """Measure in order. ``until`` is when the whole run must be over, as `time.time` tells it."""
    for name in names:
        section, started = SECTIONS[name], time.time()
        budget = min(section.budget, until - started)
        yield {"section": name, "begin": started, "budget": budget}
        stopped = None if budget > 0 else "no time was left"
        rows = guarded(section.measure(bench), {})
        while stopped is None:
            row = next(rows, None)
            if row is None:
                break
            yield {"section": name, "row": row}
            if time.time() - started > budget:
                stopped = f"its {budget:.0f} s were over"
        rows.close()
        bench.forget()
        seconds = time.time() - started
        yield {"section": name, "end": seconds, "stopped": stopped, "ceilings": asdict(bench.ceilings)}


@dataclass
class SectionRecord:
    """What became of one section."""

    rows: list[Row] = field(default_factory=list)
    seconds: float | None = None
    """None where it did not come to its end."""
    stopped: str | None = None
    """Why it ended early."""


def _nothing(name: str) -> None:
    """Nobody wants to know."""


@dataclass
class Collection:
    """Gathers events."""

    sections: dict[str, SectionRecord] = field(default_factory=dict)
    ceilings: Mapping[str, float | None] = field(default_factory=dict)
    current: str | None = None
    """The section that has begun and not ended."""
    current_end: float = 0.0
    """When it should be over."""
    on_end: Callable[[str], None] = _nothing
    """Told the name of every section that is over, whatever became of it."""

    def take(self, event: Event) -> None:
        """One event, in their order."""
        name = event["section"]
        record = self.sections.setdefault(name, SectionRecord())
        if "begin" in event:
            self.current, self.current_end = name, event["begin"] + event["budget"]
        elif "row" in event:
            record.rows.append(event["row"])
        else:
            record.seconds, record.stopped = event["end"], event["stopped"]
            self.current, self.ceilings = None, event["ceilings"]
            self.on_end(name)

    def lost(self, name: str, why: str) -> None:
        """The process died in ``name``, or before it."""
        self.sections.setdefault(name, SectionRecord()).rows.append({"error": why})
        self.current = None
        self.on_end(name)
