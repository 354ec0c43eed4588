"""The model's forward pass in a rollout: embedding, layers, norm and head, and nothing around them.

Stock, a layer is wrapped for recomputation, dropout, offloading and cross-attention, all of them off in a rollout; at
64 rows and a hidden size of 64 the wrapping took as long as the products. Here the same operations run on the same
numbers, so that on a CPU the result is the training forward's to the bit.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as functional
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.families import PLAIN, LayerKind
from megatron_rl.models.attention.plan import AttentionPlan
from megatron_rl.models.ends import ScaledEmbedding
from megatron_rl.models.experts import ExpertLayer
from megatron_rl.models.rollout_ops import LinearInput, Pending, RolloutOps, TorchNorm, is_rms
from megatron_rl.models.routing import BalancedRouter, Routing
from megatron_rl.platform.megatron import inference_flag

if TYPE_CHECKING:
    from megatron_rl.models.gpt import PolicyModel


class RolloutPlan(AttentionPlan, Protocol):
    """What the forward pass asks of a rollout's context."""

    ops: RolloutOps
    shared_rows: int | None
    """The most tokens that a rank brings to experts it shares with others, in a decode step; 0: each as many as this
    one. None in prompts."""

    @property
    def stores_heads(self) -> bool:
        """Whether `attend_mixed` is there for this forward pass."""
        ...

    def attend_mixed(
        self,
        layer: int,
        mixed: torch.Tensor,
        query_norm: torch.nn.Module | None,
        key_norm: torch.nn.Module | None,
        kind: LayerKind,
    ) -> torch.Tensor:
        """Norms, rotation, cache and attention of ``mixed`` [T, groups, share + 2, D] -> ``[T, 1, heads * D]``.

        A group's queries, its key and its value lie side by side.
        """
        ...

    def record_routing(self, layer: int, experts: torch.Tensor) -> None:
        """Keep the ``experts`` [T, k] of the new tokens beside their keys, with `--rl-router-replay`."""
        ...

    def last_token_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[1, T, hidden]`` -> ``[rows, hidden]``: the tokens worth a logit."""
        ...


class NormedMLP(MLP):
    """megatron's MLP and a norm of its output."""

    post_layernorm: TorchNorm

    def forward(self, *args: Any, **settings: Any) -> tuple[torch.Tensor, None]:
        """As megatron's, without a bias that is left to the caller."""
        output, _ = super().forward(*args, **settings)
        return self.post_layernorm(output), None


