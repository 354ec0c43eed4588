"""Runs of several ranks on one GPU: their flags, their comparisons, and a rehearsal of a few over gloo."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config.arguments import read_config
from tests.gpu import several_ranks
from tests.gpu.several_ranks import RUNS, Result, compared, judge, words

ONE = Result("ok", steps=3, norms=[2.0, 1.5, 1.0], gap=1e-6, drawn={1: {"a 0": [1, 2], "a 1": [3]}, 2: {"b 0": [4]}})
EXACT, EIGHT = RUNS["TP2 SP"], RUNS["TP2 SP fp8"]


def test_every_run_has_flags_that_fit_and_a_reference_of_one_rank(tmp_path: Path) -> None:
    several_ranks.write_models(tmp_path, RUNS)
    for name, run in RUNS.items():
        reference = RUNS[run.of or name]
        assert (reference.ranks, reference.family) == (1, run.family) or run.of is None, name
        for number, ranks in enumerate((run.ranks, *(ranks for ranks, _ in run.resumed))):
            _, problems = read_config(words(name, tmp_path, number, cuda=True)[1:], ranks)
            assert not problems, name
    assert "--bf16" not in words("one bf16", tmp_path, 0, cuda=False), "a rehearsal is in fp32"
    first, second, third = (words("resume TP2, PP2, 1", tmp_path, number, cuda=False) for number in range(3))
    assert [("--resume" in each, "--exit-interval=1" in each) for each in (first, second, third)] == [
        (False, True), (True, True), (True, False),
    ]  # fmt: skip


def test_a_run_that_equals_one_rank_passes() -> None:
    wrong, said = compared(EXACT, ONE, ONE)
    assert wrong == []
    assert said == "equal completions 1.00 1.00, first norm 0.0e+00 off, 3 norms equal to the bit"
    near = replace(ONE, norms=[2.2, 1.6, 0.9], gap=0.1, drawn={1: {"a 0": [1, 2], "a 1": [9]}, 2: {}})
    assert compared(EIGHT, ONE, near)[0] == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"drawn": {1: {"a 0": [1, 2], "a 1": [9]}, 2: {"b 0": [4]}}}, "draws 0.50 of the completions"),
        ({"drawn": {}}, "draws 0.00 of the completions"),
        ({"norms": [2.1, 1.5, 1.0]}, "the first gradient norm is 5.0e-02 off"),
        ({"norms": [math.nan]}, "the first gradient norm is nan off"),
        ({"gap": 0.01}, "the mean mismatch is 1.0e-02"),
        ({"gap": math.nan}, "the mean mismatch is nan"),
        ({"steps": 2}, "2 steps, not 3"),
        ({"is_capture_refused": True}, "a CUDA graph was refused"),
    ],
)
def test_a_run_that_differs_is_wrong(changes: dict[str, object], reason: str) -> None:
    found = {"one": replace(ONE), "TP2 SP": replace(ONE, **changes)}
    line = judge("TP2 SP", found)
    assert found["TP2 SP"].verdict == "WRONG"
    assert reason in line


@pytest.mark.parametrize("tokens", [[], {1: {}}])
def test_a_run_of_one_rank_without_completions_proves_nothing(tokens: object) -> None:
    empty = replace(ONE, drawn=dict(tokens))
    assert compared(EXACT, empty, empty)[0]


def test_without_the_run_of_one_rank_a_comparison_has_not_passed() -> None:
    found = {"one": Result("FAIL", "out of time"), "TP2 SP": replace(ONE)}
    assert "'one' did not end well" in judge("TP2 SP", found)
    assert found["TP2 SP"].verdict == "FAIL"


def test_a_run_brings_the_one_that_it_is_compared_with() -> None:
    assert several_ranks.with_their_references(["PP2", "one fp8", "VPP"]) == ["one", "PP2", "one fp8", "VPP"]
    assert sorted(several_ranks.with_their_references([])) == sorted(RUNS)


def test_nothing_runs_where_nccl_does_not_take_the_ranks(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(several_ranks, "check_nccl", lambda out: (False, "Duplicate GPU detected"))
    monkeypatch.setattr(several_ranks, "train", None)
    monkeypatch.setattr(several_ranks, "write_models", lambda *_: None)
    assert several_ranks.main(["PP2", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["FAIL", "collectives:", "Duplicate", "GPU", "detected"]
    with pytest.raises(SystemExit):
        several_ranks.main(["TP3", "--out", str(tmp_path)])
    assert "there is no run 'TP3'; use one of one; TP2 SP;" in capsys.readouterr().err


@pytest.mark.long
def test_a_rehearsal_over_gloo(tmp_path: Path) -> None:
    """Two tensor-parallel ranks, two stages, and a run that goes on with each: they draw the tokens of one rank."""
    names = ["TP2 SP", "PP2", "resume TP2, PP2, 1"]
    assert several_ranks.main(["--out", str(tmp_path), *names]) == 0
    record = json.loads((tmp_path / "several_ranks.json").read_text())
    assert {name: record[name]["verdict"] for name in ("one", *names)} == dict.fromkeys(("one", *names), "ok")
    assert all("equal completions 1.00" in record[name]["said"] for name in names)
    assert "all-reduce 4 KiB ms" in json.loads(record["collectives"])
