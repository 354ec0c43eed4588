"""Replacements of megatron's modules (norms, linears of one rank, embedding, value head), and `RolloutOps` between
them.

megatron wraps each product in two autograd functions, one of them an identity without tensor parallelism. For a decode
batch of 16 rows and 64 columns they took 13 of a layer's 19 microseconds. The linears here are only the product, with
the same bits.

`RolloutOps` in eager torch is the definition; on a CPU it equals the training forward pass bit for bit. The Triton
kernels round alike, and differ in the order of a norm's sum and the last bit of ``exp``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.models.expert_ops import ExpertOps, LinearInput, has_plain_swiglu
from megatron_rl.models.gradients import rms_norm
from megatron_rl.quantization.copies import packing_for

WIDE, STRIP, STRIP_ELEMENTS = 2048, 384, 2**18
LEAST_WORK = 2048  # numbers of a product's input: below them the calls of the strips cost more than they gain
THIN_PRODUCTS = False
"""Whether bf16 decode steps on CUDA use `thin_product`: off until ``tools.benchmark.gpu products`` shows a gain."""
THIN_ROWS, THIN_COLUMNS = 64, 8192
"""Its largest products: cuBLAS, with tiles of 128 x 128, uses only half of an H200 there."""


class Pending(NamedTuple):
    """A product to be added to the residual stream, and a bias that it does not include."""

    output: torch.Tensor
    bias: torch.Tensor | None


class TorchNorm(MegatronModule):
    """RMSNorm or LayerNorm whose parameters are marked for sequence parallelism.

    megatron's torch norm refuses sequence parallelism. The mark makes ``finalize_model_grads`` sum the weight's
    gradient over the tensor-parallel ranks, which each see a slice of tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config=config)
        self.eps = eps
        self.centre = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        """Added to the weight in use, not in storage, where bf16 would lose bits of a small weight."""
        first = torch.zeros if self.centre else torch.ones
        self.weight = torch.nn.Parameter(first(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias: torch.nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; on CUDA bit-identical to `RolloutOps.add_norm`."""
        if hidden_states.is_cuda and is_rms(self):
            from megatron_rl.models.training_kernels import SumAndNorm

            return SumAndNorm.apply(hidden_states, None, self.weight, self.eps)[1]
        if self.centre:
            weight = self.weight.float() + self.centre
            return rms_norm(hidden_states.float(), weight, self.eps).type_as(hidden_states)
        if self.bias is None:
            return rms_norm(hidden_states, self.weight, self.eps)
        return functional.layer_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.bias, self.eps)


class NormAcrossHeads(TorchNorm):
    """RMSNorm over all heads of a token, which are split over tensor-parallel ranks.

    The weight is replicated: megatron sums its gradient over these ranks, as for all query and key norms.
    """

    def __init__(self, config: TransformerConfig, width: int, ranks: dist.ProcessGroup) -> None:
        super().__init__(config, width, config.layernorm_epsilon)
        self._ranks = ranks

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map ``[T, B, heads of this rank, D]`` to the same."""
        heads, width = hidden_states.flatten(-2), self.weight.numel()
        if self._ranks.size() == 1:
            return super().forward(heads).view_as(hidden_states)
        squares = heads.float().square().sum(-1, keepdim=True)
        # A sum over the ranks, whose gradient is again a sum over the ranks.
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        share = self.weight.chunk(self._ranks.size())[self._ranks.rank()].float() + self.centre
        normed = heads.float() * torch.rsqrt(squares / width + self.eps) * share
        return normed.type_as(hidden_states).view_as(hidden_states)


class WholeColumnLinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` for one tensor-parallel rank."""

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map ``[T, 1, in]`` to ``[T, 1, out]``, and the bias if the caller adds it."""
        weight = self.weight if weight is None else weight
        in_rollout = input_.dim() == 2 and not torch.is_grad_enabled()
        multiply = rollout_product if in_rollout else _product
        product = (_thin_product if is_thin(self, input_) else multiply)(input_, weight)
        return _with_bias(product, self.bias, self.skip_bias_add)


class WholeRowLinear(RowParallelLinear):
    """A `RowParallelLinear` for one tensor-parallel rank."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map ``[T, 1, in]`` to ``[T, 1, out]``, and the bias if the caller adds it."""
        multiply = _thin_product if is_thin(self, input_) else _product
        return _with_bias(multiply(input_, self.weight), self.bias, self.skip_bias_add)


def is_thin(linear: torch.nn.Module, tokens: torch.Tensor) -> bool:
    """Return whether ``linear`` uses `thin_product`: in decode steps that need not match training bit for bit."""
    if not THIN_PRODUCTS or torch.is_grad_enabled() or getattr(linear.config, "batch_invariant_mode", False):
        return False
    # Experts have two-dimensional inputs in training too.
    is_few = tokens.dim() == 2 and len(tokens) <= THIN_ROWS and not linear.is_expert
    return is_few and len(linear.weight) <= THIN_COLUMNS and tokens.is_cuda and tokens.dtype == torch.bfloat16


def _thin_product(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from megatron_rl.quantization.thin_kernels import thin_product

    return thin_product(tokens, weight, None, None, tokens.dtype)


def _product(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.matmul(tokens, weight.t())


def rollout_product(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``tokens weight^T``, [N, out] of [N, in] and [out, in], without gradients.

    On a CPU a wide weight is multiplied in strips of columns: the same bits in 0.5 to 0.95 of the time, by its size.
    The last strip includes the rest, so that none is narrow enough for another kernel.
    """
    (wide, width), rows = weight.shape, tokens.shape[0]
    if wide < WIDE or weight.device.type != "cpu" or rows * width < LEAST_WORK:
        return torch.mm(tokens, weight.t())
    strip = max(STRIP, STRIP_ELEMENTS // width // STRIP * STRIP)
    product = tokens.new_empty(rows, wide)
    for start in range(0, max(1, wide - strip + 1), strip):
        end = start + strip if start + 2 * strip <= wide else wide
        torch.mm(tokens, weight[start:end].t(), out=product[:, start:end])
    return product


def _with_bias(
    product: torch.Tensor, bias: torch.Tensor | None, left_to_caller: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add the bias after the product, like stock: ``addmm`` may round differently."""
    if left_to_caller:
        return product, bias
    return (product if bias is None else product + bias), None


def call_linear(module: torch.nn.Module, tokens: LinearInput) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call ``module(tokens)``, skipping the hook dispatch if there are no hooks.

    ``forward`` is looked up on the instance, where quantised rollouts install theirs.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return module(tokens)
    return module.forward(tokens)


def call_without_bias(linear: torch.nn.Module, tokens: LinearInput) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call ``linear(tokens)`` and return its bias for the caller's kernel to add.

    With hooks or an adapter the linear adds the bias itself, and None is returned.
    """
    if linear.bias is None or hasattr(linear, "adapter") or linear._forward_hooks or linear._forward_pre_hooks:
        return call_linear(linear, tokens)
    before, linear.skip_bias_add = linear.skip_bias_add, True
    try:
        return linear.forward(tokens)
    finally:
        linear.skip_bias_add = before


class ScaledEmbedding(LanguageModelEmbedding):
    """megatron's embedding, times `factor`."""

    factor: float

    def forward(self, *args: Any, **settings: Any) -> torch.Tensor:
        """Map ``[B, T]`` ids to ``[T, B, hidden]``."""
        return super().forward(*args, **settings) * self.factor


def scale_embedding(gpt: GPTModel, config: TransformerConfig) -> None:
    """Scale the embedding from now on, by a factor in the model's dtype as in the families' own code."""
    gpt.embedding.__class__ = ScaledEmbedding
    gpt.embedding.factor = torch.tensor(math.sqrt(config.hidden_size), dtype=config.params_dtype).item()


class ValueHead(torch.nn.Module):
    """The output layer of a critic's `GPTModel`: one value per token instead of logits.

    Replicated on every tensor-parallel rank, which computes all values.

    The weight has the dtype of the others (another one would need a second DDP buffer) and fp32 main parameters. The
    product is fp32. It starts at zero: the first advantages are those without a critic, without random errors to
    unlearn.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # Each rank sees its part of the sequence: megatron sums the gradients of parameters with this mark.
        self.weight.sequence_parallel = config.sequence_parallel
        self.sequence_parallel = config.sequence_parallel

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Map ``[T / ranks, 1, hidden]`` to ``[T, 1, 1]`` fp32; ranks is 1 without sequence parallelism."""
        del weight, runtime_gather_output
        values = functional.linear(input_.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank computes the same loss over all values, so each takes the gradient of its own part.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class RolloutOps:
    """Element-wise operations of decode steps on the residual stream [T, hidden]."""

    def __init__(self, fused: bool) -> None:
        """``fused``: use Triton kernels, except for LayerNorm and activations other than ``silu(gate) x up``."""
        self.fused = fused
        self.experts = ExpertOps(fused)

    def add_norm(
        self, residual: torch.Tensor, pending: Pending | None, norm: torch.nn.Module, reader: torch.nn.Module | None
    ) -> tuple[torch.Tensor, LinearInput]:
        """Add ``pending`` to the residual stream in place; return it and its norm in the format of ``reader``."""
        output, bias = pending or (None, None)
        if self.fused and is_rms(norm):
            from megatron_rl.models.kernels import add_norm

            packing = None if reader is None else packing_for(reader)
            return add_norm(residual, output, bias, norm.weight, norm.eps, packing)
        if pending is not None:
            residual = self.add(residual, pending)
        return residual, norm.forward(residual)

    def add(self, residual: torch.Tensor, pending: Pending) -> torch.Tensor:
        """Return the residual stream with ``pending`` added, in megatron's order."""
        output, bias = pending
        return (output if bias is None else output.add_(bias)).add_(residual)

    def activate(self, inner: torch.Tensor, config: TransformerConfig, reader: torch.nn.Module) -> LinearInput:
        """Return a dense MLP's activation, for the linear ``reader``: [T, F], or [T, 2 F] -> [T, F]."""
        if not config.gated_linear_unit:
            return config.activation_func(inner)
        if self.fused and has_plain_swiglu(config):
            from megatron_rl.models.kernels import gate_up

            return gate_up(inner, packing_for(reader))
        gate, up = inner.chunk(2, -1)
        return config.activation_func(gate).mul_(up)


def is_rms(norm: torch.nn.Module) -> bool:
    """Return whether the kernels support the norm."""
    return type(norm) is TorchNorm and norm.bias is None and not norm.centre
