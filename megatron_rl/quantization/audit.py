"""Check the number format in which each linear layer ran, from its inputs and outputs in a rollout.

Only the numbers count, not labels: a layer that silently ran in full precision gives the plain product, a quantised one
the product of the dequantised numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

from megatron_rl.errors import QuantizationError
from megatron_rl.platform.collectives import gather_json
from megatron_rl.quantization.copies import LinearKind, StackedLinear, weight_of
from megatron_rl.quantization.linears import QuantizedLinears, parallel_linears

AUDITED_TOKENS = 64
FULL_PRECISION = "full precision"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Relative error between two kernels for the same product, by the dtype of the output."""


@dataclass
class Observation:
    """Recorded inputs and outputs of one layer."""

    calls: int = 0
    channel_amax: torch.Tensor | None = None
    """[K] fp32: largest magnitude of each input channel over all calls."""
    inputs: torch.Tensor | None = None
    """[T, K] of the call with the most tokens, at most ``AUDITED_TOKENS`` of them."""
    outputs: torch.Tensor | None = None
    """[T, N] of the same tokens, without a bias that the caller adds."""


@contextlib.contextmanager
def observe_linears(model: torch.nn.Module, channels: bool) -> Iterator[dict[str, Observation]]:
    """Record the forward passes of all decoder linears inside the context; ``channels``: also channel maxima."""
    linears = parallel_linears(model)
    observations = {name: Observation() for name in linears}
    of_modules: dict[torch.nn.Module, list[Observation]] = {}
    for name, module in linears.items():
        of_modules.setdefault(module, []).append(observations[name])

    def note(module: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, StackedLinear):
            tokens, ends = args
            sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
            parts = zip(tokens[: sum(sizes)].split(sizes), output[: sum(sizes)].split(sizes), strict=True)
        else:
            parts = [(LinearKind.of(module).normed(module, args[0]), output[0])]
        for seen, (x, y) in zip(of_modules[module], parts, strict=True):
            _note(seen, x.detach().flatten(0, -2), y.detach().flatten(0, -2), channels, is_expert(module))

    with contextlib.ExitStack() as hooks:
        for module in of_modules:
            hooks.callback(module.register_forward_hook(note).remove)
        yield observations


def is_expert(module: torch.nn.Module) -> bool:
    """Return whether the module belongs to experts, which may get no tokens."""
    return isinstance(module, StackedLinear) or LinearKind.of(module).is_expert


def _note(seen: Observation, x: torch.Tensor, y: torch.Tensor, channels: bool, of_expert: bool) -> None:
    if of_expert:  # zeros are what ranks without tokens join in with, and look like any format
        x, y = x[x.any(-1)], y[x.any(-1)]
    if not x.numel():  # an expert that no token was sent to
        return
    seen.calls += 1
    if channels:
        amax = x.abs().amax(0).float()
        seen.channel_amax = amax if seen.channel_amax is None else torch.maximum(seen.channel_amax, amax)
    if seen.inputs is None or seen.inputs.shape[0] < min(AUDITED_TOKENS, x.shape[0]):
        seen.inputs, seen.outputs = x[:AUDITED_TOKENS].clone(), y[:AUDITED_TOKENS].clone()


@dataclass(frozen=True)
class LayerAudit:
    """One row of the audit."""

    layer: str
    wanted: str
    ran: str
    relative_error: float
    """Error of the output against the plain product of the recorded activations, in Frobenius norm."""
    calls: int

    @property
    def agrees(self) -> bool:
        """False is an error."""
        return self.wanted == self.ran


