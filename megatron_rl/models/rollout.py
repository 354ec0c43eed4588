"""The model's forward pass in a rollout: embedding, layers, norm and head, and nothing around them.

Stock, a layer is wrapped for recomputation, dropout, offloading and cross-attention, all of them off in a rollout; at
64 rows and a hidden size of 64 the wrapping took as long as the products. Here the same operations run on the same
numbers, so that on a CPU the result is the training forward's to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as functional
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.families import PLAIN, LayerKind
from megatron_rl.models.attention.plan import AttentionPlan, PackedPlan
from megatron_rl.models.blocks import BLOCKS, weight_of
from megatron_rl.models.rollout_ops import Pending, RolloutOps, ScaledEmbedding, TorchNorm, is_rms, rollout_product
from megatron_rl.platform.megatron import inference_flag

if TYPE_CHECKING:
    from megatron_rl.models.delta_rule import LayerStates
    from megatron_rl.models.gpt import PolicyModel


class RolloutPlan(AttentionPlan, Protocol):
    """The interface of a rollout's context to the forward pass."""

    ops: RolloutOps
    shared_rows: int | None
    """The most tokens that a rank brings to experts it shares with others, in a decode step; 0: each as many as this
    one. None in prompts."""

    @property
    def stores_heads(self) -> bool:
        """Whether `attend_mixed` is there for this forward pass."""
        ...

    def turn(self, kind: LayerKind) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [T, 1, 1, R] of the new tokens."""
        ...

    def attend_mixed(
        self, layer: int, mixed: torch.Tensor, bias: torch.Tensor | None, query_norm: torch.nn.Module | None,
        key_norm: torch.nn.Module | None, kind: LayerKind, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Apply norms, rotation, cache and attention to ``mixed`` [T, groups, share + 2, D] -> ``[T, 1, heads * D]``.

        ``bias`` [groups x (share + 2) x D] is added first. A group's queries, its key and its value lie side by side.
        """
        ...

    @property
    def keeps_latents(self) -> bool:
        """Whether the cache holds what keys and values are expanded from, and not these."""
        ...

    def attend_latent(
        self, layer: int, latent: torch.Tensor, heads: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        absorbed: Callable[[], torch.Tensor], kind: LayerKind,
    ) -> tuple[torch.Tensor, bool]:  # fmt: skip
        """Keep ``latent`` [T, 1, 1, W], and attend; whether to the latents in the cache.

        Then it is ``absorbed`` queries, [T, 1, heads, W], that attend, and the result has a latent a head. In prompts
        ``heads`` attend to each other: query, key and value [T, 1, heads, D].
        """
        ...

    def states(self, layer: int) -> LayerStates:
        """Return the recurrent states that ``layer``, numbered as in `attend`, reads and writes in this pass."""
        ...

    def record_routing(self, layer: int, experts: torch.Tensor) -> None:
        """Keep the ``experts`` [T, k] of the new tokens beside their keys, with `--rl-router-replay`."""
        ...

    def last_token_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map ``[1, T, hidden]`` to ``[rows, hidden]``: the tokens worth a logit."""
        ...


class RolloutLayer(TransformerLayer):
    """megatron's layer, made of two blocks; `decode` is its evaluation-mode forward with a `RolloutPlan`."""

    def __init__(self, *args: Any, kind: LayerKind = PLAIN, **settings: Any) -> None:
        super().__init__(*args, **settings)
        config, blocks = self.config, {kind.mixer: self.self_attention, kind.mlp: self.mlp}
        for name, module in blocks.items():  # a class of our own in the specification would have megatron warn of it
            module.__class__ = BLOCKS.get(name)
            module.prepare(kind)
            module.post_layernorm = None
            if kind.post_norms:
                module.post_layernorm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
        self._readers = tuple(module.reader and getattr(module, module.reader) for module in blocks.values())
        self._has_post_norms = kind.post_norms
        recomputes = self.recompute_input_layernorm or self.recompute_pre_mlp_layernorm or self.recompute_mlp
        has_own_norms = is_rms(self.input_layernorm) and is_rms(self.pre_mlp_layernorm)
        self._is_plain = has_own_norms and not (recomputes or self.hidden_dropout)

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, packed_seq_params: Any = None, inference_context: Any = None,
        **settings: Any,
    ) -> Any:  # fmt: skip
        """Run megatron's layer; the MLP is told of the `PackedPlan` or, in Transformer Engine's, `RolloutPlan`."""
        plans = {"packed_seq_params": packed_seq_params, "inference_context": inference_context}
        with self.mlp.told(packed_seq_params if inference_context is None else inference_context):
            if hidden_states.is_cuda and self._is_plain and isinstance(packed_seq_params, PackedPlan):
                return self._summed(hidden_states, packed_seq_params), None
            return super().forward(hidden_states, *args, **plans, **settings)

    def _summed(self, hidden: torch.Tensor, plan: PackedPlan) -> torch.Tensor:
        """megatron's forward pass without dropout, [T, 1, hidden]; residual sum and norm are a kernel."""
        from megatron_rl.models.training_kernels import SumAndNorm

        output, attention = None, functools.partial(self.self_attention, attention_mask=None, packed_seq_params=plan)
        for norm, block in ((self.input_layernorm, attention), (self.pre_mlp_layernorm, self.mlp)):
            hidden, normed = SumAndNorm.apply(hidden, output, weight_of(norm), norm.eps)
            output, bias = block(normed)
            output = output if bias is None else output + bias
        return hidden + output

    def decode(self, hidden: torch.Tensor, pending: Pending | None, plan: RolloutPlan) -> tuple[torch.Tensor, Pending]:
        """Return the residual stream ``[T, hidden]`` and what is still to be added to it, before and after the layer.

        For evaluation without gradients only. Adding is left to the norm that follows, so that a kernel can do both.
        """
        mixer, mlp, add_norm = self.self_attention, self.mlp, plan.ops.add_norm
        of_mixer, of_mlp = self._readers
        hidden, normed = add_norm(hidden, pending, self.input_layernorm, of_mixer)
        pending = mixer.decode(normed, plan)
        if self._has_post_norms:
            pending = Pending(mixer.post_layernorm.forward(pending.output), None)
        hidden, normed = add_norm(hidden, pending, self.pre_mlp_layernorm, of_mlp)
        pending = mlp.decode(normed, plan)
        if self._has_post_norms:
            pending = Pending(mlp.post_layernorm.forward(pending.output), None)
        return hidden, pending


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
        """Run the forward pass through one of the policy's chunks, at ``positions`` [N].

        The first chunk of the model takes ids [N], every other what the one before it gives: ``[N, hidden]``. The last
        gives fp32 logits over the real vocabulary, ``[rows, V]``.
        """
        gpt = self._policy.chunks[number]
        leaving = self._short(gpt, entering) if self.is_short else self._stock(gpt, entering, positions)
        return leaving[:, : self._policy.vocab_size].float() if gpt.post_process else leaving

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the fp32 logits [N, V] of what goes into the head, ``[N, hidden]``; on the model's last stage."""
        return self._head(self._policy.chunks[-1], hidden)[:, : self._policy.vocab_size].float()

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
        return self._head(gpt, plan.last_token_logits(normed[None]))

    def _head(self, gpt: GPTModel, chosen: torch.Tensor) -> torch.Tensor:
        tied = gpt.share_embeddings_and_output_weights
        weight = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
        if self._is_whole:
            return rollout_product(chosen, weight)
        return gpt.output_layer(chosen[:, None], weight=weight, runtime_gather_output=True)[0][:, 0]

    def _stock(self, gpt: GPTModel, entering: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ids, hidden = (entering[None], None) if gpt.pre_process else (None, entering[:, None])
        # Twice: the layers take it from the first place, and megatron's way through fp8 zeroes padding in the second.
        gpt.set_input_tensor(hidden)
        with inference_flag():
            leaving = gpt(ids, positions[None], None, hidden, inference_context=self._plan, runtime_gather_output=True)
        gpt.set_input_tensor(None)  # the hidden states of a prompt would lie there during the update
        return leaving.view(-1, leaving.shape[-1])
