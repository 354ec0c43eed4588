"""Quantised copies of linears and of expert stacks, and the forward passes that replace the layers' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_rl.errors import QuantizationError
from megatron_rl.quantization.recipe import PackedActivations, Packing, QuantizedWeight, Recipe
from megatron_rl.quantization.shapes import Split


@dataclass(frozen=True)
class LinearKind:
    """How a linear, megatron's or Transformer Engine's, communicates and adds its bias."""

    group: dist.ProcessGroup | None
    """Tensor-parallel ranks that split the weight; None if this rank has all of it."""
    split: Split
    """Split dimension."""
    exchanges: bool
    """Whether it gathers inputs from these ranks, or sums outputs. Experts leave that to the dispatcher."""
    returns_bias: bool
    """True if the caller adds the bias."""
    is_expert: bool
    has_norm: bool
    """True if it normalises its inputs first."""

    @classmethod
    def of(cls, module: torch.nn.Module) -> LinearKind | None:
        """Return the kind of a linear; None: not a linear of a decoder layer."""
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            split: Split = "rows" if isinstance(module, RowParallelLinear) else "columns"
            group, exchanges = _shared(module.tp_group), not module.explicit_expert_comm
            own = module.skip_bias_add, module.is_expert
            return cls(group, split, exchanges, *own, has_norm=False)
        if hasattr(module, "te_return_bias"):  # megatron's classes of Transformer Engine; there may be none to import
            split = "rows" if module.parallel_mode == "row" else "columns"
            group, has_norm = _shared(module.tp_group), hasattr(module, "layer_norm_weight")
            return cls(group, split, True, module.te_return_bias, is_expert=False, has_norm=has_norm)
        return None

    def normed(self, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised input of ``module``, [..., in]."""
        if not self.has_norm:
            return x
        if module.normalization == "LayerNorm":
            return functional.layer_norm(x, x.shape[-1:], module.layer_norm_weight, module.layer_norm_bias, module.eps)
        return functional.rms_norm(x, x.shape[-1:], module.layer_norm_weight, module.eps)

    def added_bias(self, module: torch.nn.Module) -> torch.Tensor | None:
        """Return the bias [out] if the linear adds it itself, else None. Transformer Engine's may be empty."""
        return None if self.returns_bias or module.bias is None or not module.bias.numel() else module.bias


