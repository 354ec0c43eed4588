"""The terminal: a compact line for each step and evaluation, a progress bar where lines can be erased, tables.

For example::

    step 12/80 | reward 0.43 | len 21.3 | loss -0.0121 | grad 0.52 | gap 1.2e-06 | gen 0.3s train 0.2s
    eval 12/80 | arithmetic | pass@1 0.512 | pass@8 0.810 | greedy 0.550 | len 20.1
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.box import ROUNDED, Box
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_rl.metrics.evaluation import COUNTS, by_environment
from megatron_rl.metrics.rollouts import TextSample

ERASE_LINE = "\r\x1b[2K"
BAR_WIDTH = 24
PLAIN = Box("    \n  | \n -+-\n  | \n    \n    \n  | \n    \n", ascii=True)
UNBROKEN = 100_000
"""Columns of a text that is not for a terminal: no line is wrapped."""
COMPACT = "compact"
"""Format that writes 12,100 as ``12.1k``, beside Python's own format specifications."""


@dataclass(frozen=True)
class Column:
    """One cell of the step line; a metric absent from a step leaves its cell out."""

    template: str
    """``{}`` is where the number goes: ``"gen {}s"``."""
    metric: str
    number_format: str = ".2f"
    glue: str = " | "
    """What stands between the cell and the one before it."""


RL_COLUMNS = (
    Column("reward {}", "critic/rewards/mean"),
    Column("score {}", "critic/score/mean"),
    Column("len {}", "response_length/mean", ".1f"),
    Column("loss {}", "actor/pg_loss", ".3g"),
    Column("grad {}", "actor/grad_norm", ".3g"),
    Column("gap {}", "training/rollout_logprob_gap_mean", ".1e"),
    Column("stale {}", "rollout/stale_token_share", ".0%"),
    Column("gen {}s", "timing_s/gen", ".1f"),
    Column("train {}s", "timing_s/update_actor", ".1f", glue=" "),
    Column("{} tok/s", "perf/throughput", COMPACT),
)
SUPERVISED_COLUMNS = (
    Column("loss {}", "train/loss", ".4f"),
    Column("ppl {}", "train/perplexity", ".4g"),
    Column("grad {}", "actor/grad_norm", ".3g"),
    Column("lr {}", "actor/lr", ".2e"),
    Column("step {}s", "timing_s/step", ".1f"),
    Column("{} tok/s", "perf/throughput", COMPACT),
)


