"""What every rank of `test_quantized_tensor_parallel` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import RowParallelLinear

from megatron_rl.algorithms import TokenBatch
from megatron_rl.errors import QuantizationError
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.quantization.copies import QuantizedLinear
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.quantization.recipe import QuantizedWeight, Recipe
from megatron_rl.registry import RECIPES as LIBRARY
from megatron_rl.trainer.scoring import Scorer
from tests.distributed.programs import gather_whole
from tests.support.generation import rollout_engine
from tests.support.quantized import complete, rollout_quantization, short_requests
from tests.support.scoring import packed
from tests.support.tiny import single_thread, tiny_config, tiny_policy

TILED = {
    "hidden_size": 256, "ffn_hidden_size": 256, "num_attention_heads": 4, "kv_channels": 64, "init_method_std": 0.06
}  # fmt: skip
"""Two ranks' parts are multiples of a tile."""
RECIPES: dict[str, dict[str, Any]] = {"int8": {}, "int8_smooth": {}, "fp8": {}, "fp8_tensor": {}, "fp8_block": TILED}
"""Recipe -> the model it is tried on."""


def on_ranks(tensor_size: int, sequence_parallel: bool, folder: str) -> dict[str, dict[str, Any]]:
    """All `RECIPES` on ``tensor_size`` ranks."""
    single_thread()
    parallel = {"tensor_model_parallel_size": tensor_size, "sequence_parallel": sequence_parallel}
    groups = initialize(tiny_config(tensor_size, **parallel).parallel, current_platform())
    report = {recipe: report_of(groups, recipe, parallel, Path(folder)) for recipe in RECIPES}
    shut_down()
    return report


def report_of(
    groups: ParallelGroups, recipe: str, parallel: dict[str, Any], folder: Path, in_parts: bool = False
) -> dict[str, Any]:
    """Completions, their audit, the trainer's log-probs and a product; gradients go to ``folder``.

    ``in_parts``: one rank quantises as two would.
    """
    policy = tiny_policy(tiny_config(groups.world_size, **parallel, **RECIPES[recipe]))
    wave_vectors(policy)
    audits: list[Any] = []
    quantization, engine = rollout_quantization(policy, recipe, audits), rollout_engine(policy)
    for layer in quantization.linears.layers if in_parts else ():
        layer.recipe = InParts(layer.recipe, layer)
    report: dict[str, Any] = {}
    for kind in ("greedy", "sampled"):
        requests = short_requests(4, greedy=kind == "greedy")
        completions = complete(policy, engine, quantization, requests)
        report[kind] = {
            "tokens": [list(c.token_ids) for group in completions for c in group],
            "logprobs": [x for group in completions for c in group for x in c.inference_logprobs],
        }
    batch = packed(requests, completions)
    scorer = Scorer(policy, groups, 1.0)

    def gaps() -> torch.Tensor:
        return (scorer.logprobs([batch])[0] - batch.inference_logprobs).abs()[batch.loss_mask.bool()]

    report["cost"] = gaps().mean().item()
    with quantization.emulated():
        report["gap"] = gaps().max().item()
        gradients = gradients_of(policy, scorer, batch, groups)
    if recipe == "fp8_block" and not in_parts:
        policy.gpt.zero_grad()
        with QuantizedLinears(policy.gpt, LIBRARY.get(recipe), quantizes_gradients=True).installed():
            gradients |= {f"backward.{name}": g for name, g in gradients_of(policy, scorer, batch, groups).items()}
    if groups.is_main:
        torch.save(gradients, folder / f"{recipe}.pt")
    report["audit"] = [[row.layer, row.wanted, row.ran] for row in audits[0]]
    with rollout_mode(policy):
        report["products"] = products_of(quantization.linears, groups)
    report["refused"] = refusal_of_a_nan(policy, recipe, groups)
    return report


