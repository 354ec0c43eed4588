"""A layer's experts whose products in training are Transformer Engine's, in fp8 if the flags say so.

The parameters stay the two stacks of `GroupedExperts`: Transformer Engine's grouped linear is called with views of
them. So names, checkpoints, optimizer and quantised copies are those of local layers, and the products are those of
megatron's `TEGroupedMLP`, of tokens that are padded alike.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.fp8_utils import get_fp8_context
from torch.func import functional_call
from transformer_engine.pytorch import Fp8Padding, Fp8Unpadding, GroupedLinear

from megatron_rl.models import changed
from megatron_rl.models.blocks.experts import GroupedExperts
from megatron_rl.models.expert_ops import Dispatched, ExpertOps
from megatron_rl.quantization.copies import StackedLinear, runs_quantized


class EngineStack(StackedLinear):
    """A stack whose product is Transformer Engine's where the host knows how many tokens each expert has."""

    def __init__(self, weight: torch.nn.Parameter, *given: Any) -> None:
        """``given``: as of `StackedLinear`, which adds the bias here too."""
        super().__init__(weight, *given)
        experts, rows, columns = weight.shape
        grouped = GroupedLinear(
            experts, columns, rows, bias=False, params_dtype=weight.dtype, device=weight.device,
            init_method=lambda drawn: drawn,
        )  # fmt: skip
        # In a tuple it is no part of the model: nobody else loads, saves or trains the weights that it never uses.
        self._grouped = (grouped.to("meta"),)
        self.sizes: list[int] | None = None
        """Tokens of each expert."""

    def forward(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Run as `StackedLinear`."""
        if self.sizes is None:
            return super().forward(tokens, ends)
        weights = {f"weight{expert}": weight for expert, weight in enumerate(self.weight.unbind())}
        return functional_call(self._grouped[0], weights, (tokens, self.sizes))


class EngineExperts(GroupedExperts):
    """Experts of a layer of Transformer Engine.

    Rollouts compute in torch's grouped product, or in that of the quantised copies, without a read by the host. In fp8
    and without copies they run what training runs, so that their log-probs agree.
    """

    linear = EngineStack

    def __init__(self, num_local_experts: int, *given: Any, **named: Any) -> None:
        super().__init__(num_local_experts, *given, **named)
        self._pad, self._unpad = Fp8Padding(num_local_experts), Fp8Unpadding(num_local_experts)

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probabilities: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Run as `GroupedExperts`; fp8 products want every expert's tokens padded."""
        sizes = tokens_per_expert.tolist()
        if not self.config.fp8:
            with self._told(sizes):
                return super().forward(tokens, tokens_per_expert, probabilities)
        # megatron enters it around a layer, but not where a rank only joins in with others that share its experts.
        with get_fp8_context(self.config):
            padded, wider = self._pad(tokens, sizes)
            shares, _ = self._pad(probabilities[:, None], sizes)
            with self._told(wider):
                output, _ = super().forward(padded, torch.tensor(wider), shares[:, 0])
            return self._unpad(output, sizes), None

    def decode(self, given: Dispatched, ops: ExpertOps) -> torch.Tensor:
        """Run `forward` on a rollout's tokens: [N, hidden]."""
        if not self.config.fp8 or all(map(runs_quantized, (self.linear_fc1, self.linear_fc2))):
            return super().decode(given, ops)
        sizes = given.ends.diff(prepend=given.ends.new_zeros(1)).cpu()
        count = int(sizes.sum())
        output, _ = self.forward(given.rows[:count], sizes, given.shares[:count])
        return functional.pad(output, (0, 0, 0, len(given.rows) - count))

    def _told(self, sizes: list[int]) -> AbstractContextManager[None]:
        return changed("sizes", {self.linear_fc1: sizes, self.linear_fc2: sizes})
