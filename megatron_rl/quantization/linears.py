"""The quantised copies of a model's linear layers: allocated once, refreshed in place, installed and removed.

    linears = QuantizedLinears(model, recipe, skip)
    with linears.installed():      # refreshed first, if the weights have changed
        ...                        # every forward pass runs on quantised weights

Parameters stay unchanged; the modules' ``forward`` is replaced. Without gradients it is the recipe's product. In
aligned training the backward pass is straight-through: that of the product of dequantised numbers, as if rounding had
slope 1, or with ``quantizes_gradients`` the recipe's own products. Copies are plain buffers outside of the module tree:
no state dict, optimizer or checkpoint contains them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from megatron_rl.errors import QuantizationError
from megatron_rl.platform.collectives import gather_json
from megatron_rl.platform.device import OffloadableFactory, OffloadableTensors
from megatron_rl.quantization.copies import LinearKind, QuantizedLinear, QuantizedMatrix, QuantizedStack, StackedLinear
from megatron_rl.quantization.formats import smoothing_factors
from megatron_rl.quantization.recipe import Recipe
from megatron_rl.quantization.shapes import skipped


def parallel_linears(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return all linears of the decoder layers, experts included, by name (``layers.0.mlp.linear_fc1``).

    ``model`` may be a ``ModuleList`` of a pipeline stage's chunks; layer and expert numbers count over all ranks. The
    experts of a stack have one name each, mapped to the stack, in order. Embedding, output head, norms and router are
    not included.
    """
    found: dict[str, torch.nn.Module] = {}
    for layer in (layer for chunk in _chunks(model) for layer in chunk.decoder.layers):
        prefix, stacks = f"layers.{layer.layer_number - 1}", {}
        for name, module in layer.named_modules():
            if LinearKind.of(module) is not None:
                found[f"{prefix}.{counted_over_ranks(layer, name)}"] = module
            elif isinstance(module, StackedLinear):
                stacks[name.rpartition(".")[2]] = module
                for expert in layer.mlp.local_expert_indices if len(stacks) == 2 else ():
                    found |= {f"{prefix}.mlp.experts.local_experts.{expert}.{name}": stacks[name] for name in stacks}
    return found


