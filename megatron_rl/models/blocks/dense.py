"""An MLP that every token goes through."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.families import LayerKind
from megatron_rl.models.rollout_ops import LinearInput, Pending, WholeColumnLinear, WholeRowLinear, call_linear

if TYPE_CHECKING:
    from megatron_rl.models.rollout import RolloutPlan


class DenseMLP(MLP):
    """megatron's MLP."""

    expects = {"activation_func_clamp_value": None, "glu_linear_offset": 0.0}

    @staticmethod
    def stock(config: TransformerConfig) -> dict[str, Any]:
        """See `Block`."""
        del config
        return {}

    @staticmethod
    def place(submodules: MLPSubmodules, config: TransformerConfig) -> None:
        """See `Block`."""
        if config.tensor_model_parallel_size == 1:
            submodules.linear_fc1, submodules.linear_fc2 = WholeColumnLinear, WholeRowLinear

    def prepare(self, kind: LayerKind) -> None:
        """See `Block`."""

    @property
    def reader(self) -> torch.nn.Module:
        """See `Block`."""
        return self.linear_fc1

    def told(self, plan: Any) -> contextlib.AbstractContextManager[None]:
        """See `Block`."""
        del plan
        return contextlib.nullcontext()

    def decode(self, normed: LinearInput, plan: RolloutPlan) -> Pending:
        """See `Block`."""
        inner, bias = call_linear(self.linear_fc1, normed)
        if bias is not None:
            inner.add_(bias)
        return Pending(*call_linear(self.linear_fc2, plan.ops.activate(inner, self.config, self.linear_fc2)))


BLOCK = DenseMLP
