"""What the benchmarks compute apart from the measuring itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.benchmark.common import Shape, benchmark_config, compete, summarise, turn_order, write_record

ROUNDS = [{"ours": 20.0, "hf": 10.0}, {"hf": 5.0, "ours": 15.0}, {"ours": 40.0, "hf": 10.0}]


def test_everybody_goes_first_once() -> None:
    orders = [turn_order(["a", "b", "c"], index) for index in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_contenders_alternate_after_an_untimed_run_each() -> None:
    turns: list[tuple[str, int]] = []

    def contender(name: str):
        def run(seed: int) -> int:
            turns.append((name, seed))
            return 1

        return run

    rounds = compete({name: contender(name) for name in "ab"}, rounds=2, turn_seconds=1e-9)
    seen = list(dict.fromkeys(turns))  # a turn may take several runs
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert [sorted(speeds) for speeds in rounds] == [["a", "b"], ["a", "b"]]


def test_medians_and_spread_by_contender() -> None:
    summary = summarise(ROUNDS, "ours")
    assert summary["tokens_per_cpu_second"] == {"ours": 20.0, "hf": 10.0}
    assert summary["spread"] == {"ours": [15.0, 40.0], "hf": [5.0, 10.0]}


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    # 2, 3 and 4; the ratio of the medians would be 2
    assert summarise(ROUNDS, "ours")["ratio"] == {"ours/hf": 3.0}


def test_alone_there_is_no_ratio() -> None:
    assert summarise([{"ours": 1.0}], "ours")["ratio"] == {}


def test_a_record_is_json_that_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.json"
    write_record(path, summarise(ROUNDS, "ours"))
    record = json.loads(path.read_text())
    assert record["rounds"] == ROUNDS
    assert set(record) == {"tokens_per_cpu_second", "spread", "ratio", "ratio_spread", "rounds"}


@pytest.mark.parametrize(("text", "heads"), [("64x3", 4), ("128x4", 4), ("256x6", 4), ("512x8", 8)])
def test_the_shapes_are_valid_configurations(text: str, heads: int) -> None:
    config = benchmark_config(Shape.parse(text), seq_length=80)
    assert f"{config.model.hidden_size}x{config.model.num_layers}" == text
    assert (config.model.num_attention_heads, config.model.num_query_groups) == (heads, heads // 2)
