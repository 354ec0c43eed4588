"""A KV cache of short blocks: block tables, shared prefixes, and admission. Plain Python."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ListOf

from megatron_rl.inference.block_manager import FEWEST_REUSED, Allocation, BlockManager, Copies, reusable
from megatron_rl.inference.sequence import Sequence
from megatron_rl.inference.snapshots import StateCopies, TruncatableCache

NULL_BLOCK = 0
"""Idle rows write to this block."""

_Content = tuple[int, tuple[int, ...]]
"""Key of a block's content: serial number of the previous block's content (0: none), and the block's tokens.

The tokens fill the block, or end at a snapshot of recurrent states.
"""


class BlockPool:
    """Blocks ``1 .. count`` with reference counts.

    Full blocks with known tokens can be shared. Unreferenced ones stay cached until they are needed, least recently
    used first. A partly filled block is copied instead of shared.
    """

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self.clear()

    def clear(self) -> None:
        """Free all blocks and forget their contents."""
        self._free = list(range(self.count, 0, -1))
        self._holders = [0] * (self.count + 1)
        self._known: dict[_Content, tuple[int, int]] = {}
        """Content -> its serial number and block. Serial numbers are never reused, so a block is found only behind the
        blocks that it was computed with.
        """
        self._contents: dict[int, list[_Content]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Unreferenced blocks with known content, least recently used first."""
        self._next_number = 1

    @property
    def available(self) -> int:
        """Unreferenced blocks."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Referenced blocks."""
        return self.count - self.available

    def is_idle(self, block: int) -> bool:
        """Return whether the block is cached but unreferenced."""
        return block in self._idle

    def take(self, number: int) -> list[int]:
        """Take ``number`` blocks to write to, of the `available` ones."""
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
        """Add a reference to each block."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def give_back(self, blocks: ListOf[int]) -> None:
        """Drop a reference to each block. The last ones are evicted first: they are useless without the earlier ones.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._contents:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def find(self, token_ids: tuple[int, ...]) -> list[int]:
        """Return the cached blocks of the longest known prefix, without a reference; the last may be partly filled."""
        return [block for _, block in self._chain(token_ids)]

    def remember(self, token_ids: tuple[int, ...], blocks: ListOf[int], to_the_end: bool = False) -> None:
        """Register ``token_ids`` as the content of ``blocks``: full blocks only, or with ``to_the_end`` all."""
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
        """List serial numbers and blocks of the longest known prefix."""
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
    """Admits a sequence if enough blocks are free for now, and unpromised for its expected length."""

    def __init__(
        self, rows: int, blocks_per_row: int, pool: BlockPool, reuse: bool = True, overcommit: float = 1.0,
        resume: TruncatableCache | None = None,
    ) -> None:  # fmt: skip
        """``overcommit``: how often blocks may be promised; 1 reserves each sequence's longest length. See `RowBlocks`.
        """
        self.pool = pool
        self._width = blocks_per_row
        self._reuse, self._resume = reuse, resume or TruncatableCache()
        self._overcommit = overcommit
        self._sequences: dict[int, Sequence] = {}
        self.table = array("i", [NULL_BLOCK]) * (rows * blocks_per_row)
        """Block table, row after row, padded with `NULL_BLOCK`."""
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
        """Copy the last, partly filled block; the others are shared."""
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
        """Release the blocks, which stay cached until their memory is needed."""
        states = self._resume.save(sequence, token_ids, is_turn) if is_turn else ()
        self._remember(sequence, token_ids, states)
        self.pool.give_back(sequence.block_table)
        self._write_row(sequence.row, [])
        sequence.block_table = []
        del self._sequences[sequence.row]
        return states

    def move(self, moves: ListOf[tuple[int, int]], length: int) -> Copies:
        """Update the block table; nothing is copied."""
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
        """Return the cached blocks of the longest usable prefix, and its length; the last may be partly filled."""
        most = reusable(len(token_ids)) if self._reuse else 0
        for length in self._resume.lengths(token_ids, most):
            found = self.pool.find(token_ids[:length])
            reused = min(length, len(found) * self.pool.block_size)
            if reused >= FEWEST_REUSED and (reused == length or self._resume.can_cut):
                return found, reused
        return [], 0

    def _needed(self, sequence: Sequence, lookahead: int) -> tuple[int, int]:
        """Return the blocks that a sequence needs now, and the blocks to promise it.

        The last token drawn is not fed, so it needs no slot. Preempted sequences reserve their longest length, so that
        they are not preempted again.
        """
        prompt = len(sequence.prefill_ids)
        longest, expected = prompt + sequence.remaining - 1, prompt + sequence.expected - 1
        soon = self._blocks_for(min(prompt + lookahead, longest))
        careful = sequence.preempted or self._overcommit == 1.0
        return soon, max(soon, self._blocks_for(longest if careful else expected))

    def _fitting(self, count: int, first: Sequence, shared: int, soon: int, later: int) -> int:
        """Return how many of ``count`` sequences fit, with ``shared`` blocks in all, ``soon`` and ``later`` each."""
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