@torch.no_grad()
def audit(
    model: torch.nn.Module, linears: QuantizedLinears, observations: Mapping[str, Observation]
) -> list[LayerAudit]:
    """Return one row per linear layer, in the model's order; collective over ranks that share rows."""
    quantised = {layer.name: layer for layer in linears.layers}
    rows, modules = [], parallel_linears(model)
    # An expert-parallel copy may have had no prompt: in dummy passes its MLPs run, but not its attention.
    shares = any(map(is_expert, modules.values()))
    had_tokens = any(seen.calls for name, seen in observations.items() if ".self_attention." in name or not shares)
    for (name, module), weight in zip(modules.items(), _weights(modules.values()), strict=True):
        seen, layer = observations[name], quantised.get(name)
        wanted = FULL_PRECISION if layer is None else layer.recipe.format
        if seen.inputs is None or not (had_tokens or is_expert(module)):
            # An expert, or a rank, without tokens: neither verdict nor error.
            idle = is_expert(module) or not had_tokens
            rows.append(LayerAudit(name, wanted, wanted if idle else "not at all", 0.0, 0))
            continue
        plain = _reduced(seen.inputs.float() @ weight.float().t(), module)
        twin = plain
        if layer is not None:
            rounded = layer.recipe.round_trip(seen.inputs.float(), layer.weight)
            twin = _reduced(rounded @ layer.recipe.dequantize(layer.weight).t(), layer.module)
        outputs = seen.outputs.float()
        if not isinstance(module, StackedLinear):
            bias = LinearKind.of(module).added_bias(module)
            outputs = outputs if bias is None else outputs - bias.float()
        from_plain, from_twin = _distance(outputs, plain), _distance(outputs, twin)
        ran = _verdict(from_plain, from_twin, wanted, TOLERANCE[seen.outputs.dtype])
        rows.append(LayerAudit(name, wanted, ran, from_plain, seen.calls))
    return rows


def gather_audits(rows: Sequence[LayerAudit], group: dist.ProcessGroup | None) -> list[LayerAudit]:
    """Return the rows of the whole model in order; collective.

    Of several ranks with the same layer, a row that disagrees wins, then the one with the most calls.
    """
    if group is None:
        return list(rows)
    gathered = gather_json([vars(row) for row in rows], group)
    known: dict[str, LayerAudit] = {}
    for row in (LayerAudit(**row) for part in gathered for row in part):
        best = known.setdefault(row.layer, row)
        if (row.agrees, -row.calls) < (best.agrees, -best.calls):
            known[row.layer] = row
    return sorted(known.values(), key=lambda row: int(row.layer.split(".")[1]))  # stable: within a layer as it was


def refuse_other_formats(rows: Sequence[LayerAudit]) -> None:
    """Raise ``QuantizationError`` if a layer did not run in its format."""
    wrong = [row for row in rows if not row.agrees]
    if wrong:
        first = wrong[0]
        raise QuantizationError(
            f"{len(wrong)} of {len(rows)} linear layers did not run in their format: {first.layer} should have run "
            f"as '{first.wanted}' and ran as '{first.ran}' (error {first.relative_error:.1e} on {first.calls} calls); "
            "use --rl-rollout-quantization none, and report it with quantization.json of the run directory"
        )


def table_rows(rows: Sequence[LayerAudit], most: int) -> list[tuple[str, str, str]]:
    """Return (layer, format, relative error) for a table: all rows, or the ``most`` with the largest errors."""
    shown = rows if len(rows) <= most else sorted(rows, key=lambda row: -row.relative_error)[:most]
    return [(row.layer, row.ran, f"{row.relative_error:.2%}") for row in shown]


def _weights(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield [N, K] of each linear; those of a stack in order."""
    of_stacks: dict[StackedLinear, Iterator[torch.Tensor]] = {}
    for module in modules:
        if isinstance(module, StackedLinear):
            experts = (weight_of(module, expert) for expert in range(len(module.weight)))
            yield next(of_stacks.setdefault(module, experts))
        else:
            yield weight_of(module)


def _reduced(product: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Sum ``product`` over the tensor-parallel ranks of a row-parallel linear; return others as they are."""
    kind = None if isinstance(module, StackedLinear) else LinearKind.of(module)
    if kind is not None and kind.exchanges and kind.split == "rows" and kind.group is not None:
        return reduce_from_tensor_model_parallel_region(product, group=kind.group)
    return product


def _distance(values: torch.Tensor, reference: torch.Tensor) -> float:
    return float((values - reference).norm() / reference.norm().clamp_min(1e-30))


def _verdict(from_plain: float, from_twin: float, wanted: str, tolerance: float) -> str:
    if from_twin <= tolerance and (wanted == FULL_PRECISION or from_twin < from_plain):
        return wanted
    if from_plain <= tolerance:
        return FULL_PRECISION
    return "neither the plain nor the quantised product"
