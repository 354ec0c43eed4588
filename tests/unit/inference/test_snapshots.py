"""Which snapshots of recurrent states there are, and which go first."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.inference.sequence import Sequence, SequenceGroup
from megatron_rl.inference.snapshots import Snapshots
from megatron_rl.types import Hints
from tests.support.generation import request

PROMPT, OTHER = (1, 2, 3), (7, 8, 9)


def sequence(row: int, goes_on: bool = True) -> Sequence:
    asked = replace(request(PROMPT), hints=Hints(goes_on=goes_on))
    (made,) = SequenceGroup(0, asked, [0]).sequences
    made.row = row
    return made


def test_a_prompt_goes_on_from_the_longest_that_it_begins_with() -> None:
    """Rows 0 to 3 are the batch's, and 4 to 6 hold snapshots."""
    snapshots = Snapshots(4, 3)
    assert snapshots.save(sequence(2), PROMPT) == ((2, 6),)
    assert snapshots.save(sequence(2), (*PROMPT, 4, 5), is_turn=True) == ((2, 5),)
    assert list(snapshots.lengths((*PROMPT, 4, 5, 6), 6)) == [5, 3]
    assert list(snapshots.lengths((*PROMPT, 4, 5, 6), 4)) == [3]
    assert list(snapshots.lengths((*PROMPT, 4, 9, 6), 6)) == [3], "its history was rewritten"
    assert snapshots.load((*PROMPT, 4, 5), 0) == ((5, 0),)


def test_what_a_longer_one_has_replaced_goes_first() -> None:
    snapshots = Snapshots(4, 3)
    for row, ids in enumerate((OTHER, PROMPT, (*PROMPT, 4))):
        snapshots.save(sequence(row), ids)
    assert snapshots.save(sequence(3), (5,)) == ((3, 5),), "of the prompt, though the other's was kept before"
    assert snapshots.save(sequence(3), (6,)) == ((3, 6),), "then the least recently used"


def test_what_no_turn_will_ask_for_goes_first_and_leaves_none_at_its_end() -> None:
    snapshots = Snapshots(4, 2)
    snapshots.save(sequence(0), PROMPT)
    assert snapshots.save(sequence(1, goes_on=False), OTHER) == ((1, 4),)
    assert snapshots.save(sequence(1, goes_on=False), (*OTHER, 1), is_turn=True) == ()
    assert snapshots.save(sequence(2, goes_on=False), (4,)) == ((2, 4),)
    assert list(snapshots.lengths(PROMPT, 3)) == [3]


def test_on_stages_prompts_alone_leave_one() -> None:
    snapshots = Snapshots(4, 2, at_turns=False)
    assert snapshots.save(sequence(0), (*PROMPT, 1), is_turn=True) == ()
    assert snapshots.save(sequence(0), PROMPT) == ((0, 5),)
