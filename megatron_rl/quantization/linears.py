"""The quantised copies of a model's linear layers: made once, refreshed in place, switched on and off.

    linears = QuantizedLinears(model, recipe, skip)
    with linears.installed():      # refreshed first, if the weights have changed
        ...                        # every forward pass runs on quantised weights

A parameter stays as it is; what changes for a while is its module's ``forward``. Without gradients it is the recipe's
product; with them (aligned training) its backward pass is straight-through: that of the product of the dequantised
numbers, as if rounding had slope 1. Copies are plain buffers outside the module tree: no state dict, no optimizer and
no checkpoint sees them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_rl.errors import QuantizationError
from megatron_rl.parallel.collectives import gather_json
from megatron_rl.platform.memory import release, storages_of, take_back
from megatron_rl.quantization.formats import smoothing_factors
from megatron_rl.quantization.recipe import PackedActivations, Packing, Recipe, maximum_over
from megatron_rl.quantization.shapes import Split, skipped

ParallelLinear = ColumnParallelLinear | RowParallelLinear


def parallel_linears(model: torch.nn.Module) -> dict[str, ParallelLinear]:
    """The linears of the decoder's layers by name, ``layers.0.mlp.linear_fc1``, experts' included.

    ``model`` may be a ``ModuleList`` of the chunks that a pipeline stage has; layers and experts are counted over all
    ranks.
    Embedding, output head, norms and router are not among them: they stay as they are.
    """
    found = {}
    for layer in (layer for chunk in _chunks(model) for layer in chunk.decoder.layers):
        prefix = f"layers.{layer.layer_number - 1}"
        for name, module in layer.named_modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                found[f"{prefix}.{_counted_over_ranks(layer, name)}"] = module
    return found


def _counted_over_ranks(layer: torch.nn.Module, name: str) -> str:
    """``mlp.experts.local_experts.0.linear_fc1`` by the number that the expert has in the whole layer."""
    parts = name.split(".")
    if "local_experts" in parts:
        place = parts.index("local_experts") + 1
        parts[place] = str(layer.mlp.local_expert_indices[int(parts[place])])
    return ".".join(parts)


def _chunks(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    return model if isinstance(model, torch.nn.ModuleList) else (model,)


class QuantizedLinears:
    """Owns the quantised copies of one model."""

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: Recipe | None,
        skip: Sequence[str] = (),
        lockstep_group: dist.ProcessGroup | None = None,
    ) -> None:
        """No copies without a recipe. ``skip``: patterns of layers that stay unquantised, see ``shapes.skipped``.

        ``lockstep_group`` are the ranks that refuse together what one of them cannot quantise; None: this rank alone.
        """
        self.recipe = recipe
        self._lockstep_group = lockstep_group
        linears = {} if recipe is None else parallel_linears(model)
        self.plain = tuple(name for name in linears if skipped(name, skip, _chunks(model)[0].config.num_layers))
        """Names of the layers left as they are."""
        self.layers = tuple(
            QuantizedLinear(name, module, recipe) for name, module in linears.items() if name not in self.plain
        )
        self._is_installed = False
        self._stale = True
        self._released: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def stored_bytes(self) -> int:
        """Of codes and scales on this rank."""
        return sum(layer.weight.stored_bytes for layer in self.layers)

    @property
    def num_weights(self) -> int:
        """Numbers that have a quantised copy on this rank."""
        return sum(layer.weight.rows * layer.weight.columns for layer in self.layers)

    @property
    def held_bytes(self) -> int:
        """On the device now: `stored_bytes` and what only CPUs need, or next to nothing after `release`."""
        tensors = [tensor for layer in self.layers for tensor in layer.weight.tensors()]
        return sum(storage.nbytes() for storage in storages_of(tensors))

    def release(self) -> None:
        """Give up the memory of the codes until the next `refresh`, which takes it at other addresses."""
        codes = [(layer.weight.codes, layer.weight.operand) for layer in self.layers]
        for storage in storages_of(tensor for pair in codes for tensor in pair if tensor is not None):
            self._released.append((storage, storage.nbytes()))
            release(storage)
        self._stale = True

    def weights_changed(self) -> None:
        """After an optimizer step or a load: the copies are of another model until the next refresh."""
        self._stale = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Write all copies anew, into the buffers they have; collective over the lockstep group.

        Raises:
            QuantizationError: a weight holds NaN or infinity; on all those ranks, names the layer.
        """
        for storage, size in self._released:
            take_back(storage, size).zero_()  # a refresh does not write the padding
        self._released = []
        shared = self._shared_amax()
        finite = []
        for layer in self.layers:
            weight, q = layer.module.weight, layer.weight
            self.recipe.encode(weight, shared.get(layer.name), q)
            finite.append((q.scales.isfinite() & (q.scales > 0)).all())
        # The one host read of a refresh: a NaN must not become a rollout of noise.
        bad = []
        if finite and not bool(torch.stack(finite).all()):
            bad = [layer.name for layer, good in zip(self.layers, finite, strict=True) if not good][:1]
        if self._lockstep_group is not None:  # a rank that raised alone would leave the others waiting in the rollout
            bad = [name for names in gather_json(bad, self._lockstep_group) for name in names]
        if bad:
            raise QuantizationError(
                f"the weight of {bad[0]} holds NaN or infinity, which {self.recipe.name} cannot represent; go back "
                "to an earlier checkpoint and look for the first step with a non-finite loss or gradient"
            )
        self._stale = False

    def update(self) -> None:
        """`refresh`, if the weights have changed since the last one."""
        if self._stale:
            self.refresh()

    @torch.no_grad()
    def calibrate(self, channel_amax: Mapping[str, torch.Tensor | None]) -> None:
        """Set the smoothing of every layer from the largest activation [K] of its input channels; collective.

        Layers without traffic (an expert nobody was sent to) keep 1.
        """
        for layer in self.layers:
            activations, weight = channel_amax.get(layer.name), layer.module.weight
            largest = weight.abs().amax(0).float()
            if layer.group is not None and layer.split == "columns":  # a channel's weights lie on all ranks
                largest = maximum_over(largest, layer.group)
            if activations is not None:
                layer.weight.smoothing.copy_(smoothing_factors(activations, largest))
        self._stale = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the layers run quantised, on fresh copies; may be nested."""
        with self._switched(True):
            self.update()
            yield

    def suspended(self) -> AbstractContextManager[None]:
        """Inside, the layers run as they are, even where aligned training has installed the copies for good."""
        return self._switched(False)

    @contextlib.contextmanager
    def _switched(self, to: bool) -> Iterator[None]:
        before = self._is_installed
        self._switch(to)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, to: bool) -> None:
        self._is_installed = to
        for layer in self.layers:
            layer.install() if to else layer.remove()

    def _shared_amax(self) -> dict[str, torch.Tensor]:
        """The largest magnitudes of groups that lie on several ranks, in one exchange for all layers."""
        sharing = [
            layer for layer in self.layers if layer.group is not None and self.recipe.shares_amax(layer.split)
        ]
        shared: dict[str, torch.Tensor] = {}
        for group in dict.fromkeys(layer.group for layer in sharing):  # experts may have their own
            layers = [layer for layer in sharing if layer.group is group]
            own = [self.recipe.amax(layer.module.weight, layer.weight.smoothing) for layer in layers]
            flat = maximum_over(torch.cat([amax.flatten() for amax in own]), group)
            parts = flat.split([amax.numel() for amax in own])
            for layer, part, amax in zip(layers, parts, own, strict=True):
                shared[layer.name] = part.view_as(amax)
        return shared


class QuantizedLinear:
    """A column- or row-parallel linear and its quantised weight."""

    def __init__(self, name: str, module: ParallelLinear, recipe: Recipe) -> None:
        self.name, self.module, self.recipe = name, module, recipe
        self.weight = recipe.allocate(*module.weight.shape, module.weight.device)
        group = module.tp_group
        self.group: dist.ProcessGroup | None = group if group is not None and group.size() > 1 else None
        """The tensor-parallel ranks that share the weight; None where this one has all of it."""
        self.split: Split = "rows" if isinstance(module, RowParallelLinear) else "columns"
        """Which dimension they share."""
        is_part = self.group is not None and self.split == "rows" and not module.explicit_expert_comm
        self.ranks = self.group if is_part else None
        """Given to the product where it is a part of a sum; experts' outputs are added up by the caller."""
        self.calls = 0
        """Forward passes through the quantised product; replays of a captured graph are not among them."""

    def install(self) -> None:
        """Send the module's calls here: an attribute of the instance hides the class's ``forward``."""
        self.module.forward = self.forward

    def remove(self) -> None:
        """Back to the module's own forward."""
        vars(self.module).pop("forward", None)

    def forward(
        self,
        input_: torch.Tensor | PackedActivations,
        weight: Any = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the module's: [T, 1, in] -> [T, 1, out] and the bias if the caller adds it.

        Activations that are packed already, [T, in], are a rollout's: without gradients and sequence parallelism.
        """
        del weight, runtime_gather_output  # only the output layer is given them, and it is not quantised
        self.calls += 1
        module = self.module
        if isinstance(input_, PackedActivations):
            product = self.recipe.multiply(input_, self.weight)
        else:
            product = self._scattered(self._product(self._gathered(input_)))
        if module.skip_bias_add:
            return product, module.bias
        return (product if module.bias is None else product + module.bias), None

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """What a column-parallel layer's ranks all need; the gradients of their parts are added up."""
        if self.group is None or self.split == "rows" or self.module.explicit_expert_comm:
            return x
        if self.module.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=self.group)
        return copy_to_tensor_model_parallel_region(x, group=self.group)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and (x.requires_grad or self.module.weight.requires_grad):
            return StraightThrough.apply(x, self.module.weight, self)
        return self.recipe.matmul(x, self.weight, ranks=self.ranks)

    def _scattered(self, product: torch.Tensor) -> torch.Tensor:
        """Each rank's share of the tokens under sequence parallelism. The ranks have the same sum already:
        a reduce-scatter could not add up before scaling.
        """
        if self.ranks is not None and self.module.sequence_parallel:
            return scatter_to_sequence_parallel_region(product, group=self.group)
        return product