class ConsoleWriter:
    """Writes plain lines to a stream; on a terminal frames and a progress bar, too."""

    def __init__(self, stream: TextIO, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._interactive = is_terminal(stream)
        self._terminal = Console(file=stream, force_terminal=True)
        self._clock = clock
        self._first_step: int | None = None
        self._first_time = 0.0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line, then a line for every environment evaluated in it."""
        if self._first_step is None:
            self._first_step, self._first_time = step, self._clock()
        cells = format_cells(SUPERVISED_COLUMNS if "train/loss" in metrics else RL_COLUMNS, metrics)
        lines = [f"step {self._position(step)} | {cells}"] if cells else []
        lines += [f"eval {self._position(step)} | {text}" for text in format_evaluations(metrics)]
        self._emit("".join(line + "\n" for line in lines))
        if self._interactive:
            # The cursor goes back to column 0, so a log line from elsewhere overwrites the bar.
            self._emit(self._bar(step) + "\r")

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Print each sample in a few lines."""
        for sample in samples:
            title = f"sample {self._position(step)} | {sample.heading}"
            if self._interactive:
                body = Table.grid(padding=(0, 1))
                for name, text in sample.lines:  # as `Text`: what a model writes in brackets is no style
                    body.add_row(Text(name, "dim"), Text(text))
                style = "red" if sample.which == "worst" else "green"
                self._emit(self._drawn(Panel(body, title=Text(title), title_align="left", border_style=style), end=""))
                self._emit(self._bar(step) + "\r")
            else:
                self._emit("".join([f"{title}\n", *(f"    {name} {text}\n" for name, text in sample.lines)]))

    def close(self) -> None:
        """Erase the progress bar; the stream stays open, it belongs to the caller."""
        if self._interactive:
            self._emit("")

    def _position(self, step: int) -> str:
        if step > self._total_steps:  # a checkpoint that is evaluated alone
            return str(step)
        return f"{step:>{len(str(self._total_steps))}}/{self._total_steps}"

    def _bar(self, step: int) -> str:
        """Draw the bar and the time left, at the pace since the first step that this process did."""
        done = min(1.0, step / max(1, self._total_steps))
        bar = self._drawn(ProgressBar(1.0, done, BAR_WIDTH), end="")
        text = f"{bar} {done:4.0%}"
        steps_seen = 0 if self._first_step is None else step - self._first_step
        if steps_seen < 1 or step >= self._total_steps:
            return text
        seconds = (self._clock() - self._first_time) / steps_seen * (self._total_steps - step)
        return f"{text}  {format_duration(seconds)} left"

    def _drawn(self, what: RenderableType, end: str) -> str:
        """Render to text, to be written in one piece with what erases the bar."""
        with self._terminal.capture() as drawn:
            self._terminal.print(what, end=end)
        return drawn.get()

    def _emit(self, text: str) -> None:
        erased = ERASE_LINE + text if self._interactive else text
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(erased.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def format_cells(columns: Sequence[Column], metrics: Mapping[str, float]) -> str:
    """Join the cells of the metrics that are there."""
    text = ""
    for column in columns:
        if column.metric in metrics:
            cell = column.template.format(format_number(metrics[column.metric], column.number_format))
            text += (column.glue if text else "") + cell
    return text


def format_evaluations(metrics: Mapping[str, float]) -> list[str]:
    """Write one text for each environment, from its ``val/<environment>/<measure>`` metrics."""
    texts = []
    for environment, measures in by_environment(metrics).items():
        cells = [
            f"len {value:.1f}" if measure == "response_length" else f"{measure} {value:.3f}"
            for measure, value in measures.items()
            if measure not in COUNTS or (measure == "failed_grades" and value > 0)
        ]
        texts.append(" | ".join([environment, *cells]))
    return texts


def format_number(value: float, number_format: str) -> str:
    """Format a number; ``compact`` gives 999, 12.1k, 3.4M."""
    if number_format != COMPACT:
        return format(float(value), number_format)
    for suffix in ("", "k", "M"):
        if abs(value) < 999.5:
            return f"{value:.1f}{suffix}" if suffix else f"{value:.0f}"
        value /= 1000
    return f"{value:.1f}G"


def format_duration(seconds: float) -> str:
    """Write ``45s``, ``3m 20s`` or ``2h 05m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Align columns under a ruled header, numbers to the right. No trailing newline.

    For example::

        environment | pass@1 | greedy
        ------------+--------+-------
        arithmetic  |  0.512 |  0.550
    """
    stream = io.StringIO()
    table = _table(headers, rows, PLAIN)
    table.show_edge = table.pad_edge = False
    Console(file=stream, width=UNBROKEN, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def print_table(stream: TextIO, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Draw it where the stream is a terminal, else write it as `format_table` does."""
    if is_terminal(stream):
        Console(file=stream).print(_table(headers, rows, ROUNDED))
    else:
        stream.write(format_table(headers, rows) + "\n")


def is_terminal(stream: TextIO) -> bool:
    """Return whether lines may be drawn and erased."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _table(headers: Sequence[str], rows: Sequence[Sequence[object]], box: Box) -> Table:
    table = Table(box=box)
    for index, header in enumerate(headers):
        right = bool(rows) and all(_is_number(row[index]) for row in rows)
        table.add_column(Text(header), justify="right" if right else "left", no_wrap=box is PLAIN)
    for row in rows:  # as `Text`: brackets in a name are no style
        table.add_row(*(Text(_cell(value)) for _, value in zip(headers, row, strict=True)))
    return table


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(str(value).split())


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
