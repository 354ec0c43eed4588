"""Tokens come from the distribution that transformers computes: tempered, cut to top-k and top-p, renormalised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.oracles import cases
from tests.oracles.compare import LOGPROB
from tests.oracles.product import Run
from tests.oracles.sampling import chi_square, greedy_choices, read_draws, tail
from tests.oracles.step import read_records

SUSPICIOUS = 1e-4
"""A chi-square statistic this improbable fails; seeds are fixed, so a test does not fail by chance."""


def _check(run: Run) -> None:
    records = read_records(run.check().records[0])
    draws, worst = read_draws(run.model, records, run.case.settings)
    assert worst < LOGPROB, "log-probs are of the distribution that is drawn from; outside it nothing is drawn"
    statistic, freedom = chi_square(draws)
    assert freedom > 15
    assert SUSPICIOUS < tail(statistic, freedom) < 1 - SUSPICIOUS, (statistic, freedom)
    greedy = greedy_choices(run.model, records)
    assert greedy and all(token == likeliest for token, likeliest in greedy)


@pytest.mark.parametrize("name", [case.name for case in cases.SAMPLING])
def test_tokens_come_from_their_distribution(quick: dict[str, Run], name: str) -> None:
    _check(quick[name])


def test_a_temperature_a_fifth_off_is_seen(quick: dict[str, Run]) -> None:
    """By the draws alone, whatever log-probs were recorded with them."""
    run = quick["temperature"].check()
    other = replace(run.case.settings, rl_temperature=1.2 * run.case.settings.rl_temperature)
    draws, _ = read_draws(run.model, read_records(run.records[0]), other)
    assert tail(*chi_square(draws)) < SUSPICIOUS**2


@pytest.mark.long
@pytest.mark.parametrize("name", [case.name for case in cases.SAMPLING_TABLE])
def test_every_way_of_sampling_draws_from_its_distribution(table: dict[str, Run], name: str) -> None:
    _check(table[name])
