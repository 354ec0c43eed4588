"""The layer of routed experts: megatron's, and what it does in a rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

if TYPE_CHECKING:
    from megatron_rl.models.rollout import RolloutPlan


class ExpertLayer(MoELayer):
    """megatron's layer: each token goes through the experts that the router chooses, on whatever ranks they are."""

    def decode(self, tokens: torch.Tensor, plan: RolloutPlan) -> torch.Tensor:
        """``[T, hidden]`` -> ``[T, hidden]``; in evaluation mode, without gradients."""
        del plan  # of its forward pass the layer needs to know nothing
        return self(tokens[:, None])[0].view(tokens.shape)
