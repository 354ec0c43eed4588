"""What every rank of `test_quantized_tensor_parallel` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import RowParallelLinear

from megatron_rl.algorithms import TokenBatch
from megatron_rl.errors import QuantizationError
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.quantization.recipe import Recipe
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


def report_of(groups: ParallelGroups, recipe: str, parallel: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Completions, their audit, the trainer's log-probs and a product; gradients go to ``folder``."""
    policy = tiny_policy(tiny_config(groups.world_size, **parallel, **RECIPES[recipe]))
    wave_vectors(policy)
    audits: list[Any] = []
    quantization, engine = rollout_quantization(policy, recipe, audits), rollout_engine(policy)
    if groups.tensor_group.size() == 1:
        for layer in quantization.linears.layers:
            if isinstance(layer.module, RowParallelLinear):
                layer.recipe = _InHalves(layer.recipe)
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
    with quantization.emulated():
        gap = (scorer.logprobs([batch])[0] - batch.inference_logprobs).abs()[batch.loss_mask.bool()]
        report["gap"] = gap.max().item()
        gradients = gradients_of(policy, scorer, batch, groups)
    if groups.is_main:
        torch.save(gradients, folder / f"{recipe}.pt")
    report["audit"] = [[row.layer, row.wanted, row.ran] for row in audits[0]]
    report["products"] = products_of(quantization.linears, groups)
    report["refused"] = refusal_of_a_nan(quantization.linears, groups)
    return report


class _InHalves:
    """A recipe whose products are sums of two halves, as two ranks add them up.

    In one sum the last bit is another, and now and then an fp8 code of the next layer then rounds the other way.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recipe, name)

    def matmul(self, *given: Any, **named: Any) -> torch.Tensor:
        """See `Recipe.matmul`."""
        product = torch.mm

        def in_halves(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            half = right.shape[0] // 2
            return product(left[:, :half], right[:half]) + product(left[:, half:], right[half:])

        with mock.patch.object(torch, "mm", in_halves):
            return self._recipe.matmul(*given, **named)


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
        products[layer.name] = layer.recipe.matmul(part, layer.weight, ranks=layer.ranks).flatten().tolist()
    return products


@torch.no_grad()
def refusal_of_a_nan(linears: QuantizedLinears, groups: ParallelGroups) -> str:
    """What a refresh says where the last rank's part of a row-parallel weight has one; of recipes that share scales."""
    if not linears.recipe.shares_amax("rows"):
        return "the weight of nobody"
    layer = next(layer for layer in linears.layers if isinstance(layer.module, RowParallelLinear))
    if groups.tensor_group.rank() == groups.tensor_group.size() - 1:
        layer.parameter[0, 0] = torch.nan
    try:
        linears.refresh()
    except QuantizationError as error:
        return str(error)
    return ""
