"""Pages: who holds them, what is found in them again, which go first."""

from __future__ import annotations

import pytest

from megatron_rl.inference.blocks import PagePool
from megatron_rl.inference.page_storage import PageStorage
from megatron_rl.inference.storage import Need

TEXT = tuple(range(100, 120))


def test_page_0_is_nobodys() -> None:
    pool = PagePool(3, 4)
    assert sorted(pool.take(3)) == [1, 2, 3]
    assert pool.available == 0


def test_a_page_is_free_when_its_last_holder_has_gone() -> None:
    pool = PagePool(2, 4)
    pages = pool.take(1)
    pool.hold(pages)
    pool.give_back(pages)
    assert (pool.available, pool.holders(pages[0])) == (1, 1)
    pool.give_back(pages)
    assert (pool.available, pool.held) == (2, 0)


def test_full_pages_are_found_as_far_as_the_tokens_agree() -> None:
    pool = PagePool(5, 4)
    pages = pool.take(3)
    pool.learn(TEXT[:10], pages)
    assert pool.find(TEXT) == pages[:2], "the third is not full"
    assert pool.find(TEXT[:7]) == pages[:1]
    assert pool.find((*TEXT[:5], 0, 0, 0)) == pages[:1]
    assert pool.find((0, *TEXT)) == []
    # The same tokens behind others are another page: they attend to what is before them.
    assert pool.find((*TEXT[4:8], *TEXT[4:8])) == []


def test_known_pages_stay_until_their_room_is_needed_the_longest_idle_first() -> None:
    pool = PagePool(4, 4)
    one, other = pool.take(2), pool.take(2)
    pool.learn(TEXT[:8], one)
    pool.learn((*TEXT[8:12], *TEXT[:4]), other)
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
    pool = PagePool(2, 4)
    pages = pool.take(1)
    pool.learn(TEXT[:4], pages)
    pool.give_back(pages)
    pool.hold(pool.find(TEXT))
    assert pool.take(1) != pages
    assert pool.available == 0


def test_a_page_is_not_found_behind_a_beginning_that_was_written_anew() -> None:
    """Page 2 was computed behind page 1; when 1 has gone, its successor with the same tokens leads elsewhere."""
    pool = PagePool(2, 4)
    first, second = pool.take(2)
    pool.learn(TEXT[:8], [first, second])
    pool.give_back([first])
    assert pool.take(1) == [first]
    pool.learn(TEXT[:4], [first])
    assert pool.find(TEXT) == [first]


# -- promises ------------------------------------------------------------------------------------


def entered(storage: PageStorage, slots: int, samples: int, prompt: int, need: Need, start: int = 0) -> int:
    tokens = range(start, start + prompt)
    entry = storage.enter(list(range(slots)), tuple(tokens), samples, need)
    return len(entry.slots) if entry else 0


@pytest.mark.parametrize(("pages", "overcommit", "count"), [(10, 1.0, 3), (10, 1.5, 7), (10, 9.0, 8), (6, 9.0, 5)])
def test_how_many_enter(pages: int, overcommit: float, count: int) -> None:
    """A prompt of 6 in pages of 4, 8 slots: one page is shared, a sample has 1 more soon, 2 probably, 3 at most.

    Of 10 pages 9 are left: three times 3. Promised one and a half times, 14 are left: seven times 2. Promised more
    often, the 8 slots are the limit; of 6 pages, the 5 that are there for what comes soon.
    """
    storage = PageStorage(8, 4, PagePool(pages, 4), overcommit=overcommit)
    assert entered(storage, 8, 20, 6, Need(soon=8, longest=16, expected=12)) == count


def test_who_was_pre_empted_comes_back_when_all_of_it_fits() -> None:
    storage = PageStorage(8, 4, PagePool(10, 4), overcommit=9.0)
    assert entered(storage, 8, 20, 6, Need(soon=8, longest=16, expected=12, returning=True)) == 3


def test_groups_share_the_full_pages_of_a_prompt() -> None:
    storage = PageStorage(3, 4, PagePool(12, 4))
    entry = storage.enter([0, 1, 2], TEXT[:10], 3, Need(soon=12, longest=16, expected=16))
    assert entry.slots == (0, 1, 2)
    rows = [storage.table[4 * slot : 4 * slot + 4].tolist() for slot in range(3)]
    assert rows[0][:2] == rows[1][:2] == rows[2][:2]
    assert len({row[2] for row in rows}) == 3, "the page that is not full is everybody's own"
    assert {row[3] for row in rows} == {0}
    assert storage.share(entry.slots, 10).pairs == ((rows[0][2], rows[1][2]), (rows[0][2], rows[2][2]))
