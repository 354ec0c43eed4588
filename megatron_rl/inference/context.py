"""What GPTModel and its attention layers ask during a rollout: tensors only, no queues."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.inference.contexts.base_context import BaseInferenceContext

from megatron_rl.attention.plan import PackedPlan
from megatron_rl.attention.rope import RopeTable, rotate
from megatron_rl.attention.sdpa import FEWEST_ROWS, cached_attention, packed_attention
from megatron_rl.inference.kv_cache import SlotCache


class RolloutContext(BaseInferenceContext):
    """The inference context and the attention plan of the rollout engine.

    It is in one of two states: prefill (prompts laid end to end, ``[1, T]`` token ids) or decode
    (one token for each of the first N slots, ``[1, N]`` token ids).
    """

    use_flashinfer_fused_rope = False

    def __init__(self, cache: SlotCache, rope: RopeTable, first_layer: int, dtype: torch.dtype) -> None:
        super().__init__(materialize_only_last_token_logits=True)
        self.max_sequence_length = cache.shape.max_length
        self._cache = cache
        self._rope = rope
        self._first_layer = first_layer
        self._dtype = dtype
        device = cache.keys[0].device
        self._columns = torch.arange(cache.shape.max_length, device=device)
        self._masked = torch.tensor(float("-inf"), dtype=dtype, device=device)
        self._visible = torch.zeros_like(self._masked)
        self._prompts: PackedPlan | None = None

    # -- the two states ------------------------------------------------------------------------

    def begin_prefill(
        self,
        lengths: Sequence[int],
        cu_seqlens: torch.Tensor,
        position_ids: torch.Tensor,
        slots: torch.Tensor,
        source: torch.Tensor,
    ) -> None:
        """Prompts of ``lengths``; slot ``slots[i]`` receives the cache of prompt ``source[i]``."""
        self._prompts = PackedPlan.build(lengths, cu_seqlens, position_ids, self._rope, self._dtype)
        last = cu_seqlens[1:].long() - 1
        missing = max(0, FEWEST_ROWS - len(lengths))
        self._last_tokens = torch.cat((last, last[-1:].expand(missing)))
        self._slots, self._source = slots, source

    def begin_decode(self, positions: torch.Tensor, key_length: int) -> None:
        """The steps of a burst, ``positions`` [k, N] in slots 0..N-1, each one further than the last.

        No position of the first step reaches ``key_length``. What the steps need is computed here in one go;
        the first of them is begun.
        """
        self._prompts = None
        steps, self._rows = positions.shape
        self._positions, self._first_length = positions, key_length
        self._all_cells = self._cache.cells_at(positions)
        cos, sin = self._rope.at(positions.view(-1), self._dtype)
        self._all_cos, self._all_sin = (table.view(steps, self._rows, 1, 1, -1) for table in (cos, sin))
        reach = min(key_length + steps - 1, self._cache.shape.max_length)
        hidden = (self._columns[:reach] > positions[0, :, None])[:, None, None]
        self._reach_mask = torch.where(hidden, self._masked, self._visible)
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """Go on to this step of the burst; its tokens see themselves and all that the last step's saw."""
        if step:
            self._reach_mask.scatter_(-1, self._positions[step][:, None, None, None], 0.0)
        self._key_length = min(self._first_length + step, self._cache.shape.max_length)
        self._mask = self._reach_mask[..., : self._key_length]
        self._cells = self._all_cells[step]
        self._cos, self._sin = self._all_cos[step], self._all_sin[step]

    # -- asked by PlannedSelfAttention ---------------------------------------------------------

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """See `AttentionPlan`."""
        if self._prompts is not None:
            return self._prompts.rotate(heads)
        return rotate(heads, self._cos, self._sin)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See `AttentionPlan`; also stores the keys and values."""
        index = layer - self._first_layer
        if self._prompts is not None:
            rows = self._prompts.rows
            self._cache.fill(index, self._slots, self._source, rows.pad(key), rows.pad(value))
            return packed_attention(query, key, value, rows)
        self._cache.write(index, self._cells, key, value)
        keys = self._cache.keys[index].narrow(0, 0, self._rows).narrow(2, 0, self._key_length)
        values = self._cache.values[index].narrow(0, 0, self._rows).narrow(2, 0, self._key_length)
        return cached_attention(query, keys, values, self._mask)

    # -- asked by GPTModel, TransformerBlock and TransformerLayer ------------------------------

    def is_static_batching(self) -> bool:
        """Always dynamic."""
        return False

    def is_decode_only(self) -> bool:
        """True outside prefill."""
        return self._prompts is None

    def using_cuda_graph_this_step(self) -> bool:
        """megatron's per-layer graphs are never used: ours capture the whole step."""
        return False

    def last_token_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[1, T, hidden]`` -> ``[prompts or rows, hidden]``, the only positions worth a logit.

        Fewer than `FEWEST_ROWS` prompts are filled up with copies of the last one.
        """
        if self._prompts is None:
            return hidden_states[0]
        return hidden_states[0].index_select(0, self._last_tokens)