class StackedLinear(torch.nn.Module):
    """The same linear of all local experts. The caller adds biases: `biases_of`."""

    def __init__(
        self, weight: torch.nn.Parameter, tensor_group: dist.ProcessGroup, split: Split,
        bias: torch.nn.Parameter | None = None,
    ) -> None:  # fmt: skip
        """``weight`` [E, out, in], split over the expert tensor-parallel group; ``bias`` [E, out], for one rank only.
        """
        super().__init__()
        self.weight, self.bias, self.tensor_group, self.split = weight, bias, tensor_group, split

    def forward(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Map ``tokens`` [T, in] sorted by expert to [T, out]; rows after the last of ``ends`` [E] int32 are undefined.
        """
        return functional.grouped_mm(tokens, self.weight.transpose(1, 2), offs=ends)

    def biases_of(self, rows: int, ends: torch.Tensor) -> torch.Tensor:
        """Return the bias of each row of the product, [rows, out]; after the last end that of the last expert."""
        each = torch.arange(rows, dtype=ends.dtype, device=ends.device)
        return self.bias[torch.searchsorted(ends, each, right=True).clamp_max(len(ends) - 1)]


def as_numbers(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight``, or a dequantised copy of fp8 codes (`--fp8-param-gather`)."""
    if not is_float8tensor(weight):
        return weight
    with torch.no_grad():
        return weight.dequantize()


def weight_of(module: torch.nn.Module, expert: int | None = None) -> torch.Tensor:
    """Return the weight [N, K] of a linear, or of an ``expert`` of a stack, including its adapter."""
    weight = as_numbers(module.weight) if expert is None else module.weight[expert]
    adapter = getattr(module, "adapter", None)
    return weight if adapter is None else adapter.merged(weight, expert)


def runs_quantized(module: torch.nn.Module) -> bool:
    """Return whether a linear or stack currently uses its quantised copy."""
    return isinstance(_copy_of(module), QuantizedLinear | QuantizedStack)


def _copy_of(module: torch.nn.Module) -> Any:
    """Return the object whose method replaces the module's forward, a quantised copy or another one."""
    return getattr(vars(module).get("forward"), "__self__", None)


def effective_operands(module: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight [N, K] and ``tokens`` [..., K] as ``module`` currently multiplies them, with quantisation
    error.

    For products in another order. Each tensor-parallel rank has its own rows.
    """
    layer = _copy_of(module)
    if isinstance(layer, QuantizedLinear):
        weight = layer.recipe.dequantize(layer.weight).to(tokens.dtype)
        return weight, layer.recipe.round_trip(tokens, layer.weight)
    return weight_of(module).to(tokens.dtype), tokens


@dataclass(eq=False)
class QuantizedMatrix:
    """A separately quantised weight: of a linear, or of one expert in a stack."""

    name: str
    module: torch.nn.Module
    """Owner of the parameter."""
    recipe: Recipe
    weight: QuantizedWeight
    group: dist.ProcessGroup | None
    """Tensor-parallel ranks that split the weight; None if this rank has all of it."""
    split: Split
    """Split dimension."""
    expert: int | None = None
    """Index in a stack."""
    quantizes_gradients: bool = False
    """Whether the backward pass also multiplies quantised numbers."""

    @property
    def parameter(self) -> torch.Tensor:
        """[N, K] in full precision, with its adapter in fp32: see `weight_of`."""
        return weight_of(self.module, self.expert)


class ForwardReplacement:
    """Replaces the ``forward`` of its ``module`` by an instance attribute."""

    module: torch.nn.Module
    forward: Callable[..., Any]
    _hidden: dict[str, Any] | None = None
    """The module's own ``forward`` attribute, if any: megatron uses one to pad tokens of fp8 products."""

    def install(self) -> None:
        """Redirect the module's calls to this object."""
        if self._hidden is None:
            self._hidden = {name: value for name, value in vars(self.module).items() if name == "forward"}
        self.module.forward = self.forward

    def remove(self) -> None:
        """Restore the module's own forward."""
        if self._hidden is not None:
            vars(self.module).pop("forward", None)
            vars(self.module).update(self._hidden)
            self._hidden = None


class QuantizedLinear(QuantizedMatrix, ForwardReplacement):
    """A column- or row-parallel linear with a quantised weight."""

    def __init__(self, name: str, module: torch.nn.Module, recipe: Recipe, quantizes_gradients: bool = False) -> None:
        """``module``: must have a `LinearKind`."""
        self.kind = kind = LinearKind.of(module)
        weight = recipe.allocate(module.weight.shape, module.weight.device)
        super().__init__(name, module, recipe, weight, kind.group, kind.split, None, quantizes_gradients)
        self._exchanging = kind.group if kind.exchanges else None
        self.calls = 0
        """Forward passes with the quantised product, without replays of captured graphs."""

    def forward(
        self, input_: torch.Tensor | PackedActivations, weight: Any = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run as the module: [T, 1, in] -> [T, 1, out], and the bias if the caller adds it.

        Packed activations [T, in] come from rollouts: no gradients, no sequence parallelism.
        """
        del weight, runtime_gather_output  # only the output layer is given them, and it is not quantised
        self.calls += 1
        if isinstance(input_, PackedActivations):
            product = self._summed(self.recipe.multiply(input_, self.weight))
        else:
            x = self.kind.normed(self.module, input_)
            product = self._summed(self._product(self._gathered(x)))
            if hasattr(self.module, "adapter") and torch.is_grad_enabled():
                seen = self.recipe.round_trip(x.detach(), self.weight)
                product = product + self.module.adapter.straight_through(seen, self.module.sequence_parallel)
        if getattr(self.module, "skip_bias_add", self.kind.returns_bias):  # rollouts set it for single calls
            return product, self.module.bias
        bias = self.kind.added_bias(self.module)
        return product if bias is None else product + bias, None

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the input of a column-parallel layer's ranks; the gradients of their parts are summed."""
        if self._exchanging is None or self.split == "rows":
            return x
        if self.module.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=self._exchanging)
        return copy_to_tensor_model_parallel_region(x, group=self._exchanging)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if _wants_gradients(x, self.module):
            return StraightThrough.apply(x, self.module.weight, self)
        return self.recipe.matmul(x, self.weight)

    def _summed(self, product: torch.Tensor) -> torch.Tensor:
        """Sum over a row-parallel layer's ranks, in the dtype of activations; scattered under sequence parallelism.

        Contiguous, because megatron reduces a copy of a strided tensor, and returns the original.
        """
        if self._exchanging is None or self.split == "columns":
            return product
        product = product.contiguous()
        if self.module.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(product, group=self._exchanging)
        return reduce_from_tensor_model_parallel_region(product, group=self._exchanging)


class QuantizedStack(ForwardReplacement):
    """A stack of experts with a quantised copy."""

    def __init__(
        self, names: Sequence[str], module: StackedLinear, recipe: Recipe, quantizes_gradients: bool = False
    ) -> None:
        """``names`` of the linears of all its experts, in order."""
        if len(names) < len(module.weight):
            text = f"of experts that are one product, {names[0]} is to be quantised and others are not"
            raise QuantizationError(f"{text}; leave out all of them with --rl-quantization-skip, or none")
        self.module, self.recipe = module, recipe
        self.weight = recipe.allocate(module.weight.shape, module.weight.device)
        group = _shared(module.tensor_group)
        self.experts = [
            QuantizedMatrix(
                name, module, recipe, self.weight.of_expert(index), group, module.split, index, quantizes_gradients
            )
            for index, name in enumerate(names)
        ]

    def forward(self, tokens: torch.Tensor | PackedActivations, ends: torch.Tensor) -> torch.Tensor:
        """Run as `StackedLinear`; with gradients expert by expert. Activations of a rollout may be packed."""
        if isinstance(tokens, PackedActivations):
            return self.recipe.grouped_multiply(tokens, self.weight, ends)
        if not _wants_gradients(tokens, self.module):
            return self.recipe.grouped_matmul(tokens, self.weight, ends)
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = zip(tokens.split(sizes), self.module.weight.unbind(), self.experts, strict=True)
        product = torch.cat([StraightThrough.apply(*part) for part in parts])
        if hasattr(self.module, "adapter"):
            own = zip(tokens.detach().split(sizes), self.experts, strict=True)
            seen = torch.cat([expert.recipe.round_trip(part, expert.weight) for part, expert in own])
            product = product + self.module.adapter.straight_through(seen, ends)
        return product


def _shared(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return group if group is not None and group.size() > 1 else None


def _wants_gradients(x: torch.Tensor, module: torch.nn.Module) -> bool:
    return torch.is_grad_enabled() and any(wants.requires_grad for wants in (x, *module.parameters()))


def packing_for(module: torch.nn.Module) -> Packing | None:
    """Return how a kernel may quantise the current input of ``module``.

    None if it is not quantised, needs unquantised input, or has hooks, which need it too.
    """
    layer = _copy_of(module)
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if isinstance(layer, QuantizedStack):
        return layer.recipe.grouped_packing(layer.weight)
    return layer.recipe.packing(layer.weight) if isinstance(layer, QuantizedLinear) else None


class StraightThrough(torch.autograd.Function):
    """The quantised product, with gradients of the product of dequantised numbers, or of the recipe's own products.

    The straight-through estimator of https://arxiv.org/abs/1308.3432 for both roundings.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: QuantizedMatrix) -> torch.Tensor:
        """Return the product; ``weight`` is an argument only to receive its gradient."""
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer.recipe.matmul(x, layer.weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Return the required gradients of input and weight."""
        (x,) = ctx.saved_tensors
        layer: QuantizedMatrix = ctx.layer
        dy, tokens = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        recipe, q, (wants_input, wants_weight, _) = layer.recipe, layer.weight, ctx.needs_input_grad
        if layer.quantizes_gradients and len(tokens):
            of_input = recipe.input_gradient(dy, layer.parameter.detach(), q) if wants_input else None
            of_weight = recipe.weight_gradient(dy, tokens) if wants_weight else None
        else:  # the numbers that the forward pass multiplied
            of_input = dy @ recipe.dequantize(q).to(dy.dtype) if wants_input else None
            of_weight = dy.t() @ recipe.round_trip(tokens, q) if wants_weight else None
        return None if of_input is None else of_input.view(x.shape), of_weight, None
