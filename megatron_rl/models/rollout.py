"""The model's forward pass in a rollout: embedding, layers, norm and head only.

megatron's layer adds recomputation, dropout, offloading and cross-attention, all off in a rollout; at 64 rows and
hidden size 64 this overhead took as long as the products. The same operations run on the same numbers, so on a CPU
results equal the training forward pass bit for bit.
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
    """Interface of the rollout context to the forward pass."""

    ops: RolloutOps
    max_tokens_per_ep_rank: int | None
    """Largest decode batch of any expert-parallel rank; 0: all equal this one's. None for prompts."""

    @property
    def stores_heads(self) -> bool:
        """Whether this pass supports `attend_mixed`."""
        ...

    def cos_sin(self, kind: LayerKind) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [T, 1, 1, R] of the new tokens."""
        ...

    def attend_mixed(
        self, layer: int, mixed: torch.Tensor, bias: torch.Tensor | None, query_norm: torch.nn.Module | None,
        key_norm: torch.nn.Module | None, kind: LayerKind, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Apply norms, rotation, cache and attention to ``mixed`` [T, groups, share + 2, D] -> ``[T, 1, heads * D]``.

        ``bias`` [groups x (share + 2) x D] is added first. ``mixed`` holds the queries, the key and the value of each
        group.
        """
        ...

    @property
    def keeps_latents(self) -> bool:
        """True if the KV cache stores MLA latents."""
        ...

    def attend_latent(
        self, layer: int, latent: torch.Tensor, heads: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        absorbed: Callable[[], torch.Tensor], kind: LayerKind,
    ) -> tuple[torch.Tensor, bool]:  # fmt: skip
        """Store ``latent`` [T, 1, 1, W] and attend; also return whether the result is latent.

        If so, the ``absorbed`` queries [T, 1, heads, W] attended to cached latents, and the result has one latent per
        head. For prompts the expanded ``heads`` attend: query, key and value [T, 1, heads, D].
        """
        ...

    def states(self, layer: int) -> LayerStates:
        """Return the recurrent states of ``layer``, numbered as in `attend`, for this pass."""
        ...

    def record_routing(self, layer: int, experts: torch.Tensor) -> None:
        """Store the ``experts`` [T, k] of the new tokens, with `--rl-router-replay`."""
        ...

    def last_token_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Select the tokens that need logits: ``[1, T, hidden]`` to ``[rows, hidden]``."""
        ...


class RolloutLayer(TransformerLayer):
    """megatron's layer made of two blocks; `decode` is its forward pass in evaluation mode with a `RolloutPlan`."""

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
        """Run megatron's layer; the MLP gets the `PackedPlan` or, with Transformer Engine, the `RolloutPlan`."""
        plans = {"packed_seq_params": packed_seq_params, "inference_context": inference_context}
        with self.mlp.using_plan(packed_seq_params if inference_context is None else inference_context):
            if hidden_states.is_cuda and self._is_plain and isinstance(packed_seq_params, PackedPlan):
                return self._summed(hidden_states, packed_seq_params), None
            return super().forward(hidden_states, *args, **plans, **settings)

    def _summed(self, hidden: torch.Tensor, plan: PackedPlan) -> torch.Tensor:
        """Run megatron's forward pass without dropout, [T, 1, hidden]; residual sum and norm are one kernel."""
        from megatron_rl.models.training_kernels import SumAndNorm

        output, attention = None, functools.partial(self.self_attention, attention_mask=None, packed_seq_params=plan)
        for norm, block in ((self.input_layernorm, attention), (self.pre_mlp_layernorm, self.mlp)):
            hidden, normed = SumAndNorm.apply(hidden, output, weight_of(norm), norm.eps)
            output, bias = block(normed)
            output = output if bias is None else output + bias
        return hidden + output

    def decode(self, hidden: torch.Tensor, pending: Pending | None, plan: RolloutPlan) -> tuple[torch.Tensor, Pending]:
        """Map the residual stream ``[T, hidden]`` and a pending addition to those after the layer.

        Without gradients. The addition is left to the next norm, so that one kernel can do both.
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
    """Calls the model of ``policy`` with ``plan``; Transformer Engine's layers run through `GPTModel.forward`.

    On a CPU both ways give the same bits. Call it in evaluation mode and without gradients.
    """

    def __init__(self, policy: PolicyModel, plan: RolloutPlan) -> None:
        self._policy, self._plan = policy, plan
        self._is_whole = policy.config.tensor_model_parallel_size == 1

    @property
    def is_local(self) -> bool:
        """Whether the layers are local, so that `RolloutLayer.decode` runs directly."""
        return self._policy.config.transformer_impl == "local"

    def chunk(self, number: int, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run one of the policy's chunks at ``positions`` [N].

        The model's first chunk takes ids [N], the others hidden states ``[N, hidden]``. The last one returns fp32
        logits over the real vocabulary, ``[rows, V]``.
        """
        gpt = self._policy.chunks[number]
        outputs = self._run_local(gpt, inputs) if self.is_local else self._run_gpt_model(gpt, inputs, positions)
        return outputs[:, : self._policy.vocab_size].float() if gpt.post_process else outputs

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the fp32 logits [N, V] for the head's input ``[N, hidden]``; on the model's last stage."""
        return self._head(self._policy.chunks[-1], hidden)[:, : self._policy.vocab_size].float()

    def _run_local(self, gpt: GPTModel, inputs: torch.Tensor) -> torch.Tensor:
        plan, hidden, pending = self._plan, inputs, None
        if gpt.pre_process:
            embedding = gpt.embedding.word_embeddings
            hidden = functional.embedding(inputs, embedding.weight) if self._is_whole else embedding(inputs)
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

    def _run_gpt_model(self, gpt: GPTModel, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ids, hidden = (inputs[None], None) if gpt.pre_process else (None, inputs[:, None])
        # Passed twice: the layers read the input tensor, and megatron's fp8 path zeroes padding in the argument.
        gpt.set_input_tensor(hidden)
        with inference_flag():
            outputs = gpt(ids, positions[None], None, hidden, inference_context=self._plan, runtime_gather_output=True)
        gpt.set_input_tensor(None)  # the hidden states of a prompt would lie there during the update
        return outputs.view(-1, outputs.shape[-1])
