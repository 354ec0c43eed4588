"""A KV cache of short blocks: which sequence has which, which are shared, and how many are promised. Plain Python."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ListOf

from megatron_rl.inference.block_manager import FEWEST_REUSED, Allocation, BlockManager, Copies, reusable
from megatron_rl.inference.sequence import Sequence
from megatron_rl.inference.snapshots import AnyPosition, StateCopies

NULL_BLOCK = 0
"""The block that rows without a sequence write to."""

_Content = tuple[int, tuple[int, ...]]
"""Serial number of the content of the block before (0: it is the first), and the block's own tokens.

These fill the block, or lead up to a snapshot of recurrent states.
"""


class BlockPool:
    """Blocks ``1 .. count`` with reference counts.

    A full block whose tokens are known may be held by several sequences, and is kept when none holds it any more,
    until it is needed: the block longest without a holder goes first. One that is not full is copied instead.
    """

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self.clear()

    def clear(self) -> None:
        """Free all blocks, and forget their contents."""
        self._free = list(range(self.count, 0, -1))
        self._holders = [0] * (self.count + 1)
        self._known: dict[_Content, tuple[int, int]] = {}
        """Content -> its serial number, never used again so that a block is found only behind the very blocks it was
        computed with, and its block."""
        self._contents: dict[int, list[_Content]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Known blocks without a holder, the longest idle first."""
        self._next_number = 1

    @property
    def available(self) -> int:
        """Blocks without a holder."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Blocks with holders, each counted once."""
        return self.count - self.available

    def is_idle(self, block: int) -> bool:
        """Return whether the block has no holder, but known content."""
        return block in self._idle

    def take(self, number: int) -> list[int]:
        """Take blocks to write to; there must be as many `available`."""
        taken = []
        for _ in range(number):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                for content in self._contents.pop(block):
                    del self._known[content]
            self._holders[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Count one holder more of each block."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def give_back(self, blocks: ListOf[int]) -> None:
        """Count one holder less. The last blocks go first: without those before them they are useless."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._contents:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def find(self, token_ids: tuple[int, ...]) -> list[int]:
        """Find the blocks that hold the beginning of ``token_ids``, as far as it is known; they are not yet held.

        The last may be one that its tokens do not fill.
        """
        return [block for _, block in self._chain(token_ids)]

    def remember(self, token_ids: tuple[int, ...], blocks: ListOf[int], to_the_end: bool = False) -> None:
        """Note that ``blocks`` hold ``token_ids``: full ones can be found from now on, or with ``to_the_end`` all."""
        known, size = self._chain(token_ids), self.block_size
        before = known[-1][0] if known else 0
        for index in range(len(known), -(-len(token_ids) // size) if to_the_end else len(token_ids) // size):
            block, tokens = blocks[index], token_ids[index * size : (index + 1) * size]
            contents = self._contents.setdefault(block, [])
            if any(len(held) >= len(tokens) for _, held in contents):  # behind a twin of the block before
                return
            content = before, tokens
            contents.append(content)
            before = self._next_number
            self._known[content] = before, block
            self._next_number += 1

    def _chain(self, token_ids: tuple[int, ...]) -> list[tuple[int, int]]:
        """List serial numbers and blocks of what is known of the beginning."""
        found: list[tuple[int, int]] = []
        size, before = self.block_size, 0
        for start in range(0, len(token_ids), size):
            known = self._known.get((before, token_ids[start : start + size]))
            if known is None:
                break
            found.append(known)
            before = known[0]
        return found


class PagedBlocks(BlockManager):
    """A sequence is admitted when the blocks it needs soon are free and what it may need is not promised to others."""

    def __init__(
        self, rows: int, blocks_per_row: int, pool: BlockPool, reuse: bool = True, overcommit: float = 1.0,
        resume: AnyPosition | None = None,
    ) -> None:  # fmt: skip
        """``overcommit`` is how often the blocks may be promised; 1 keeps to the longest length of every sequence.

        ``reuse`` and ``resume`` as in `RowBlocks`.
        """
        self.pool = pool
        self._width = blocks_per_row
        self._reuse, self._resume = reuse, resume or AnyPosition()
        self._overcommit = overcommit
        self._sequences: dict[int, Sequence] = {}
        self.table = array("i", [NULL_BLOCK]) * (rows * blocks_per_row)
        """Row after row, the block of each stretch of its sequence; `NULL_BLOCK` where there is none."""
        self._changed = True

    @property
    def usage(self) -> tuple[int, int]:
        return self.pool.held, self.pool.count

    def num_cached(self, token_ids: tuple[int, ...]) -> int:
        return self._found(token_ids)[1]

    def allocate(self, sequences: ListOf[Sequence], free: list[int], lookahead: int) -> Allocation | None:
        pool, first = self.pool, sequences[0]
        token_ids = first.prefill_ids
        found, reused = ([], 0) if first.request.hints.scores_prompt else self._found(token_ids)
        found, partial = found[: reused // pool.block_size], found[reused // pool.block_size :]
        full = len(token_ids) // pool.block_size
        soon, later = self._needed(first, lookahead)
        shared = sum(map(pool.is_idle, found)) - len(found) + full
        count = self._fitting(min(len(sequences), len(free)), first, shared, soon - full, later - full)
        if count == 0:
            return None
        pool.hold(found)
        leader = found + pool.take(soon - len(found))
        for sequence, row in zip(sequences[:count], sorted(free)[:count], strict=True):
            sequence.row, sequence.blocks_promised = row, later
            if sequence is first:
                blocks = leader
            else:
                pool.hold(leader[:full])
                blocks = leader[:full] + pool.take(soon - full)
            self._set(sequence, blocks)
        copies = tuple((block, leader[len(found)], reused) for block in partial)
        return Allocation(count, reused, copies, self._resume.load(token_ids[:reused], first.row) if reused else ())

    def share(self, sequences: ListOf[Sequence], length: int) -> Copies:
        """Copy the last block where the prompt does not fill it; the others are shared."""
        full, rest = divmod(length, self.pool.block_size)
        own = [sequence.block_table[full] for sequence in sequences] if rest else []
        return tuple((own[0], block, length) for block in own[1:])

    def remember(self, sequences: ListOf[Sequence], token_ids: tuple[int, ...]) -> StateCopies:
        return self._remember(sequences[0], token_ids, self._resume.save(sequences[0], token_ids))

    def _remember(self, sequence: Sequence, token_ids: tuple[int, ...], states: StateCopies) -> StateCopies:
        if self._reuse:
            self.pool.remember(token_ids, sequence.block_table, to_the_end=bool(states))
        return states

    def extend(self, sequence: Sequence, length: int) -> bool:
        missing = self._blocks_for(length) - len(sequence.block_table)
        if missing > self.pool.available:
            return False
        if missing > 0:
            self._set(sequence, sequence.block_table + self.pool.take(missing))
        return True

    def free(self, sequence: Sequence, token_ids: tuple[int, ...], is_turn: bool = False) -> StateCopies:
        """Keep the contents of the blocks until their room is needed."""
        states = self._resume.save(sequence, token_ids, is_turn) if is_turn else ()
        self._remember(sequence, token_ids, states)
        self.pool.give_back(sequence.block_table)
        self._write_row(sequence.row, [])
        sequence.block_table = []
        del self._sequences[sequence.row]
        return states

    def move(self, moves: ListOf[tuple[int, int]], length: int) -> Copies:
        """Change rows of the table; nothing is copied."""
        for source, _ in moves:
            self._write_row(source, [])
            sequence = self._sequences.pop(source)
            self._set(sequence, sequence.block_table)
        return ()

    def changed_table(self) -> array | None:
        changed, self._changed = self._changed, False
        return self.table if changed else None

    def clear(self) -> None:
        for row in self._sequences:
            self._write_row(row, [])
        self._sequences.clear()
        self.pool.clear()
        self._resume.clear()

    def _found(self, token_ids: tuple[int, ...]) -> tuple[list[int], int]:
        """Return blocks from which a prompt goes on, and how many tokens they hold; the last may not be full."""
        most = reusable(len(token_ids)) if self._reuse else 0
        for length in self._resume.lengths(token_ids, most):
            found = self.pool.find(token_ids[:length])
            reused = min(length, len(found) * self.pool.block_size)
            if reused >= FEWEST_REUSED and (reused == length or self._resume.can_cut):
                return found, reused
        return [], 0

    def _needed(self, sequence: Sequence, lookahead: int) -> tuple[int, int]:
        """Return the blocks that a sequence takes now, and the blocks to promise it.

        The last token drawn is not fed, so it takes no room. A sequence that was preempted comes back when all of it
        fits, lest it be preempted again.
        """
        prompt = len(sequence.prefill_ids)
        longest, expected = prompt + sequence.remaining - 1, prompt + sequence.expected - 1
        soon = self._blocks_for(min(prompt + lookahead, longest))
        careful = sequence.preempted or self._overcommit == 1.0
        return soon, max(soon, self._blocks_for(longest if careful else expected))

    def _fitting(self, count: int, first: Sequence, shared: int, soon: int, later: int) -> int:
        """Return how many of ``count`` may be admitted, at ``shared`` blocks together, ``soon`` and ``later`` each."""
        limit = self.pool.count * (1.0 if first.preempted else self._overcommit)
        promised = sum(max(0, s.blocks_promised - len(s.block_table)) for s in self._sequences.values())
        free = self.pool.available - shared
        unpromised = limit - self.pool.held - promised - shared
        while count and (count * soon > free or count * later > unpromised):
            count -= 1
        return count

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _set(self, sequence: Sequence, blocks: list[int]) -> None:
        sequence.block_table = blocks
        self._sequences[sequence.row] = sequence
        self._write_row(sequence.row, blocks)

    def _write_row(self, row: int, blocks: list[int]) -> None:
        start = row * self._width
        self.table[start : start + self._width] = array("i", blocks + [NULL_BLOCK] * (self._width - len(blocks)))
        self._changed = True
