"""An MLP that every token goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.models.blocks import Block
from megatron_rl.models.rollout_ops import LinearInput, Pending, WholeColumnLinear, WholeRowLinear, call_linear

if TYPE_CHECKING:
    from megatron_rl.models.rollout import RolloutPlan


class DenseMLP(Block, MLP):
    """megatron's MLP."""

    expects = {"activation_func_clamp_value": None, "glu_linear_offset": 0.0}
    reader = "linear_fc1"

    @staticmethod
    def place(submodules: MLPSubmodules, config: TransformerConfig) -> None:
        if config.tensor_model_parallel_size == 1:
            submodules.linear_fc1, submodules.linear_fc2 = WholeColumnLinear, WholeRowLinear

    def decode(self, normed: LinearInput, plan: RolloutPlan) -> Pending:
        inner, bias = call_linear(self.linear_fc1, normed)
        if bias is not None:
            inner.add_(bias)
        return Pending(*call_linear(self.linear_fc2, plan.ops.activate(inner, self.config, self.linear_fc2)))


BLOCK = DenseMLP