class RolloutLayer(TransformerLayer):
    """megatron's layer; `decode` is its evaluation-mode forward with a `RolloutPlan`."""

    def __init__(self, *args: Any, kind: LayerKind = PLAIN, **settings: Any) -> None:
        super().__init__(*args, **settings)
        attention, config = self.self_attention, self.config
        attention.kind = kind
        self._has_plain_mlp = isinstance(self.mlp, MLP)
        if kind.post_norms:
            attention.post_layernorm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.mlp.__class__ = NormedMLP
            self.mlp.post_layernorm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
        if not self._has_plain_mlp:  # a class of our own in the specification would have megatron warn of it
            self.mlp.__class__, self.mlp.router.__class__ = ExpertLayer, BalancedRouter
        # So are norms of query and key, and fewer groups than ranks, which then exchange their parts.
        has_whole_groups = config.num_query_groups >= attention.world_size
        self._has_plain_heads = not config.qk_layernorm and has_whole_groups and kind.scale is None
        self._head_norms = (attention.q_layernorm, attention.k_layernorm) if config.qk_layernorm else (None, None)
        # A kernel knows everything between the projection and the cache.
        has_known_norms = not config.qk_layernorm or all(map(is_rms, self._head_norms))
        self._has_storable_heads = has_whole_groups and has_known_norms and kind.scale is None
        self._groups = attention.num_query_groups_per_partition
        self._head_width = attention.hidden_size_per_attention_head
        self._routing: Routing | None = None

    def replay_routing(self) -> None:
        """From now on rollouts record the experts they choose, and training uses those that its plan has."""
        self._routing = self.mlp.router.router_replay = Routing()

    def forward(self, *args: Any, packed_seq_params: Any = None, **settings: Any) -> Any:
        """megatron's; a `PackedPlan` tells the router of experts and of losses of its own."""
        with contextlib.ExitStack() as told:
            if not self._has_plain_mlp:
                told.enter_context(self.mlp.router.told(getattr(packed_seq_params, "balance", None)))
            if self._routing is not None:
                routing = getattr(packed_seq_params, "routing", None)
                told.enter_context(self._routing.given(None if routing is None else routing[self.layer_number]))
            return super().forward(*args, packed_seq_params=packed_seq_params, **settings)

    def decode(
        self, hidden: torch.Tensor, pending: Pending | None, plan: RolloutPlan
    ) -> tuple[torch.Tensor, Pending]:
        """The residual stream ``[T, hidden]`` and what is still to be added to it, before and after the layer.

        For evaluation without gradients only. Adding is left to the norm that follows, so that a kernel can do both.
        """
        attention, ops = self.self_attention, plan.ops
        hidden, normed = ops.add_norm(hidden, pending, self.input_layernorm, attention.linear_qkv)
        attended = self._attended(normed, plan).view(hidden.shape[0], -1)
        pending = self._normed(Pending(*call_linear(attention.linear_proj, attended)), attention)
        if self._has_plain_mlp:
            hidden, normed = ops.add_norm(hidden, pending, self.pre_mlp_layernorm, self.mlp.linear_fc1)
            return hidden, self._normed(Pending(*self._plain_mlp(normed, ops)), self.mlp)
        hidden, normed = ops.add_norm(hidden, pending, self.pre_mlp_layernorm, None)
        output = self.mlp.decode(normed, plan)
        if self._routing is not None:
            plan.record_routing(self.layer_number, self._routing.chosen)
        return hidden, Pending(output, None)

    def _normed(self, pending: Pending, block: torch.nn.Module) -> Pending:
        """What attention or the MLP adds, through its norm where it has one."""
        if not self.self_attention.kind.post_norms:
            return pending
        return Pending(block.post_layernorm.forward(pending.output), None)

    def _attended(self, normed: LinearInput, plan: RolloutPlan) -> torch.Tensor:
        """The normed ``[T, hidden]`` -> ``[T, 1, heads * D]``."""
        attention = self.self_attention
        if plan.stores_heads and self._has_storable_heads:
            mixed, _ = call_linear(attention.linear_qkv, normed)
            heads = mixed.view(mixed.shape[0], self._groups, -1, self._head_width)
            return plan.attend_mixed(self.layer_number, heads, *self._head_norms, attention.kind)
        return plan.attend(self.layer_number, *self._heads(normed, plan), attention.kind)

    def _heads(
        self, normed: LinearInput, plan: RolloutPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[T, hidden]`` -> rotated query and key, and value, ``[T, 1, heads, D]`` each."""
        attention = self.self_attention
        if not self._has_plain_heads:
            query, key, value = attention.get_query_key_value_tensors(normed[:, None])
            return plan.rotate(attention.scaled(query), attention.kind), plan.rotate(key, attention.kind), value
        mixed, _ = call_linear(attention.linear_qkv, normed)
        # A group's queries, its key and its value lie side by side: the first two are rotated in one go.
        parts = mixed.view(mixed.shape[0], self._groups, -1, self._head_width)
        turned = plan.rotate(parts[:, :, :-1], attention.kind)
        query = turned[:, :, :-1].reshape(mixed.shape[0], 1, -1, self._head_width)
        return query, turned[:, :, -1].unsqueeze(1), parts[:, :, -1].unsqueeze(1)

    def _plain_mlp(self, normed: LinearInput, ops: RolloutOps) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[T, hidden]`` -> ``[T, hidden]`` and the bias that is left to the caller."""
        inner, bias = call_linear(self.mlp.linear_fc1, normed)
        if bias is not None:
            inner.add_(bias)
        return call_linear(self.mlp.linear_fc2, ops.activate(inner, self.config, self.mlp.linear_fc2))


def call_linear(module: torch.nn.Module, tokens: LinearInput) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``module(tokens)`` without the dispatch to hooks where none is registered.

    ``forward`` is looked up on the instance: quantised rollouts put theirs there.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return module(tokens)
    return module.forward(tokens)


class RolloutForward:
    """Calls the model of ``policy`` with ``plan``; Transformer Engine's layers go through `GPTModel.forward`.

    On a CPU both ways give the same bits. Call it in evaluation mode and without gradients.
    """

    def __init__(self, policy: PolicyModel, plan: RolloutPlan) -> None:
        self._policy, self._plan = policy, plan
        self._is_whole = policy.config.tensor_model_parallel_size == 1

    @property
    def is_short(self) -> bool:
        """Whether the short way is taken."""
        return self._policy.config.transformer_impl == "local"

    def chunk(self, number: int, entering: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The forward pass through one of the policy's chunks, at ``positions`` [N].

        The first chunk of the model takes ids [N], every other what the one before it gives: ``[N, hidden]``. The last
        gives fp32 logits over the real vocabulary, ``[rows, V]``.
        """
        gpt = self._policy.chunks[number]
        leaving = self._short(gpt, entering) if self.is_short else self._stock(gpt, entering, positions)
        return leaving[:, : self._policy.vocab_size].float() if gpt.post_process else leaving

    def _short(self, gpt: GPTModel, entering: torch.Tensor) -> torch.Tensor:
        plan, hidden, pending = self._plan, entering, None
        if gpt.pre_process:
            embedding = gpt.embedding.word_embeddings
            hidden = functional.embedding(entering, embedding.weight) if self._is_whole else embedding(entering)
            if isinstance(gpt.embedding, ScaledEmbedding):
                hidden = hidden * gpt.embedding.factor
        for layer in gpt.decoder.layers:
            hidden, pending = layer.decode(hidden, pending, plan)
        if not gpt.post_process:
            return plan.ops.add(hidden, pending)
        _, normed = plan.ops.add_norm(hidden, pending, gpt.decoder.final_layernorm, None)
        chosen = plan.last_token_logits(normed[None])
        tied = gpt.share_embeddings_and_output_weights
        weight = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
        if self._is_whole:
            return torch.mm(chosen, weight.t())
        return gpt.output_layer(chosen[:, None], weight=weight, runtime_gather_output=True)[0][:, 0]

    def _stock(self, gpt: GPTModel, entering: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ids, hidden = (entering[None], None) if gpt.pre_process else (None, entering[:, None])
        # Twice: the layers take it from the first place, and megatron's way through fp8 zeroes padding in the second.
        gpt.set_input_tensor(hidden)
        with inference_flag():
            leaving = gpt(
                ids, positions[None], None, hidden, inference_context=self._plan, runtime_gather_output=True
            )
        gpt.set_input_tensor(None)  # the hidden states of a prompt would lie there during the update
        return leaving.view(-1, leaving.shape[-1])
