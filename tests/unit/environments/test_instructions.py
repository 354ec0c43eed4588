"""What keeps to an instruction, and what only looks as if it did."""

from __future__ import annotations

import pytest

from environments.instructions import KINDS, Instructions
from megatron_rl.types import Task, Transcript


def keeps(kind, wanted, text):
    return KINDS[kind][1](text, wanted)


@pytest.mark.parametrize(
    ("kind", "wanted", "right", "wrong"),
    [
        ("one_word", None, ["Blue", "blue.", "well-known", "don't"], ["Deep blue", "- blue sky", "a, b"]),
        ("most_words", 5, ["one", "It's one two three four."], ["one two three four five six"]),
        ("bullets", 2, ["- a\n- b", "- a\n\n- b\n", "* a\n* b"],
         ["- a", "- a\n- b\n- c", "Sure:\n- a\n- b", "-a\n-b", "- a\n- "]),
        (
            "json", ["name", "reason"],
            ['{"reason": "x", "name": 3}', '{"name": ["a"], "reason": false}'],
            ['{"name": "x"}', '{"name": "x", "reason": ""}', '{"name": "x", "reason": "y", "more": 1}', "[1]",
             "name, reason",
             '```json\n{"name": "x", "reason": "y"}\n```', "[" * 100_000],
        ),
        ("capitals", None, ["A CAT.", "ÄÖ 5"], ["A cat", "a"]),
        ("small_letters", None, ["a cat.", "5 é"], ["A cat"]),
        ("no_comma", None, ["a b"], ["a, b"]),
        ("mentions", "cat", ["The Cat sat.", "cat"], ["cats", "concatenate", "dog"]),
        ("ending", "The end.", ["So it was. The end.", "THE END."], ["The end. Or not", "The end"]),
    ],
)  # fmt: skip
def test_each_kind_tells_right_from_wrong(kind, wanted, right, wrong):
    assert [text for text in right if not keeps(kind, wanted, text)] == []
    assert [text for text in wrong if keeps(kind, wanted, text)] == []


def graded(text, finish_reason="end_of_text"):
    task = Task("t", "?", {"instructions": [{"kind": "capitals", "wanted": None}, {"kind": "most_words", "wanted": 5}]})
    return Instructions().grade(task, Transcript(text, finish_reason, 3))


def test_the_reward_is_the_share_that_is_kept():
    assert [graded(text).reward for text in ("A CAT", "a cat", "one two three four five six")] == [1.0, 0.5, 0.0]
    assert graded("a cat").metrics == {"capitals": 0.0, "most_words": 1.0}
    assert [graded(text).status for text in ("A CAT", "a cat")] == ["correct", "wrong"]


@pytest.mark.parametrize("text", ["", "  ", "...", "- \n- "])
def test_an_answer_without_a_word_keeps_to_nothing(text):
    assert (graded(text).reward, graded(text).status) == (0.0, "no_answer")


def test_an_answer_that_was_cut_keeps_to_nothing():
    assert graded("A CAT", "length").reward == 0.0


def test_no_prompt_is_in_both_splits_and_all_kinds_come_up():
    environment = Instructions()
    splits = {split: list(environment.tasks(split)) for split in ("train", "test")}
    ids = {split: {task.id for task in tasks} for split, tasks in splits.items()}
    assert (len(ids["train"]), len(ids["test"])) == (512, 128)
    assert not ids["train"] & ids["test"]
    for tasks in splits.values():
        assert {each["kind"] for task in tasks for each in task.data["instructions"]} == set(KINDS)


@pytest.mark.parametrize("options", [{"count": 0}, {"most": 4}, {"count": 5000}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="use 1 to"):
        Instructions(**options)