class InParts:
    """A recipe on one rank whose products are those of two: each half of a weight is quantised by itself."""

    def __init__(self, recipe: Recipe, layer: QuantizedLinear) -> None:
        self._recipe, self._layer, self._by_inputs = recipe, layer, layer.split == "rows"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recipe, name)

    def _parts(self) -> list[QuantizedWeight]:
        halves = self._halves(self._layer.parameter.detach(), columns=self._by_inputs)
        smoothing = self._layer.weight.smoothing
        if smoothing is None:
            return [self._recipe.quantize(half) for half in halves]
        given = self._inputs(smoothing[None])
        return [self._recipe.quantize(half, each[0]) for half, each in zip(halves, given, strict=True)]

    def _halves(self, weight: torch.Tensor, columns: bool) -> list[torch.Tensor]:
        """Of each rank; the two blocks of a gated layer are cut each."""
        if columns:
            return list(weight.chunk(2, 1))
        blocks = weight.chunk(self._layer.module.weight.partition_stride)
        return [torch.cat(parts) for parts in zip(*(block.chunk(2) for block in blocks), strict=True)]

    def _inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.chunk(2, -1) if self._by_inputs else (x, x)

    def _outputs(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """[..., N] of both ranks' [..., N / 2], the inverse of `_halves`."""
        blocks = [part.chunk(self._layer.module.weight.partition_stride, -1) for part in parts]
        return torch.cat([torch.cat(halves, -1) for halves in zip(*blocks, strict=True)], -1)

    def matmul(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        """See `Recipe.matmul`."""
        pairs = zip(self._inputs(x), self._parts(), strict=True)
        products = [self._recipe.matmul(half, part) for half, part in pairs]
        return sum(products) if self._by_inputs else self._outputs(products)

    def round_trip(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        """See `Recipe.round_trip`."""
        seen = [self._recipe.round_trip(*each) for each in zip(self._inputs(x), self._parts(), strict=True)]
        return torch.cat(seen, -1) if self._by_inputs else seen[0]

    def dequantize(self, q: QuantizedWeight) -> torch.Tensor:
        """See `Recipe.dequantize`."""
        parts = [self._recipe.dequantize(part) for part in self._parts()]
        return torch.cat(parts, 1) if self._by_inputs else self._outputs([part.t() for part in parts]).t()


@torch.no_grad()
def wave_vectors(policy: PolicyModel) -> None:
    """Give biases and norm weights values that depend on the place in the whole vector, of which a rank has a part."""
    vectors = [parameter for parameter in policy.gpt.parameters() if parameter.dim() == 1]
    for number, vector in enumerate(vectors):
        is_part = getattr(vector, "tensor_model_parallel", False)
        start = dist.get_rank() * vector.numel() if is_part else 0
        vector.add_(0.5 * torch.sin(1.7 * torch.arange(start, start + vector.numel()) + number))


def gradients_of(
    policy: PolicyModel, scorer: Scorer, batch: TokenBatch, groups: ParallelGroups
) -> dict[str, torch.Tensor]:
    """Of the whole model, by parameter."""
    slopes = torch.linspace(-1, 2, batch.samples.token_ids.numel()) * batch.loss_mask
    (scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs * slopes).sum().backward()
    gradients = {}
    for name, parameter in policy.gpt.named_parameters():
        gradient = parameter.grad
        if policy.config.sequence_parallel and getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradient, group=groups.tensor_group)  # each rank has seen its tokens only
        for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            if hasattr(parameter, attribute):
                setattr(gradient, attribute, getattr(parameter, attribute))
        gradients[name] = gather_whole(gradient, groups.tensor_group)
    return gradients


@torch.no_grad()
def products_of(linears: QuantizedLinears, groups: ParallelGroups) -> dict[str, list[float]]:
    """Of the row-parallel layers, from the same inputs whatever the number of ranks."""
    products = {}
    for layer in linears.layers:
        if not isinstance(layer.module, RowParallelLinear):
            continue
        columns = layer.weight.columns
        x = torch.randn(8, columns * groups.tensor_group.size(), generator=torch.Generator().manual_seed(2))
        x[:, 3] *= 10  # the largest of every token lies on rank 0
        part = x[:, groups.tensor_group.rank() * columns : (groups.tensor_group.rank() + 1) * columns]
        products[layer.name] = layer.forward(part)[0].flatten().tolist()
    return products


@torch.no_grad()
def refusal_of_a_nan(policy: PolicyModel, recipe: str, groups: ParallelGroups) -> str:
    """What a refresh says where the last rank's part of a row-parallel weight has one."""
    linears = QuantizedLinears(policy.gpt, LIBRARY.get(recipe), lockstep_group=groups.lockstep_group)
    layer = next(layer for layer in linears.layers if isinstance(layer.module, RowParallelLinear))
    if groups.tensor_group.rank() == groups.tensor_group.size() - 1:
        layer.parameter[0, 0] = torch.nan
    try:
        linears.refresh()
    except QuantizationError as error:
        return str(error)
    return ""
