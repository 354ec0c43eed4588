"""How long groups are expected to become, and which rank gets them; numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

from megatron_rl.rollout.collector import Collector
from megatron_rl.rollout.prompt_source import ExpectedLengths, RequestFactory
from megatron_rl.types import Request, SamplingParams, SourcedTask, Task

LIMIT = 100


def source(task: str, environment: str = "toy") -> SourcedTask:
    return SourcedTask(environment, Task(task, task))


def request(task: str, environment: str = "toy", prompt: int = 10, samples: int = 4) -> Request:
    return Request(
        source(task, environment), (1,) * prompt, samples, SamplingParams(max_new_tokens=LIMIT), index=0
    )


def test_the_limit_is_expected_of_what_was_never_seen() -> None:
    assert ExpectedLengths().tokens(request("a")) == 10 + 4 * LIMIT


def test_a_task_is_expected_as_it_was_and_others_as_their_environment() -> None:
    expected = ExpectedLengths()
    expected.learn([(source("a"), 20.0), (source("b"), 50.0), (source("a", "other"), 7.5)])
    assert expected.tokens(request("a")) == 10 + 4 * 20
    assert expected.tokens(request("c", prompt=3)) == 3 + 4 * 35  # (20 + 50) / 2
    assert expected.tokens(request("a", "other", samples=1)) == 10 + 8  # 7.5 rounds to even
    assert expected.tokens(request("a", "third")) == 10 + 4 * LIMIT
    expected.learn([(source("a"), 80.0)])
    assert expected.tokens(request("a")) == 10 + 4 * 80  # as it was last
    assert expected.tokens(request("c")) == 10 + 4 * 50  # (20 + 50 + 80) / 3


def test_the_mean_of_an_environment_follows_its_last_groups() -> None:
    expected = ExpectedLengths()
    expected.learn([(source(str(number)), 10.0) for number in range(1024)])
    expected.learn([(source("a"), 10.0 + 2560)])
    # a 256th of the way to 2570; of all 1025 groups it would be 12.5
    assert expected.tokens(request("b", samples=1)) == 10 + 20


def test_a_full_table_keeps_what_it_has() -> None:
    expected = ExpectedLengths()
    expected.learn([(source("a"), 10.0), (source("b"), 20.0)])
    expected.learn([(source(str(number)), 30.0) for number in range(19_998)])
    expected.learn([(source("c"), 60.0), (source("b"), 40.0)])
    assert [expected.tokens(request(task, samples=1)) - 10 for task in "abc"] == [10, 40, 30]  # c: as its environment
    assert len(expected.state_dict()["toy"]["tasks"]) == 20_000


def test_the_state_goes_through_json() -> None:
    expected, again = ExpectedLengths(), ExpectedLengths()
    expected.learn([(source("a"), 1 / 3), (source("7"), 20.25), (source("a", "other"), 0.1)])
    state = expected.state_dict()
    again.load_state_dict(json.loads(json.dumps(state)))
    assert again.state_dict() == state
    again.learn([(source("b"), 3.0)])
    assert expected.state_dict() == state, "the states share a table"
    assert state["toy"]["tasks"] == {"a": 0.3, "7": 20.2}


def test_a_checkpoint_without_it_begins_anew() -> None:
    expected = ExpectedLengths()
    expected.learn([(source("a"), 20.0)])
    expected.load_state_dict({})
    assert expected.tokens(request("a")) == 10 + 4 * LIMIT


def dealt(lengths: dict[str, float], tasks: str, ranks: int, environments: str = "t") -> list[list[int]]:
    """The groups of every rank when ``lengths`` were seen: two samples each, prompts of one token.

    The tasks are of the ``environments`` by turns; what was seen is of the first.
    """
    expected = ExpectedLengths()
    expected.learn([(source(task, environments[0]), length) for task, length in lengths.items()])
    sources = map(source, tasks, cycle(environments))
    draws = [replace(one, prompt_ids=(1,)) for one in sources]
    found = []
    for rank in range(ranks):
        factory = RequestFactory(SamplingParams(max_new_tokens=LIMIT), 200)
        groups = SimpleNamespace(rollout_rank=rank, rollout_size=ranks)
        collector = Collector(
            None, factory, None, groups, expected, prompts_per_step=len(draws), group_size=2, max_failed_share=0
        )
        requests = collector.requests_of_this_rank(draws)
        assert [r.source.task.id for r in requests] == [tasks[r.index] for r in requests]
        found.append([r.index for r in requests])
    return found


def test_the_longest_groups_are_dealt_first() -> None:
    """Costs 1 + 2 x length: d 201 alone; a 61, b 41, c 21 and e 41 make 164. In turn it would be 123 and 242."""
    assert dealt({"a": 30, "b": 20, "c": 10, "d": 100, "e": 20}, "abcde", 2) == [[3], [0, 1, 2, 4]]


def test_groups_of_which_nothing_is_known_are_dealt_in_turn() -> None:
    assert dealt({}, "abcdefg", 3) == [[0, 3, 6], [1, 4], [2, 5]]


def test_every_rank_gets_some_of_every_environment() -> None:
    """Drawn by turns, x y x y x y x y, and nothing known of either: not all of x on one rank, all of y on the other."""
    assert dealt({}, "abcdefgh", 2, environments="xy") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_every_rank_has_a_group_when_there_are_enough() -> None:
    """However long one of them is: 4 groups, 4 ranks."""
    assert sorted(dealt({"a": 100, "b": 0, "c": 0, "d": 0}, "abcd", 4)) == [[0], [1], [2], [3]]
    assert dealt({"a": 100, "b": 5}, "ab", 3) == [[0], [1], []]