def packing_for(module: torch.nn.Module) -> Packing | None:
    """How a kernel may quantise the input of ``module`` now.

    None where it is not quantised, has to be given numbers, or is watched: hooks see numbers.
    """
    layer = getattr(vars(module).get("forward"), "__self__", None)
    if not isinstance(layer, QuantizedLinear) or module._forward_hooks or module._forward_pre_hooks:
        return None
    return layer.recipe.packing(layer.weight, layer.ranks)


class StraightThrough(torch.autograd.Function):
    """The quantised product, differentiated as a product of the dequantised numbers.

    The estimator of https://arxiv.org/abs/1308.3432 for both roundings. Where ranks add up their parts, the
    sum's gradient is the same on all of them, so none is exchanged.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        """``weight`` is not read: it is here to receive its gradient."""
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer.recipe.matmul(x, layer.weight, ranks=layer.ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Of input and weight, where they are wanted."""
        (x,) = ctx.saved_tensors
        layer: QuantizedLinear = ctx.layer
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            weight = layer.recipe.dequantize(layer.weight).to(gradient.dtype)
            of_input = torch.matmul(gradient, weight)
        if ctx.needs_input_grad[1]:
            seen = layer.recipe.round_trip(x, layer.weight, ranks=layer.ranks)
            of_weight = gradient.reshape(-1, gradient.shape[-1]).t() @ seen.reshape(-1, seen.shape[-1])
        return of_input, of_weight, None
