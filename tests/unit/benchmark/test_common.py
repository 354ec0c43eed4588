"""What the benchmarks compute apart from the measuring itself."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest

from tools.benchmark.common import (
    Shape,
    benchmark_config,
    compete,
    summarise,
    tokens_per_cpu_second,
    write_record,
)

ROUNDS = [{"ours": 20.0, "hf": 10.0}, {"hf": 5.0, "ours": 15.0}, {"ours": 40.0, "hf": 10.0}]


def test_contenders_alternate_after_a_round_that_does_not_count() -> None:
    turns: list[tuple[str, int]] = []

    def contender(name: str, index: int) -> float:
        turns.append((name, index))
        return 10.0 * index

    rounds = compete({name: partial(contender, name) for name in "ab"}, rounds=2)
    assert turns == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert rounds == [{"a": 10.0, "b": 10.0}, {"a": 20.0, "b": 20.0}]
    assert [list(reached) for reached in rounds] == [["a", "b"], ["a", "b"]], "the first is compared with the others"


def test_work_that_is_short_is_repeated() -> None:
    done: list[int] = []

    def work(index: int) -> int:
        done.append(index)
        sum(range(10_000))
        return 3

    started = time.process_time()
    speed = tokens_per_cpu_second(work, 7, at_least=0.01)
    assert set(done) == {7} and len(done) > 1
    assert 0 < 3 * len(done) / speed <= time.process_time() - started


def test_medians_and_spread_by_contender() -> None:
    summary = summarise(ROUNDS)
    assert summary["median"] == {"ours": 20.0, "hf": 10.0}
    assert summary["spread"] == {"ours": [15.0, 40.0], "hf": [5.0, 10.0]}


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    # 2, 3 and 4; the ratio of the medians would be 2
    assert summarise(ROUNDS)["ratio"] == {"ours/hf": 3.0}


def test_alone_there_is_no_ratio() -> None:
    assert summarise([{"ours": 1.0}])["ratio"] == {}


def test_a_record_is_json_that_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.json"
    write_record(path, summarise(ROUNDS))
    record = json.loads(path.read_text())
    assert record["rounds"] == ROUNDS
    assert set(record) == {"median", "spread", "ratio", "ratio_spread", "rounds"}


@pytest.mark.parametrize(("text", "heads"), [("64x3", 4), ("128x4", 4), ("256x6", 4), ("512x8", 8)])
def test_the_shapes_are_valid_configurations(text: str, heads: int) -> None:
    config = benchmark_config(Shape.parse(text), seq_length=80)
    assert f"{config.model.hidden_size}x{config.model.num_layers}" == text
    assert (config.model.num_attention_heads, config.model.num_query_groups) == (heads, heads // 2)
