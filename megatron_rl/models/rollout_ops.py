"""What a decoder layer does between its products in a rollout: eager torch, or one Triton kernel each.

The eager operations are the definition. On a CPU they give the training forward's bits; the kernels round where they
round, and differ by the order of a norm's sum and the last bit of ``exp``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.quantization.linears import packing_for
from megatron_rl.quantization.recipe import PackedActivations

LinearInput = torch.Tensor | PackedActivations


class Pending(NamedTuple):
    """A product that is still to be added to the residual stream, and its bias where the product left it out."""

    output: torch.Tensor
    bias: torch.Tensor | None


def add(residual: torch.Tensor, pending: Pending) -> torch.Tensor:
    """``output + bias + residual`` in megatron's order, in the memory of ``output``."""
    output = pending.output
    if pending.bias is not None:
        output.add_(pending.bias)
    return output.add_(residual)


class TorchNorm(torch.nn.Module):
    """RMSNorm or LayerNorm whose parameters are marked for sequence parallelism.

    megatron's own torch norm refuses sequence parallelism. The mark makes ``finalize_model_grads``
    add up the weight's gradient over the tensor-parallel ranks, which each see a slice of tokens.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias: torch.nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        shape = (hidden_states.shape[-1],)
        if self.bias is None:
            return functional.rms_norm(hidden_states, shape, self.weight, self.eps)
        return functional.layer_norm(hidden_states, shape, self.weight, self.bias, self.eps)


class RolloutOps:
    """The operations in eager torch; [T, hidden] is the residual stream."""

    stores_heads = False
    """Whether decode steps rotate heads and write the cache in one go where the cache has pages."""

    def add_norm(
        self,
        residual: torch.Tensor,
        pending: Pending | None,
        norm: torch.nn.Module,
        reader: torch.nn.Module | None,
    ) -> tuple[torch.Tensor, LinearInput]:
        """The residual stream with ``pending`` added, in its memory, and its norm as the linear ``reader`` wants it."""
        del reader
        if pending is not None:
            residual = add(residual, pending)
        return residual, norm.forward(residual)

    def activate(self, inner: torch.Tensor, config: TransformerConfig, reader: torch.nn.Module) -> LinearInput:
        """A plain MLP's activation, for the linear ``reader``: [T, F], or [T, 2 F] -> [T, F]."""
        del reader
        if not config.gated_linear_unit:
            return config.activation_func(inner)
        gate, up = inner.chunk(2, -1)
        return config.activation_func(gate).mul_(up)


class FusedOps(RolloutOps):
    """A Triton kernel for each, eager for what the kernels do not know: LayerNorm and other activations."""

    stores_heads = True

    def add_norm(
        self,
        residual: torch.Tensor,
        pending: Pending | None,
        norm: torch.nn.Module,
        reader: torch.nn.Module | None,
    ) -> tuple[torch.Tensor, LinearInput]:
        """See `RolloutOps`."""
        if not is_rms(norm):
            return super().add_norm(residual, pending, norm, reader)
        from megatron_rl.models.kernels.rows import add_norm

        packing = None if reader is None else packing_for(reader)
        return add_norm(residual, *(pending or (None, None)), norm.weight, norm.eps, packing)

    def activate(self, inner: torch.Tensor, config: TransformerConfig, reader: torch.nn.Module) -> LinearInput:
        """See `RolloutOps`."""
        if not (config.gated_linear_unit and config.activation_func is functional.silu):
            return super().activate(inner, config, reader)
        from megatron_rl.models.kernels.rows import gate_up

        return gate_up(inner, packing_for(reader))


def is_rms(norm: torch.nn.Module) -> bool:
    """Whether the kernels know it."""
    return type(norm) is TorchNorm and norm.bias is None


def ops_for(device: torch.device) -> RolloutOps:
    """The kernels on CUDA, eager torch elsewhere."""
    return FusedOps() if device.type == "cuda" else RolloutOps()
