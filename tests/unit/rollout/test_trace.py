"""Sequences of a tree of turns, by hand."""

from __future__ import annotations

from megatron_rl.rollout.trace import Trace
from megatron_rl.types import Branch, Completion


def wrote(*ids: int, reason: str = "stop") -> Completion:
    """With the log-prob ``-id`` of each token."""
    return Completion(ids, tuple(-float(token) for token in ids), reason, policy_version=3)


def test_a_path_is_one_sequence() -> None:
    trace = Trace()
    assert trace.begin(0, None, (1, 2)) == (1, 2)
    trace.answer(0, wrote(3, 9))
    assert trace.begin(4, 0, (5,)) == (1, 2, 3, 9, 5)
    trace.answer(4, wrote(6, 7, reason="length"))
    assert (trace.depth(0), trace.depth(4)) == (0, 1)
    assert trace.sequences() == [
        Branch((1, 2), Completion((3, 9, 5, 6, 7), (-3.0, -9.0, 0.0, -6.0, -7.0), "length", 3, ((2, 3),)))
    ]


def test_every_token_that_was_written_is_in_one_completion() -> None:
    """Call 1 and call 3 both go on from call 0, call 4 from call 1, and call 5 begins anew."""
    trace = Trace()
    for number, after, ids, answer in (
        (5, None, (5,), (15,)),
        (0, None, (1,), (10,)),
        (3, 0, (3,), (13,)),
        (1, 0, (2,), (11,)),
        (4, 1, (4,), (14,)),
    ):
        trace.begin(number, after, ids)
        trace.answer(number, wrote(*answer))
    first, second, third = trace.sequences()
    assert (first.prompt_ids, first.completion.token_ids) == ((1,), (10, 2, 11, 4, 14))
    assert first.completion.environment_spans == ((1, 2), (3, 4))
    assert (second.prompt_ids, second.completion.token_ids) == ((1, 10, 3), (13,))
    assert (third.prompt_ids, third.completion.token_ids) == ((5,), (15,))
    assert second.completion.environment_spans == third.completion.environment_spans == ()


def test_calls_without_an_answer_do_not_count() -> None:
    """A call that the harness gave up and made again is a turn of the same sequence."""
    trace = Trace()
    trace.begin(0, None, (1,))
    trace.answer(0, wrote(10))
    trace.begin(1, 0, (2,))
    trace.begin(2, 0, (2,))
    trace.answer(2, wrote(12))
    assert [branch.completion.token_ids for branch in trace.sequences()] == [(10, 2, 12)]
    trace.answer(1, wrote(11))  # too late
    assert [branch.completion.token_ids for branch in trace.sequences({0, 2})] == [(10, 2, 12)]
    assert trace.sequences(()) == []


def test_going_on_without_reading_leaves_no_span() -> None:
    trace = Trace()
    trace.begin(0, None, (1,))
    trace.answer(0, wrote(10))
    trace.begin(1, 0, ())
    trace.answer(1, wrote(11))
    assert trace.sequences()[0].completion.environment_spans == ()
    (rewarded,) = trace.sequences(rewards={0: 1.0, 1: 2.0}, at_end=4.0)
    assert rewarded.completion.turn_rewards == (7.0,)


def test_sequences_do_not_depend_on_the_order_of_the_calls() -> None:
    trees = []
    for order in ((1, 2, 3), (3, 1, 2), (2, 3, 1)):
        trace = Trace()
        trace.begin(0, None, (1,))
        trace.answer(0, wrote(10))
        for number, last in enumerate(order, start=1):
            trace.begin(number, 0, (2,))
            trace.answer(number, wrote(10 + last))
        trees.append(trace.sequences())
    assert trees[0] == trees[1] == trees[2]
    assert [branch.completion.token_ids for branch in trees[0]] == [(10, 2, 11), (12,), (13,)]
