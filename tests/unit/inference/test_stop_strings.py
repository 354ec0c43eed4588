"""Where a completion ends when a text ends it."""

from __future__ import annotations

import pytest

from megatron_rl.inference.batch_state import truncate_at_stop

PIECES = ["a", "b", "</", "answer", ">", ">y", "", "\n\nQ:"]


def decode(token_ids: list[int]) -> str:
    return "".join(PIECES[i] for i in token_ids)


@pytest.mark.parametrize(
    ("token_ids", "stop", "kept"),
    [
        pytest.param([0, 1, 0], ["ba"], 3, id="completed by the last token"),
        pytest.param([0, 1, 0, 1], ["ab"], 2, id="the first occurrence counts"),
        pytest.param([0, 2, 3, 4, 1], ["</answer>"], 4, id="spread over three tokens"),
        pytest.param([0, 2, 3, 5, 1], ["</answer>"], 4, id="completed in the middle of a token"),
        pytest.param([0, 7, 1], ["\n\n"], 2, id="inside one token"),
        pytest.param([0, 2, 3], ["</answer>"], None, id="not complete yet"),
        pytest.param([0, 1], ["zz"], None, id="absent"),
        pytest.param([0, 0, 1, 1], ["bb", "ab"], 3, id="the earlier of two strings"),
        pytest.param([0, 6, 6, 1], ["ab"], 4, id="tokens without text in between"),
        pytest.param([6, 0, 6], ["a"], 2, id="nothing behind the string is kept"),
        pytest.param([0], ["a"], 1, id="a single token"),
        pytest.param([0, 1], [], None, id="no stop strings"),
    ],
)
def test_tokens_kept(token_ids: list[int], stop: list[str], kept: int | None) -> None:
    assert truncate_at_stop(token_ids, stop, decode) == kept


def test_nothing_that_is_complete_within_the_least_counts() -> None:
    """Against the plain definition: the first place behind the least where a string has just become complete."""
    stop = ["ab", "b>", "a", ">y"]
    for number in range(len(PIECES) ** 4):
        ids = [number // len(PIECES) ** place % len(PIECES) for place in range(4)]
        for least in (1, 2, 4, 9):
            before = len(decode(ids[:least]))
            ends = [at + len(s) for s in stop for at in range(len(decode(ids))) if decode(ids).startswith(s, at)]
            hits = [n for n in range(1, 5) if any(before < end <= len(decode(ids[:n])) for end in ends)]
            assert truncate_at_stop(ids, stop, decode, least) == (hits[0] if hits else None)


def test_agrees_with_looking_after_every_token() -> None:
    """The bisection against the plain definition, on all sequences of four pieces."""
    stop = ["ab", "b>", "</answer>", "y\n"]
    for number in range(len(PIECES) ** 4):
        ids = [number // len(PIECES) ** place % len(PIECES) for place in range(4)]
        hits = [n for n in range(1, 5) if any(text in decode(ids[:n]) for text in stop)]
        assert truncate_at_stop(ids, stop, decode) == (hits[0] if hits else None)
