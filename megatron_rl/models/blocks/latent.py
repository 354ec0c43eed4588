"""Multi-head latent attention (MLA): keys and values of all heads are expanded from one latent per token.

Training and prefill expand it. Decode steps absorb the expansion: with ``W`` of a head's keys and a token's latent
``c``, ``q (W c) = (W^T q) c``, so queries are multiplied by ``W^T``, attend to the latents, and values are expanded
from the result. The cache then has ``kv_lora_rank + qk_pos_emb_head_dim`` numbers per token, for any number of heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_rl.families import LayerKind
from megatron_rl.models import override
from megatron_rl.models.blocks import Block
from megatron_rl.models.rollout_ops import Pending, TorchNorm, WholeColumnLinear, WholeRowLinear, call_linear
from megatron_rl.platform.megatron import enable_latent_attention
from megatron_rl.quantization.copies import effective_operands

if TYPE_CHECKING:
    from megatron_rl.models.attention.plan import AttentionPlan
    from megatron_rl.models.rollout import RolloutPlan

_EPSILON = 1e-6
"""Of the latent norms, in all known models, independent of other norms."""
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value, ``[T, 1, heads, D]``; values have another width."""


class _PlannedLatentAttention(MLASelfAttention):
    """megatron's projections; the plan rotates and attends, as in `PlannedSelfAttention`."""

    kind: LayerKind
    absorbs = False
    """Whether packed batches absorb the expansion like `decode`: see `absorbed_attention`."""

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; ``hidden_states`` [T, 1, hidden] (or [T / tensor ranks, 1, hidden] under sequence parallelism)."""
        plan = packed_seq_params
        query, latents = self._query(hidden_states, plan), self._latent(hidden_states, plan)
        if self.absorbs:
            return self.linear_proj(self._absorbed(query, *latents, functools.partial(self._attend_latent, plan)))
        heads = self._heads(query, *latents)
        attend = functools.partial(plan.attend, self.layer_number, kind=self.kind)
        if self.training and self.checkpoint_core_attention:
            attend = functools.partial(tensor_parallel.checkpoint, attend, False)
        return self.linear_proj(attend(*heads))

    def _query(self, hidden: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """``[T, 1, hidden]`` -> ``[T, 1, heads, D]``, with the last part rotated."""
        if self.config.q_lora_rank is None:
            mixed, _ = call_linear(self.linear_q_proj, hidden)
        else:
            narrow = self._shared(self._gathered(call_linear(self.linear_q_down_proj, hidden)[0]))
            mixed, _ = call_linear(self.linear_q_up_proj, self.q_layernorm(narrow))
        own, rotated = mixed.unflatten(-1, (-1, self.q_head_dim)).split(self._key_widths, -1)
        return torch.cat((own, self._rotated(rotated, plan)), -1)

    def _latent(self, hidden: torch.Tensor, plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, 1, hidden]`` -> the latent ``[T, 1, kv_lora_rank]``, and the rotated part of keys, ``[T, 1, 1, D]``.

        Under sequence parallelism the latent covers this rank's tokens only.
        """
        config = self.config
        mixed = self._gathered(call_linear(self.linear_kv_down_proj, hidden)[0])
        latent, rotated = mixed.split((config.kv_lora_rank, config.qk_pos_emb_head_dim), -1)
        # Each rank's heads read the rotated part, so its gradients are summed; those of the latent are, behind the
        # norm.
        rotated = copy_to_tensor_model_parallel_region(rotated)
        return self.kv_layernorm(self._shared(latent)), self._rotated(rotated[:, :, None], plan)

    def _heads(self, query: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor) -> Heads:
        mixed, _ = call_linear(self.linear_kv_up_proj, latent)
        mixed = mixed.unflatten(-1, (-1, sum(self._expanded_widths)))
        own, value = mixed.split(self._expanded_widths, -1)
        key = torch.cat((own, rotated.expand(-1, -1, own.shape[2], -1)), -1)
        return self._scaled(query), key, value

    def _absorbed(
        self, query: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor, attend_latent: Callable[..., Any]
    ) -> torch.Tensor:
        """Attend with absorbed queries -> ``[T, 1, heads * v_head_dim]``; ``attend_latent``: see `RolloutPlan`."""
        whole = gather_from_sequence_parallel_region(latent) if self.config.sequence_parallel else latent
        weight, kept = effective_operands(self.linear_kv_up_proj, whole)
        to_key, to_value = weight.unflatten(0, (-1, sum(self._expanded_widths))).split(self._expanded_widths, 1)

        def absorbed() -> torch.Tensor:
            own, absorbed_rotated = query.split(self._key_widths, -1)
            return self._scaled(torch.cat((torch.einsum("tbhd,hdc->tbhc", own, to_key), absorbed_rotated), -1))

        attended, is_latent = attend_latent(
            self.layer_number, torch.cat((kept[:, :, None], rotated), -1),
            lambda: self._heads(query, latent, rotated), absorbed, self.kind,
        )  # fmt: skip
        if not is_latent:
            return attended
        return torch.einsum("tbhc,hdc->tbhd", attended.unflatten(-1, (len(to_value), -1)), to_value).flatten(2)

    def _attend_latent(
        self, plan: AttentionPlan, layer: int, latent: torch.Tensor, _: Any, absorbed: Callable[[], torch.Tensor],
        kind: LayerKind,
    ) -> tuple[torch.Tensor, bool]:  # fmt: skip
        """Attend to the latents of a packed batch; see `RolloutPlan.attend_latent`."""
        query = absorbed()
        key = latent.expand(-1, -1, query.shape[2], -1)  # torch's kernel of little memory takes a key for every query
        return plan.attend(layer, query, key, key[..., : self.config.kv_lora_rank], kind), True

    def _scaled(self, query: torch.Tensor) -> torch.Tensor:
        """Scale queries for the layer's softmax scale, given that kernels multiply scores by 1 / sqrt(D)."""
        width = query.shape[-1]
        if self.kind.scale is None and width == self.q_head_dim:
            return query
        scale = self.kind.scale or 1 / math.sqrt(self.q_head_dim)
        return query * (scale * math.sqrt(width))

    def _rotated(self, heads: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Rotate interleaved pairs: reorder them into halves, in queries and keys alike, which keeps their products."""
        halves = heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return plan.rotate(halves, self.kind)

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the columns of a latent projection from the tensor-parallel ranks."""
        return part if self.world_size == 1 else gather_from_tensor_model_parallel_region(part)

    def _shared(self, latent: torch.Tensor) -> torch.Tensor:
        """Split tokens under sequence parallelism: the next projection gathers them again."""
        return scatter_to_sequence_parallel_region(latent) if self.config.sequence_parallel else latent


class LatentAttention(Block, _PlannedLatentAttention):
    """megatron's latent attention with rotation and scale of the layer's kind."""

    settings = MLATransformerConfig
    expects = {"attention_output_gate": False, "cache_mla_latents": False, "experimental_attention_variant": None}

    @staticmethod
    def stock(config: TransformerConfig) -> dict[str, Any]:
        enable_latent_attention()
        return {"multi_latent_attention": True}

    @staticmethod
    def replace_modules(submodules: MLASelfAttentionSubmodules, config: TransformerConfig) -> None:
        submodules.core_attention = IdentityOp  # the plan attends
        submodules.q_layernorm = submodules.kv_layernorm = IdentityOp  # megatron-core 0.19 takes no others unless asked
        if config.tensor_model_parallel_size == 1:
            submodules.linear_q_proj = submodules.linear_q_up_proj = WholeColumnLinear
            submodules.linear_kv_up_proj, submodules.linear_proj = WholeColumnLinear, WholeRowLinear

    def prepare(self, kind: LayerKind) -> None:
        self.kind = kind
        self._key_widths = self.config.qk_head_dim, self.config.qk_pos_emb_head_dim
        self._expanded_widths = self.config.qk_head_dim, self.config.v_head_dim
        del self.rotary_pos_emb  # each layer's own, of the same numbers
        compressed = self.config.q_lora_rank is not None
        self.kv_layernorm = TorchNorm(self.config, self.config.kv_lora_rank, _EPSILON)
        if compressed:
            self.q_layernorm = TorchNorm(self.config, self.config.q_lora_rank, _EPSILON)
        if self.world_size == 1:  # in a specification megatron takes no other class for these
            for linear in (self.linear_kv_down_proj, *([self.linear_q_down_proj] if compressed else [])):
                linear.__class__ = WholeColumnLinear

    def decode(self, normed: torch.Tensor, plan: RolloutPlan) -> Pending:
        hidden = normed[:, None]
        query, (latent, rotated) = self._query(hidden, plan), self._latent(hidden, plan)
        if plan.keeps_latents:
            attended = self._absorbed(query, latent, rotated, plan.attend_latent)
        else:
            attended = plan.attend(self.layer_number, *self._heads(query, latent, rotated), self.kind)
        return Pending(*call_linear(self.linear_proj, attended.view(attended.shape[0], -1)))


def absorbed_attention(layers: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
    """Make ``layers`` absorb in packed batches, inside the context, to measure the effect of absorption alone."""
    return override("absorbs", {layer.self_attention: True for layer in layers})


BLOCK = LatentAttention
