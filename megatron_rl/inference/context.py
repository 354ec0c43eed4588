"""The inference context and attention plan that GPTModel and its layers use in a rollout."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from megatron.core.inference.contexts.base_context import BaseInferenceContext

from megatron_rl.arithmetic import FEWEST_ROWS
from megatron_rl.families import PLAIN, LayerKind, StateCache
from megatron_rl.inference.kv_cache import Cache
from megatron_rl.models.attention.backend import NewTokens
from megatron_rl.models.attention.plan import PackedPlan, prepared_for, prepared_steps, rope_at, sink_args
from megatron_rl.models.delta_rule import LayerStates
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.gradients import rotate
from megatron_rl.models.rollout_ops import RolloutOps
from megatron_rl.platform.megatron import last_logits_only


class RolloutContext(BaseInferenceContext):
    """The inference context and `RolloutPlan` of the rollout engine.

    Three states: prefill (concatenated prompts) and extend (prompts whose prefix is cached), both with token ids ``[1,
    T]``; decode (one token for each of the first N rows, ``[1, N]``).
    """

    use_flashinfer_fused_rope = False
    num_speculative_tokens = 0
    padding_slice = slice(0, 0)
    """Read by megatron with fp8 layers, to zero padding tokens; there are none here."""

    def __init__(self, policy: PolicyModel, cache: Cache, ops: RolloutOps) -> None:
        super().__init__(**last_logits_only())
        self.max_sequence_length = cache.max_length
        self.cache = cache
        self._kernels = policy.attention
        self._ropes, self._windows = policy.ropes, policy.windows
        self._layer_index = {layer.layer_number: place for place, layer in enumerate(policy.layers)}
        """Layer number -> index among this rank's layers."""
        in_order = zip(policy.layers, policy.layout.layers, strict=True)
        kinds = [(layer.layer_number, isinstance(described.cache, StateCache)) for layer, described in in_order]
        self._key_index, self._state_index = (
            {number: place for place, number in enumerate(n for n, has_state in kinds if has_state == wanted)}
            for wanted in (False, True)
        )
        """Layer number -> index in the cache, of attention layers and of layers with a recurrent state."""
        self._dtype = policy.dtype
        self.ops = ops
        """Element-wise operations of the layers."""
        self.max_tokens_per_ep_rank: int | None = None
        self._records = cache.routing is not None
        self._prompts: PackedPlan | None = None
        self._last_tokens: torch.Tensor | None = None
        self.keeps_hidden = False
        """Whether to keep ``hidden`` of the next prompts."""
        self.hidden: torch.Tensor | None = None
        """[T, hidden]: the head's input for all prompt tokens."""

    # -- the three states ----------------------------------------------------------------------

    def begin_prompts(self, new: NewTokens, cached: bool) -> None:
        """Prepare for prompts, or with ``cached`` for the rest of prompts whose prefix is in the cache."""
        borders = new.cu_seqlens.long()
        # output_size avoids a read from the device.
        rows = torch.repeat_interleave(new.rows, borders[1:] - borders[:-1], output_size=new.position_ids.numel())
        self._slots = self.cache.slot_mapping(rows, new.position_ids)
        if self._records:
            self._cells = self.cache.cells(rows, new.position_ids)
        last = borders[1:] - 1
        self._last_tokens = torch.cat((last, last[-1:].expand(max(0, FEWEST_ROWS - last.numel()))))
        if self.cache.states is not None:
            self.cache.states.begin_prompts(new.rows, new.lengths, continues=cached)
        if cached:
            self._prompts = None
            self._cos_sin = rope_at(self._ropes, new.position_ids, self._dtype)
            kernel = self._kernels.cache
            self._attend = kernel.extend
            self._plans = {
                window: prepared_for(window, kernel.prepare_extend, self.cache, new) for window in self._windows
            }
        else:
            packed = new.lengths, new.cu_seqlens, new.position_ids
            self._prompts = PackedPlan.build(*packed, self._ropes, self._dtype, self._kernels.packed, self._windows)

    def begin_decode(self, positions: torch.Tensor, key_length: int) -> None:
        """Prepare for k decode steps of the rows 0..N-1 at ``positions`` [k, N], which grow by one per step.

        The positions of the first step are below ``key_length``. Everything that depends on positions is computed here
        for all steps; call `next_step` before each of them.
        """
        self._prompts = self._last_tokens = None
        steps, count = positions.shape
        if self.cache.states is not None:
            self.cache.states.begin_decode(count)
        rows = self.cache.rows[:count]
        cos_sin = {
            name: [table.view(steps, count, 1, 1, -1) for table in tables]
            for name, tables in rope_at(self._ropes, positions.view(-1), self._dtype).items()
        }
        kernel = self._kernels.cache
        plans = [prepared_steps(kernel, window, self.cache, positions, key_length) for window in self._windows]
        self._attend = kernel.decode
        cells = self.cache.cells(rows, positions) if self._records else itertools.repeat(None, steps)
        each = ({name: (cos[step], sin[step]) for name, (cos, sin) in cos_sin.items()} for step in range(steps))
        self._steps = zip(zip(*plans, strict=True), self.cache.slot_mapping(rows, positions), cells, each, strict=True)

    def next_step(self) -> None:
        """Advance to the next prepared step."""
        plans, self._slots, self._cells, self._cos_sin = next(self._steps)
        self._plans = dict(zip(self._windows, plans, strict=True))

    # -- asked by PlannedSelfAttention ---------------------------------------------------------

    def rotate(self, heads: torch.Tensor, kind: LayerKind = PLAIN) -> torch.Tensor:
        return rotate(heads, *self.cos_sin(kind))

    def cos_sin(self, kind: LayerKind) -> tuple[torch.Tensor, torch.Tensor]:
        return (self._cos_sin if self._prompts is None else self._prompts.cos_sin)[kind.rotation]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: LayerKind = PLAIN,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the keys and values, then attend; see `AttentionPlan`."""
        index, kv_format = self._key_index[layer], self.cache.format
        if self._last_tokens is not None:
            kv_format.calibrate(index, key, value)
        self.cache.write(index, self._slots, key, value)
        if self._prompts is not None:
            return self._prompts.attend(layer, query, *kv_format.round_trip(index, key, value), kind, sinks)
        return self._attend(query, self.cache, index, self._plans[kind.window], *sink_args(sinks))

    @property
    def keeps_latents(self) -> bool:
        return self.cache.is_latent

    def attend_latent(
        self, layer: int, latent: torch.Tensor, heads: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        absorbed: Callable[[], torch.Tensor], kind: LayerKind,
    ) -> tuple[torch.Tensor, bool]:  # fmt: skip
        index = self._key_index[layer]
        self.cache.write_latent(index, self._slots, latent)
        if self._prompts is not None:
            return self._prompts.attend(layer, *heads(), kind), False
        return self._attend(absorbed(), self.cache, index, self._plans[kind.window]), True

    # -- asked by RolloutLayer -----------------------------------------------------------------

    @property
    def stores_heads(self) -> bool:
        """See `RolloutPlan`. False for prompts: they attend to their own keys, and may set the cache's scales."""
        return self.ops.fused and self._last_tokens is None and self._kernels.cache.layout == "blocks"

    def attend_mixed(
        self, layer: int, mixed: torch.Tensor, bias: torch.Tensor | None, query_norm: torch.nn.Module | None,
        key_norm: torch.nn.Module | None, kind: LayerKind, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        from megatron_rl.models.kernels import rotate_store

        cache, index = self.cache, self._key_index[layer]
        stored = cache.keys[index], cache.values[index], self._slots, *cache.format.scales(index)
        query = rotate_store(mixed, *self._cos_sin[kind.rotation], query_norm, key_norm, *stored, bias=bias)
        return self._attend(query, cache, index, self._plans[kind.window], *sink_args(sinks))

    def states(self, layer: int) -> LayerStates:
        return self.cache.states.of(self._state_index[layer])

    def record_routing(self, layer: int, experts: torch.Tensor) -> None:
        if self._records:
            self.cache.write_routing(self._layer_index[layer], self._cells, experts)

    # -- asked by GPTModel, TransformerBlock and TransformerLayer ------------------------------

    def is_static_batching(self) -> bool:
        """Return False: batching is always dynamic."""
        return False

    def is_decode_only(self) -> bool:
        """Return whether this is a decode step."""
        return self._last_tokens is None

    def using_cuda_graph_this_step(self) -> bool:
        """Return False: the engine captures whole steps itself."""
        return False

    def last_token_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Select the last token of each prompt: ``[1, T, hidden]`` -> ``[prompts or rows, hidden]``.

        Fewer than `FEWEST_ROWS` prompts are padded with copies of the last one.
        """
        if self._last_tokens is None:
            return hidden_states[0]
        if self.keeps_hidden:
            self.hidden = hidden_states[0]
        return hidden_states[0].index_select(0, self._last_tokens)
