"""Sampled tokens against the distribution they should come from."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.oracles.algorithm import Settings
from tests.oracles.models import distributions, read_model, vocabulary_of
from tests.oracles.step import Record

SMALLEST_CELL = 5.0
"""Expected draws of a cell of the chi-square statistic: fewer are added to a neighbour, as is usual."""


@dataclass(frozen=True)
class Draws:
    """Of all places that share what came before."""

    tokens: Counter[int]
    probabilities: torch.Tensor
    """[V] fp64."""


def truncated(logprobs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The probabilities [V] that are drawn from: the ``top_k`` likeliest, and of these, renormalised, the fewest that
    hold ``top_p``."""
    probabilities = logprobs.exp()
    order = probabilities.argsort(descending=True).tolist()[: top_k or None]
    within = sum(float(probabilities[token]) for token in order)
    kept, mass = [], 0.0
    for token in order:
        if kept and mass >= top_p * within:
            break
        kept.append(token)
        mass += float(probabilities[token])
    support = torch.zeros_like(probabilities)
    support[kept] = probabilities[kept] / mass
    return support


@torch.no_grad()
def greedy_choices(directory: Path, records: list[Record]) -> list[tuple[int, int]]:
    """Tokens of the greedy answers, and the likeliest ones."""
    model, vocabulary = read_model(directory), vocabulary_of(directory)
    found: list[tuple[int, int]] = []
    for record in records:
        if record.greedy:
            rows = distributions(model, record.prompt + record.answer, vocabulary, temperature=1.0)
            found += zip(record.answer, rows[len(record.prompt) - 1 :].argmax(1).tolist(), strict=True)
    return found


@torch.no_grad()
def read_draws(directory: Path, records: list[Record], settings: Settings) -> tuple[list[Draws], float]:
    """All draws by what came before them, and how far a recorded log-prob is off at most."""
    model, vocabulary = read_model(directory), vocabulary_of(directory)
    places: dict[tuple[int, ...], torch.Tensor] = {}
    drawn: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    worst = 0.0
    for record in records:
        if record.greedy:
            continue
        for at, token in enumerate(record.answer):
            before = (*record.prompt, *record.answer[:at])
            if before not in places:
                rows = distributions(model, [*before, token], vocabulary, settings.rl_temperature)
                places[before] = truncated(rows[-1], settings.rl_top_k, settings.rl_top_p)
            drawn[before][token] += 1
            worst = max(worst, abs(math.log(max(float(places[before][token]), 1e-300)) - float(record.engine[at])))
    return [Draws(tokens, places[before]) for before, tokens in drawn.items()], worst


def chi_square(draws: list[Draws]) -> tuple[float, int]:
    """The statistic and its degrees of freedom, summed over all places with draws enough for two cells."""
    statistic, freedom = 0.0, 0
    for place in draws:
        cells = _cells(place)
        if len(cells) > 1:
            statistic += sum((seen - expected) ** 2 / expected for seen, expected in cells)
            freedom += len(cells) - 1
    return statistic, freedom


def _cells(place: Draws) -> list[tuple[int, float]]:
    """Draws seen and expected, rare tokens together."""
    count, cells = sum(place.tokens.values()), []
    seen, expected = 0, 0.0
    for token in place.probabilities.argsort(descending=True).tolist():
        seen, expected = seen + place.tokens[token], expected + count * float(place.probabilities[token])
        if expected >= SMALLEST_CELL:
            cells.append((seen, expected))
            seen, expected = 0, 0.0
    if cells:
        cells[-1] = (cells[-1][0] + seen, cells[-1][1] + expected)
    return cells


def tail(statistic: float, freedom: int) -> float:
    """The probability of a statistic as large as this or larger, if the draws come from the distributions."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
