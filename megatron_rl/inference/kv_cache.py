"""The key-value cache in the two layouts that attention backends read, and its size for a memory budget.

    RowCache     [rows, heads, max_length, width] per layer: a row of the batch is contiguous
    PagedCache   [blocks, block_size, heads, width] per layer: a block table locates a row's tokens

A slot mapping gives the cache indices of new tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch

from megatron_rl.arithmetic import FEWEST_KEYS, FEWEST_ROWS
from megatron_rl.errors import EngineError
from megatron_rl.families import LayerCache, ModelLayout
from megatron_rl.inference.block_manager import BlockManager, RowBlocks
from megatron_rl.inference.engine import EngineOptions
from megatron_rl.inference.paged_blocks import BlockPool, PagedBlocks
from megatron_rl.inference.snapshots import Snapshots, TruncatableCache
from megatron_rl.inference.states import RowStates
from megatron_rl.models.attention.kv_format import KVFormat
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.device import to_device


class Cache(ABC):
    """Keys and values of all layers; the writable `KVCache`."""

    slot_dims: int
    """Trailing dimensions of one slot: 1, a head's [width], or 2, a token's [heads, width]."""

    def __init__(
        self, layers: Sequence[LayerCache], rows: int, max_length: int, dtype: torch.dtype, device: torch.device,
        stored: torch.dtype | None = None, grid: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """``dtype``: the model's; ``stored``: see `KVFormat`; ``grid``: default (rows, max_length)."""
        self.max_length = max_length
        self.dtype = dtype
        self.device = device
        self.heads = layers[0].heads
        self.format = KVFormat(len(layers), self.heads, dtype, stored, device)
        self.rows = torch.arange(rows, device=device)
        self.grid = grid or (rows, max_length)
        """(rows, max_length) or (blocks, block_size): one token per cell."""

        # Zeroed: the uninitialized memory of torch.empty could make a masked slot 0 * NaN = NaN.
        def zeros(layer: LayerCache, width: int) -> torch.Tensor:
            return torch.zeros(self.shape(layer.heads, width), dtype=self.format.storage, device=device)

        self.keys = [zeros(layer, layer.key_width) for layer in layers]
        self.is_latent = layers[0].is_latent
        """True if the cache stores MLA latents: ``values`` are then views of ``keys``."""
        pairs = zip(layers, self.keys, strict=True)
        self.values = [
            keys[..., : layer.value_width] if self.is_latent else zeros(layer, layer.value_width)
            for layer, keys in pairs
        ]
        self.states: RowStates | None = None
        """Recurrent states of linear attention layers, after `allocate_states`."""
        self.routing: torch.Tensor | None = None
        """[rows, max_length, layers, k] or [blocks, block_size, layers, k] uint8 or int16, after `allocate_routing`."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the cache, including views."""
        views = self.values if self.is_latent else []
        return [*self.paged, *views, *([] if self.states is None else self.states.tensors)]

    @property
    def paged(self) -> list[torch.Tensor]:
        """The tensors with a slot per token."""
        return [*self._kept, *([] if self.routing is None else [self.routing])]

    @property
    def _kept(self) -> list[torch.Tensor]:
        return self.keys if self.is_latent else [*self.keys, *self.values]

    @abstractmethod
    def shape(self, heads: int, width: int) -> tuple[int, ...]:
        """Return the shape of a layer's keys or values."""

    @abstractmethod
    def slot_mapping(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slot of token i of row ``rows[i]`` at ``positions[..., i]``, for `write`."""

    @abstractmethod
    def copy(self, source: torch.Tensor, destination: torch.Tensor, length: int) -> None:
        """Copy rows (up to ``length`` positions) or blocks ``source[i]`` to ``destination[i]``, as if at once."""

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one token per slot: ``key`` and ``value`` [N, 1, heads, width]."""
        for held, new in zip((self.keys[layer], self.values[layer]), self.format.pack(layer, key, value), strict=True):
            self._put(held, slots, new)

    def write_latent(self, layer: int, slots: torch.Tensor, latent: torch.Tensor) -> None:
        """Store MLA latents: ``latent`` [N, 1, 1, width] is the key, its first part the value."""
        self._put(self.keys[layer], slots, latent)

    def _put(self, held: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        place = held.shape[-self.slot_dims :]
        held.view(-1, *place).index_copy_(0, slots, new.reshape(-1, *place))

    def allocate_states(self, layout: ModelLayout, snapshots: int) -> None:
        """Allocate recurrent states for all rows and ``snapshots`` more."""
        layers = [layer.cache for layer in layout.state_layers]
        self.states = RowStates(layers, len(self.rows) + snapshots, self.dtype, self.device)

    # -- the experts of tokens (`--rl-router-replay`) ------------------------------------------

    def allocate_routing(self, layout: ModelLayout) -> None:
        """Allocate the experts of every token."""
        dtype = {1: torch.uint8, 2: torch.int16}[layout.expert_id_bytes]
        shape = *self.grid, len(layout.layers), layout.architecture.moe_router_topk
        self.routing = torch.zeros(shape, dtype=dtype, device=self.device)

    def cells(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return one cell per token, for `write_routing`; like `slot_mapping`, but not per head."""
        return self.slot_mapping(rows, positions)

    def write_routing(self, layer: int, cells: torch.Tensor, experts: torch.Tensor) -> None:
        """Store ``experts`` [N, k], one token per cell."""
        self.routing.flatten(0, 1)[:, layer].index_copy_(0, cells, experts.to(self.routing.dtype))

    def routing_of(self, rows: Sequence[int], lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return the experts of the first ``lengths`` tokens of ``rows``, [length, layers, k] each, on the CPU."""
        owner = torch.tensor(rows).repeat_interleave(torch.tensor(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        cells = self.cells(owner.to(self.device), positions.to(self.device))
        return self.routing.flatten(0, 1).index_select(0, cells).cpu().split(list(lengths))


class RowCache(Cache):
    """Row i holds positions 0.. of one sequence."""

    slot_dims = 1

    def shape(self, heads: int, width: int) -> tuple[int, ...]:
        rows, max_length = self.grid
        return rows, heads, max_length, width

    @cached_property
    def _starts(self) -> torch.Tensor:
        return (self.rows[:, None] * self.heads + torch.arange(self.heads, device=self.device)) * self.max_length

    def slot_mapping(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return one slot per head of each token."""
        return (self._starts.index_select(0, rows) + positions[..., None]).flatten(-2)

    def copy(self, source: torch.Tensor, destination: torch.Tensor, length: int) -> None:
        for held in self._kept:
            held[destination, :, :length] = held[source, :, :length]
        if self.routing is not None:
            self.routing[destination, :length] = self.routing[source, :length]

    def cells(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rows * self.max_length + positions


class PagedCache(Cache):
    """Block 0 belongs to no sequence: idle rows write to it."""

    slot_dims = 2

    def __init__(
        self, layers: Sequence[LayerCache], rows: int, max_length: int, block_size: int, dtype: torch.dtype,
        device: torch.device, stored: torch.dtype | None = None, num_blocks: int | None = None,
    ) -> None:  # fmt: skip
        """``num_blocks`` are assigned by `set_block_table`; None: every row permanently owns ``max_length`` tokens."""
        per_row = -(-max_length // block_size)
        count = rows * per_row if num_blocks is None else num_blocks
        self.block_size = block_size
        super().__init__(layers, rows, max_length, dtype, device, stored, (count + 1, block_size))
        self.table = torch.zeros(rows, per_row, dtype=torch.int32, device=device)
        """[rows, blocks of the longest sequence] int32."""
        if num_blocks is None:
            self.table.copy_(torch.arange(1, count + 1).view(rows, per_row))

    def shape(self, heads: int, width: int) -> tuple[int, ...]:
        return *self.grid, heads, width

    def slot_mapping(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if positions.is_cuda:
            from megatron_rl.inference.state_kernels import cells

            return cells(self.table, rows, positions, self.block_size)
        block = self.table[rows, positions // self.block_size]
        return block * self.block_size + positions % self.block_size

    def copy(self, source: torch.Tensor, destination: torch.Tensor, length: int) -> None:
        """Copy whole blocks."""
        for held in self.paged:
            held[destination] = held[source]

    def set_block_table(self, table: array) -> None:
        """Set the blocks of all rows, row after row, with one copy, in place: CUDA graphs hold the table's address."""
        held = torch.frombuffer(table, dtype=torch.int32).view(self.table.shape)
        self.table.copy_(to_device(held, self.device, torch.int32))


def build_cache(policy: PolicyModel, options: EngineOptions) -> tuple[Cache, BlockManager, int]:
    """Build the cache and its block manager; also return the number of rows, reduced to fit the budget.

    Raises:
        EngineError: the budget is too small for the longest sequence, or the layout does not support the options.
    """
    length, sequence_bytes, state_bytes = _sequence_sizes(policy, options)
    kernel, layout, budget = policy.attention.cache, policy.layout, options.cache_budget_gb
    layers, has_states = [layer.cache for layer in layout.key_layers], state_bytes > 0  # on any stage: all decide alike
    rows, stored, reuses = options.max_batch_size, options.kv_cache_dtype, options.prefix_reuse
    for problem in policy.attention.block_problems(options.block_size, options.kv_overcommit):
        raise EngineError(problem.text)
    if kernel.layout == "rows" or has_states:  # every row has a state, be its sequence as short as it may
        rows = rows_within(budget, int(sequence_bytes / options.kv_overcommit) + state_bytes, length, rows)
    snapshots = rows if has_states and reuses else 0
    # Stages learn the drawn tokens, and so which rows ended, only after the states have moved on.
    resume = Snapshots(rows, snapshots, at_turns=layout.stages.count == 1) if snapshots else TruncatableCache()
    if kernel.layout == "rows":
        cache = RowCache(layers, rows, length, policy.dtype, policy.device, stored)
        blocks = RowBlocks(reuses, resume)
    else:
        block_size = options.block_size or kernel.block_size
        budget = None if budget is None else budget - rows * state_bytes / 2**30
        count = blocks_within(budget, sequence_bytes, length, block_size, rows)
        cache = PagedCache(layers, rows, length, block_size, policy.dtype, policy.device, stored, count)
        pool, width = BlockPool(count, block_size), cache.table.shape[1]
        blocks = PagedBlocks(rows, width, pool, reuses, options.kv_overcommit, resume)
    if layout.state_layers:
        cache.allocate_states(layout, snapshots)
    if options.records_routing:
        cache.allocate_routing(layout)
    return cache, blocks, rows


def split_options(policy: PolicyModel, options: EngineOptions, count: int) -> list[EngineOptions]:
    """Split rows and budget of ``options`` over at most ``count`` engines.

    Fewer if each would have less than `FEWEST_ROWS` rows, or no room for the longest sequence.

    Raises:
        EngineError: see `build_cache`.
    """
    length, sequence_bytes, state_bytes = _sequence_sizes(policy, options)
    rows, budget, kernel = options.max_batch_size, options.cache_budget_gb, policy.attention.cache
    if kernel.layout == "rows":
        rows, budget = rows_within(budget, sequence_bytes + state_bytes, length, rows), None
    count = min(count, rows // FEWEST_ROWS)
    if budget is not None:
        block_size = options.block_size or kernel.block_size
        blocks = int((budget * 2**30 - rows * state_bytes) // (sequence_bytes * block_size // length))
        count = min(count, blocks // (-(-length // block_size) + 1))
    count = max(1, count)
    borders = [rows * part // count for part in range(count + 1)]
    share = None if budget is None else budget / count
    return [replace(options, max_batch_size=end - start, cache_budget_gb=share) for start, end in pairwise(borders)]


def _sequence_sizes(policy: PolicyModel, options: EngineOptions) -> tuple[int, int, int]:
    """Return tokens and cache bytes of the longest sequence, and the bytes of its recurrent states with a snapshot."""
    # Prefill pads short prompts to FEWEST_KEYS.
    length, layout = max(options.max_sequence_length, FEWEST_KEYS), policy.layout
    routing = length * layout.routing_bytes if options.records_routing else 0
    numbers = layout.slot_numbers(length)
    stored = (options.kv_cache_dtype or policy.dtype).itemsize
    return length, numbers * stored + routing, layout.state_bytes(policy.dtype.itemsize) * (1 + options.prefix_reuse)


def rows_within(budget_gb: float | None, sequence_bytes: int, length: int, wanted: int) -> int:
    """Return how many of ``wanted`` sequences of ``length`` tokens fit a budget in GiB (None: all of them).

    Raises:
        EngineError: not even one fits.
    """
    return _within(budget_gb, sequence_bytes, 1, wanted, f"one sequence of {length} tokens")


def blocks_within(budget_gb: float | None, sequence_bytes: int, length: int, block_size: int, rows: int) -> int:
    """Return how many blocks fit a budget in GiB beside block 0, at most as many as ``rows`` can use.

    Raises:
        EngineError: not even one sequence of ``length`` tokens fits.
    """
    needed = -(-length // block_size)
    what = f"one sequence of {length} tokens in pages of {block_size} and the page that is no sequence's"
    return _within(budget_gb, sequence_bytes * block_size // length, needed + 1, rows * needed + 1, what) - 1


def _within(budget_gb: float | None, unit_bytes: int, fewest: int, wanted: int, what: str) -> int:
    fitting = wanted if budget_gb is None else int(budget_gb * 2**30 // unit_bytes)
    if fitting < fewest:
        # Three digits, rounded up, so that the suggested size is enough.
        size = fewest * unit_bytes / 2**30
        digit = 10.0 ** (math.floor(math.log10(size)) - 2)
        raise EngineError(
            f"the KV cache budget of {budget_gb} GB is too small for {what}; use "
            f"--inference-dynamic-batching-buffer-size-gb {math.ceil(size / digit) * digit:.3g} or more"
        )
    return min(wanted, fitting)
