"""Blocks: which sequences hold them, what is found in them again, which go first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_rl.inference.paged_blocks import BlockPool, PagedBlocks
from megatron_rl.inference.sequence import SequenceGroup
from megatron_rl.types import Hints
from tests.support.generation import request

TEXT = tuple(range(100, 120))


def test_block_0_belongs_to_no_sequence() -> None:
    pool = BlockPool(3, 4)
    assert sorted(pool.take(3)) == [1, 2, 3]
    assert pool.available == 0


def test_a_block_is_free_when_its_last_holder_has_gone() -> None:
    pool = BlockPool(2, 4)
    pages = pool.take(1)
    pool.hold(pages)
    pool.give_back(pages)
    assert (pool.available, pool.held) == (1, 1)
    pool.give_back(pages)
    assert (pool.available, pool.held) == (2, 0)


def test_full_pages_are_found_as_far_as_the_tokens_agree() -> None:
    pool = BlockPool(5, 4)
    pages = pool.take(3)
    pool.remember(TEXT[:10], pages)
    assert pool.find(TEXT) == pages[:2], "the third is not full"
    assert pool.find(TEXT[:7]) == pages[:1]
    assert pool.find((*TEXT[:5], 0, 0, 0)) == pages[:1]
    assert pool.find((0, *TEXT)) == []
    # The same tokens behind others are another page: they attend to what is before them.
    assert pool.find((*TEXT[4:8], *TEXT[4:8])) == []


def test_known_pages_stay_until_their_room_is_needed_the_longest_idle_first() -> None:
    pool = BlockPool(4, 4)
    one, other = pool.take(2), pool.take(2)
    pool.remember(TEXT[:8], one)
    pool.remember((*TEXT[8:12], *TEXT[:4]), other)
    pool.give_back(one)
    pool.give_back(other)
    assert pool.available == 4
    # Of each sequence the end goes first: its beginning may serve others.
    assert pool.take(1) == [one[1]]
    assert pool.find(TEXT) == one[:1]
    assert pool.take(2) == [one[0], other[1]]
    assert pool.find(TEXT) == []
    assert pool.find(TEXT[8:]) == other[:1]


def test_what_is_held_again_does_not_go() -> None:
    pool = BlockPool(2, 4)
    pages = pool.take(1)
    pool.remember(TEXT[:4], pages)
    pool.give_back(pages)
    pool.hold(pool.find(TEXT))
    assert pool.take(1) != pages
    assert pool.available == 0


def test_a_page_is_not_found_behind_a_beginning_that_was_written_anew() -> None:
    """Page 2 was computed behind page 1; when 1 has gone, its successor with the same tokens leads elsewhere."""
    pool = BlockPool(2, 4)
    first, second = pool.take(2)
    pool.remember(TEXT[:8], [first, second])
    pool.give_back([first])
    assert pool.take(1) == [first]
    pool.remember(TEXT[:4], [first])
    assert pool.find(TEXT) == [first]


# -- promises ------------------------------------------------------------------------------------


def group(prompt: Sequence[int], samples: int, longest: int, expected: int, preempted: bool = False) -> SequenceGroup:
    """Of samples with ``longest`` tokens at most and ``expected`` ones, prompt included; the last drawn is not fed."""
    new = longest + 1 - len(prompt)
    asked = replace(request(prompt, samples, max_new_tokens=new), hints=Hints(expected + 1 - len(prompt)))
    made = SequenceGroup(0, asked, [0] * samples)
    for sequence in made.sequences:
        sequence.preempted = preempted
    return made


def admitted(blocks: PagedBlocks, preempted: bool = False) -> int:
    """Of 20 samples of a prompt of 6 with two tokens to come, 12 expected and 16 at most, into 8 rows."""
    sequences = group(range(6), 20, longest=16, expected=12, preempted=preempted).sequences
    allocation = blocks.allocate(sequences, list(range(8)), lookahead=2)
    return allocation.count if allocation else 0


@pytest.mark.parametrize(("blocks", "overcommit", "count"), [(10, 1.0, 3), (10, 1.5, 7), (10, 9.0, 8), (6, 9.0, 5)])
def test_how_many_are_admitted(blocks: int, overcommit: float, count: int) -> None:
    """A prompt of 6 in blocks of 4, 8 rows: one block is shared, a sample has 1 more soon, 2 probably, 3 at most.

    Of 10 blocks 9 are left: three times 3. Promised one and a half times, 14 are left: seven times 2. Promised more
    often, the 8 rows are the limit; of 6 blocks, the 5 that are there for what comes soon.
    """
    assert admitted(PagedBlocks(8, 4, BlockPool(blocks, 4), overcommit=overcommit)) == count


def test_a_preempted_sequence_comes_back_when_all_of_it_fits() -> None:
    assert admitted(PagedBlocks(8, 4, BlockPool(10, 4), overcommit=9.0), preempted=True) == 3


def test_groups_share_the_full_blocks_of_a_prompt() -> None:
    blocks = PagedBlocks(3, 4, BlockPool(12, 4))
    sequences = group(TEXT[:10], 3, longest=16, expected=16).sequences
    assert blocks.allocate(sequences, [0, 1, 2], lookahead=2).count == 3
    assert [sequence.row for sequence in sequences] == [0, 1, 2]
    tables = [sequence.block_table for sequence in sequences]
    assert [blocks.table[4 * row : 4 * row + 4].tolist() for row in range(3)] == [[*table, 0] for table in tables]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3, "the block that is not full is each sequence's own"
    assert blocks.share(sequences, 10) == ((tables[0][2], tables[1][2], 10), (tables[0][2], tables[2][2], 10))
