"""The page of a replay: its samples as in the report, with tokens coloured by what the reader chooses."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_rl.metrics.curves import round_number
from megatron_rl.metrics.report import build_page
from megatron_rl.metrics.report_rollouts import build_group
from megatron_rl.metrics.rollouts import rows_by_group

if TYPE_CHECKING:
    from megatron_rl.cli.replay import Choice
    from megatron_rl.cli.replay_step import Replayed, TokenInLoss

MEASURES: tuple[tuple[str, float, Callable[[TokenInLoss], float]], ...] = (
    ("gradient", 0, lambda one: one.gradient),
    ("log-prob, trainer - engine", 0, lambda one: one.old - one.inference),
    ("advantage", 0, lambda one: one.advantage),
    ("d loss / d log-prob", 0, lambda one: one.slope),
    ("log-prob of the trainer", 0, lambda one: one.old),
    ("ratio", 1, lambda one: one.ratio),
    ("correction", 1, lambda one: one.correction),
)
"""Name, the number without colour, and the number of a token."""


def replay_page(
    name: str, choice: Choice, found: Replayed, decode_raw: Callable[[Sequence[int]], str], compared: Sequence[Any]
) -> str:
    """Build the page of the chosen samples; ``name`` is that of the run, ``compared`` rows of the last table."""
    [rows] = rows_by_group(choice.step, [found.groups[choice.group]], decode_raw)
    tokens: dict[tuple[int, int], list[TokenInLoss]] = {}
    for one in found.tokens:
        tokens.setdefault((one.sample, one.sequence), []).append(one)
    for row in rows:
        own = tokens.get((row["sample"], row["branch"]), [])
        row |= {"group": choice.group, "advantage": sum(one.advantage for one in own) / len(own) if own else None}
    group = build_group(rows)
    shown = [each for each in group["samples"] if choice.sample is None or choice.sample in each["samples"]]
    for each in shown:
        numbers = [number for number in each["samples"] if choice.sample in (None, number)]
        for sequence in (each, *each["branches"]):
            keys = [(number, sequence.get("number", 0)) for number in numbers]
            own = next((tokens[key] for key in keys if key in tokens), [])
            sequence["numbers"] = _by_place(sequence, own)
    return build_page(
        {
            "name": os.path.basename(os.path.realpath(name)), "step": choice.step, "update": found.update,
            "denominator": found.denominator, "group": group | {"samples": shown},
            "measures": [(label, neutral) for label, neutral, _ in MEASURES],
            "norms": list(found.norms.items()), "compared": compared,
        },
        "rollouts.js", "replay.js",
    )  # fmt: skip


def _by_place(sequence: Mapping[str, Any], own: Sequence[TokenInLoss]) -> list[list[float | None] | None]:
    """Give every shown token its numbers, in the order of `MEASURES`; None where it is not in the loss."""
    read = {place for start, end in sequence["spans"] for place in range(start, end)}
    left = iter(own)
    ones = [None if place in read else next(left, None) for place in range(len(sequence["tokens"]))]
    return [None if one is None else [round_number(of(one)) for _, _, of in MEASURES] for one in ones]
