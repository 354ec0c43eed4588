"""A whole RL step is what transformers and plain torch make of its rollouts."""

from __future__ import annotations

import json

import pytest
import torch

from tests.oracles import cases
from tests.oracles.models import read_model, vocabulary_of
from tests.oracles.product import Run
from tests.oracles.quantised import quantise
from tests.oracles.step import read_records, score

CHARACTERS = "0123456789+-=,#"
"""Of token 1 and so on; token 0 ends an answer."""


def _check(run: Run) -> None:
    run.check()
    assert len(run.records) == run.case.number_of_steps
    for path in run.records:
        records = read_records(path)
        assert {record.group for record in records} == set(range(run.case.number_of_groups)), "all groups are recorded"
        updates = {record.update for record in records} - {None}
        if run.case.environment != "Rare":  # dropped samples make fewer updates
            assert len(updates) == (2 if "global_batch_size" in run.case.flags else 1)
    assert run.differences() == []


@pytest.mark.parametrize("name", [case.name for case in cases.QUICK])
def test_a_step_is_what_the_oracle_makes_of_its_rollouts(quick: dict[str, Run], name: str) -> None:
    _check(quick[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [case.name for case in cases.TABLE])
def test_every_step_of_the_table_is_what_the_oracle_makes_of_its_rollouts(table: dict[str, Run], name: str) -> None:
    _check(table[name])


def test_the_cases_reach_what_they_are_there_for(quick: dict[str, Run]) -> None:
    """A case in which nothing is clipped, rejected, dropped or answered compares nothing."""
    metrics = {name: run.check().metrics[-1] for name, run in quick.items()}
    assert metrics["kl"]["actor/kl_loss"] > 1e-3
    for name in ("kl", "entropy", "talk"):
        assert 0.02 < metrics[name]["actor/pg_clipfrac"] < 0.98, name
    assert metrics["kl"]["actor/pg_clipfrac_lower"] > 0
    assert 0.05 < metrics["int8"]["rollout_corr/rollout_is_clipped"] < 0.95
    assert metrics["rare"]["training/failed_grades"] > 0
    rare = read_records(quick["rare"].records[0])
    rewards = [{record.reward for record in rare if record.group == group} - {None} for group in range(8)]
    assert 0 < sum(len(found) < 2 for found in rewards) < 8, "some groups are of one reward, some are not"
    talk = [json.loads(line) for line in quick["talk"].records[0].read_text().splitlines()]
    assert sum(len(row["environment_spans"]) for row in talk) > 3


def test_what_the_environment_said_is_what_it_says(quick: dict[str, Run]) -> None:
    """Spans, rewards and the mask come from the record: here from the rules of the environment and the tokens."""
    for line in quick["talk"].check().records[0].read_text().splitlines():
        row = json.loads(line)
        turns, start = [], 0
        for begin, end in [*row["environment_spans"], (len(row["token_ids"]),) * 2]:
            turns.append((row["token_ids"][start:begin], row["token_ids"][begin:end]))
            start = end
        for written, read in turns:
            text = _text(written)
            said = f",{len(text)}," if len(text) % 2 and read else ""
            assert _text(read) == said
            assert len(text) % 2 or not read, "an even turn ends it"
        last = _text(turns[-1][0])
        assert row["reward"] == pytest.approx(sum(c.isdigit() for c in last) / max(len(last), 1))


def _text(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token - 1] for token in tokens if 1 <= token <= len(CHARACTERS))


def _rollouts_are_of(run: Run, recipe: str) -> None:
    model, vocabulary = quantise(read_model(run.model), recipe), vocabulary_of(run.model)
    with torch.no_grad():
        gaps = torch.cat([
            (score(model, record, vocabulary, run.case.settings.rl_temperature).logprobs - record.engine).abs()
            for record in read_records(run.check().records[0])
        ])  # fmt: skip
    plain = run.metrics[0]["training/rollout_logprob_gap_mean"]
    # A number between two codes may fall to the other side: a few tokens are off by more.
    assert float(gaps.median()) < 1e-5 and float(gaps.mean()) < plain / 10, (gaps.median(), gaps.mean(), plain)


def test_int8_rollouts_are_those_of_int8_layers(quick: dict[str, Run]) -> None:
    _rollouts_are_of(quick["int8"], "int8")


@pytest.mark.long
def test_fp8_rollouts_are_those_of_fp8_layers(table: dict[str, Run]) -> None:
    _rollouts_are_of(table["fp8"], "fp8")
