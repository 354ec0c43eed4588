"""The model's forward pass in a rollout: embedding, layers, norm and head, and no Python between them."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as functional

from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.layer import RolloutLayer, RolloutPlan
from megatron_rl.platform.megatron import inference_flag


class ForwardPlan(RolloutPlan, Protocol):
    """What the forward pass asks of a rollout's context."""

    def last_token_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[1, T, hidden]`` -> ``[rows, hidden]``: the tokens worth a logit."""
        ...


class RolloutForward:
    """Calls the model of ``policy`` with ``plan``; what it does not know goes through `GPTModel.forward`.

    On a CPU both ways give the same bits. Call it in evaluation mode and without gradients.
    """

    def __init__(self, policy: PolicyModel, plan: ForwardPlan) -> None:
        self._policy, self._plan = policy, plan
        self.is_short = _is_known(policy)
        """Whether the short way is taken."""
        self._is_whole = policy.config.tensor_model_parallel_size == 1

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[N]`` ids and positions -> ``[rows, V]`` fp32 logits over the real vocabulary."""
        logits = self._short(token_ids) if self.is_short else self._stock(token_ids, positions)
        return logits[:, : self._policy.vocab_size].float()

    def _short(self, token_ids: torch.Tensor) -> torch.Tensor:
        gpt, plan = self._policy.gpt, self._plan
        embedding = gpt.embedding.word_embeddings
        hidden = functional.embedding(token_ids, embedding.weight) if self._is_whole else embedding(token_ids)
        pending = None
        for layer in gpt.decoder.layers:
            hidden, pending = layer.decode(hidden, pending, plan)
        _, normed = plan.ops.add_norm(hidden, pending, gpt.decoder.final_layernorm, None)
        chosen = plan.last_token_logits(normed[None])
        tied = gpt.share_embeddings_and_output_weights
        weight = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
        if self._is_whole:
            return torch.mm(chosen, weight.t())
        return gpt.output_layer(chosen[:, None], weight=weight, runtime_gather_output=True)[0][:, 0]

    def _stock(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with inference_flag():
            logits = self._policy.gpt(
                token_ids[None], positions[None], None, inference_context=self._plan, runtime_gather_output=True
            )
        return logits.view(-1, logits.shape[-1])


def _is_known(policy: PolicyModel) -> bool:
    """One stage, rotary positions, our layers, nothing between them."""
    gpt, config = policy.gpt, policy.config
    return (
        gpt.pre_process
        and gpt.post_process
        and not gpt.mtp_process
        and not gpt.embedding.add_position_embedding
        and gpt.embedding.tokentype_embeddings is None
        and gpt.decoder.final_layernorm is not None
        and not (config.fp8 or config.fp4)
        and all(isinstance(layer, RolloutLayer) and layer.has_short_way for layer in gpt.decoder.layers)
    )