def counted_over_ranks(layer: torch.nn.Module, name: str) -> str:
    """Replace the local expert number in ``mlp.experts.local_experts.0.linear_fc1`` by the global one."""
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
        self, model: torch.nn.Module, recipe: Recipe | None, skip: Sequence[str] = (),
        lockstep_group: dist.ProcessGroup | None = None, *, quantizes_gradients: bool = False,
        offloadable: OffloadableFactory = OffloadableTensors,
    ) -> None:  # fmt: skip
        """Without a ``recipe`` there are no copies. ``skip``: patterns of unquantised layers, see ``shapes.skipped``.

        ``lockstep_group``: ranks that raise together if one of them cannot quantise a weight; None: this rank alone.
        ``quantizes_gradients``: see `QuantizedMatrix`. ``offloadable``: makes the code buffers releasable.
        """
        self.recipe = recipe
        self._lockstep_group = lockstep_group
        linears = {} if recipe is None else parallel_linears(model)
        self.plain = tuple(name for name in linears if skipped(name, skip, _chunks(model)[0].config.num_layers))
        """Names of the unquantised layers."""
        kept = {name: module for name, module in linears.items() if name not in self.plain}
        names: dict[torch.nn.Module, list[str]] = {}
        for name, module in kept.items():
            names.setdefault(module, []).append(name)
        self._copies = tuple(
            QuantizedStack(named, module, recipe, quantizes_gradients)
            if isinstance(module, StackedLinear)
            else QuantizedLinear(named[0], module, recipe, quantizes_gradients)
            for module, named in names.items()
        )
        matrices = {
            matrix.name: matrix
            for copy in self._copies
            for matrix in (copy.experts if isinstance(copy, QuantizedStack) else (copy,))
        }
        self.layers: tuple[QuantizedMatrix, ...] = tuple(matrices[name] for name in kept)
        """One per linear, and per expert of a stack."""
        self.is_installed = False
        """Whether the layers currently run quantised."""
        self._stale = True
        self._codes = offloadable(self._all_codes())

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes and scales on this rank."""
        return sum(layer.weight.stored_bytes for layer in self.layers)

    @property
    def num_weights(self) -> int:
        """Number of weight elements with a quantised copy on this rank."""
        return sum(layer.weight.rows * layer.weight.columns for layer in self.layers)

    def _all_codes(self) -> list[torch.Tensor]:
        """List codes, operands without scales (unlike `fp8_block`'s on CUDA), and the experts' views of them."""
        weights = [each.weight for each in (*self._copies, *self.layers)]
        kept = {weight.scales.untyped_storage().data_ptr() for weight in weights}
        found = (tensor for weight in weights for tensor in (weight.codes, weight.operand) if tensor is not None)
        return [tensor for tensor in found if tensor.untyped_storage().data_ptr() not in kept]

    def release(self) -> None:
        """Free the codes until the next `refresh`."""
        self._codes.release()
        self._stale = True

    def weights_changed(self) -> None:
        """Mark the copies as outdated, after an optimizer step or a load."""
        self._stale = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Requantise all weights into the existing buffers; collective over the lockstep group.

        Raises:
            QuantizationError: a weight holds NaN or infinity; on all those ranks, names the layer.
        """
        self._codes.restore()  # zeroed: a refresh does not write the padding
        for layer in self.layers:
            self.recipe.encode(layer.parameter, layer.weight)
        # The only host read of a refresh: NaN must not become a rollout of noise.
        scales = [layer.weight.scales for layer in self.layers]
        good = torch.stack([(each.isfinite() & (each > 0)).all() for each in scales]).tolist() if scales else []
        bad = [layer.name for layer, is_good in zip(self.layers, good, strict=True) if not is_good][:1]
        if self._lockstep_group is not None:  # a rank that raised alone would leave the others waiting in the rollout
            bad = [name for names in gather_json(bad, self._lockstep_group) for name in names]
        if bad:
            raise QuantizationError(
                f"the weight of {bad[0]} holds NaN or infinity, which {self.recipe.name} cannot represent; go back "
                "to an earlier checkpoint and look for the first step with a non-finite loss or gradient"
            )
        self._stale = False

    def update(self) -> None:
        """Call `refresh` if the weights have changed since the last one."""
        if self._stale:
            self.refresh()

    def refresh_changed(self) -> list[str]:
        """Refresh, and return the names of layers whose copies were unexpectedly outdated; collective.

        Exact, because quantisation is reproducible. Compares only scales if the codes were released. Returns no names
        if `weights_changed` was called since the last refresh.
        """
        with_codes = not self._codes.is_released
        is_comparable = not (with_codes and self._stale)
        before = self._checksums(with_codes)
        self.refresh()
        pairs = zip(self.layers, before, self._checksums(with_codes), strict=True)
        names = [layer.name for layer, old, new in pairs if old != new] if is_comparable else []
        if self._lockstep_group is not None:
            names = [name for part in gather_json(names, self._lockstep_group) for name in part]
        return list(dict.fromkeys(names))

    def _checksums(self, with_codes: bool) -> list[list[int]]:
        """Return checksums per layer: the sums of the bits of its scales and, with ``with_codes``, of its codes."""
        sums = []
        for layer in self.layers:
            parts = [layer.weight.scales.view(torch.int32)]
            parts += [layer.weight.codes.view(torch.uint8)] if with_codes else []
            sums.append(torch.stack([part.sum(dtype=torch.int64) for part in parts]))
        return torch.stack(sums).tolist() if sums else []  # one read of the device

    @torch.no_grad()
    def calibrate(self, channel_amax: Mapping[str, torch.Tensor | None]) -> None:
        """Set each layer's smoothing from its input channels' maxima [K]; 1 without traffic. Collective."""
        for layer in self.layers:
            activations, weight = channel_amax.get(layer.name), layer.parameter
            largest = weight.abs().amax(0).float()
            if layer.group is not None and layer.split == "columns":  # a channel's weights lie on all ranks
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=layer.group)
            if activations is not None:
                layer.weight.smoothing.copy_(smoothing_factors(activations, largest))
        self._stale = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Run the layers quantised inside the context, on fresh copies; may be nested."""
        with self._switched(True):
            self.update()
            yield

    def suspended(self) -> AbstractContextManager[None]:
        """Run the layers unquantised inside the context, even if aligned training has installed the copies."""
        return self._switched(False)

    @contextlib.contextmanager
    def _switched(self, to: bool) -> Iterator[None]:
        before = self.is_installed
        self._switch(to)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, to: bool) -> None:
        self.is_installed = to
        for copy in self._copies:
            copy.install() if to else copy.remove()
