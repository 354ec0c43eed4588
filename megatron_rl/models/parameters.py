"""Parameters by global name, and their initial values, which depend only on the name and the seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_rl.config.model import ModelConfig
from megatron_rl.errors import ConfigError
from megatron_rl.families import ModelLayout, Parameter
from megatron_rl.families.layout import own_name
from megatron_rl.families.parts import EMBEDDING
from megatron_rl.models.adapters import adapters_in
from megatron_rl.models.blocks.experts import GroupedExperts
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.copies import as_numbers
from megatron_rl.quantization.linears import counted_over_ranks

_INTO_THE_RESIDUAL_STREAM = ("linear_proj", "linear_fc2", "out_proj")
"""Layers that write to the residual stream: their initial spread decreases with the number of layers."""


def named_parameters(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield parameters by global name: layer and expert numbers count over all ranks; norms have their local names.

    A tied head on another pipeline stage is a copy of the embedding and has its name.
    """
    for gpt in chunks:
        is_copy = gpt.share_embeddings_and_output_weights and not gpt.pre_process
        for local_name, parameter in _unstacked_parameters(gpt):
            name = _global_name(gpt, local_name)
            yield (EMBEDDING if is_copy and name == "output_layer.weight" else name), parameter
        for adapter in adapters_in(gpt):
            yield from ((described.name, parameter) for described, parameter in adapter.named())


def _unstacked_parameters(gpt: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield ``named_parameters`` without adapters, with views of each expert for stacks."""
    for name, parameter in gpt.named_parameters():
        if ".adapter." in name:
            continue
        owner, _, last = name.rpartition(".linear_")
        experts = gpt.get_submodule(owner) if last else None
        if not isinstance(experts, GroupedExperts):
            yield name, parameter
        elif last == "fc1.weight":  # and with it fc2: expert by expert
            yield from ((f"{owner}.{part}", view) for part, view in experts.parts())


def _global_name(gpt: GPTModel, local_name: str) -> str:
    parts = local_name.split(".", 3)
    if parts[:2] == ["decoder", "layers"]:
        layer = gpt.decoder.layers[int(parts[2])]
        parts[2:] = str(layer.layer_number - 1), counted_over_ranks(layer, parts[3])
    return own_name(".".join(parts))


def refuse_buffers(chunks: Sequence[torch.nn.Module]) -> None:
    """Raise for persistent buffers: checkpoints, fingerprints and the reference policy cover only parameters.

    Raises:
        ConfigError: the model has such a buffer, e.g. a router's bias; names the first.
    """
    found = [name for gpt in chunks for name in dict(gpt.named_buffers()).keys() & gpt.state_dict().keys()]
    if found:
        text = f"the model keeps {min(found)} in a buffer, which checkpoints and the reference policy would leave out"
        raise ConfigError([f"{text}; make it a parameter, one without gradient if it is not trained"])


def unique_parameters(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield `named_parameters`, each part on one rank of the model copy (or expert group) only."""
    for name, parameter in named_parameters(chunks):
        if param_is_not_tensor_parallel_duplicate(parameter) and param_is_not_shared(parameter):
            yield name, parameter


def sum_over_model(
    chunks: Sequence[GPTModel], groups: ParallelGroups, share: Callable[[str, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Sum ``share(name, values)``, a scalar, over the parameters of the whole model; on every rank's host.

    Collective over the model copy and the ranks that share its experts. One device read.
    """
    counted = ((name, as_numbers(parameter).detach()) for name, parameter in unique_parameters(chunks))
    shares = [(".experts." in name, share(name, values)) for name, values in counted]
    of_experts, others = (
        sum((number for is_an_experts, number in shares if is_an_experts == kind), torch.zeros_like(shares[0][1]))
        for kind in (True, False)
    )
    totals = torch.stack([of_experts, others]).cpu()
    dist.all_reduce(totals[0], group=groups.experts.whole)
    dist.all_reduce(totals[1], group=groups.model_group)
    return totals.sum()


def no_init(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` unchanged: initialisation comes later, in `draw_parameters`, independent of the layout."""
    return weight


@torch.no_grad()
def draw_parameters(
    chunks: Sequence[GPTModel], layout: ModelLayout, model: ModelConfig, seed: int, part: Callable[[Parameter], int],
    on_cpu: bool,
) -> None:  # fmt: skip
    """Initialise like Megatron: normal weights, norms 1, biases 0, padding of the vocabulary 0.

    A critic's head is 0. Each weight is drawn whole, seeded by ``seed`` and its name, and then split. So the model is
    the same in every parallel layout, and with ``on_cpu`` on every device. ``part`` returns this rank's part number.
    """
    held = {parameter.name: parameter for parameter in layout.parameters}
    for name, parameter in named_parameters(chunks):
        if name.endswith(".bias"):
            parameter.zero_()
        elif parameter.dim() > 1:
            device = torch.device("cpu") if on_cpu else parameter.device
            whole = torch.zeros(held[name].shape, device=device)
            # Without padding: otherwise the numbers would depend on the tensor-parallel size.
            rows = layout.architecture.vocab_size if held[name].is_over_the_vocabulary else len(whole)
            generator = torch.Generator(device).manual_seed(seed_of(seed, name))
            whole[:rows].normal_(std=_spread(held[name], model), generator=generator)
            parameter.copy_(part_of(whole, held[name], part(held[name])))


def part_of(whole: torch.Tensor, parameter: Parameter, rank: int) -> torch.Tensor:
    """Return the part of a parameter that ``rank`` holds."""
    if parameter.cut is None or parameter.ranks == 1:
        return whole
    dimension = 0 if parameter.cut == "rows" else 1
    blocks = whole.chunk(parameter.blocks, dimension)
    return torch.cat([block.chunk(parameter.ranks, dimension)[rank] for block in blocks], dimension)


def seed_of(seed: int, name: str) -> int:
    """Return the random seed of parameter ``name``."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest())


def _spread(parameter: Parameter, model: ModelConfig) -> float:
    if parameter.is_value_head:
        return 0.0
    if parameter.name == EMBEDDING:
        return model.embedding_init_method_std
    if any(part in parameter.name for part in _INTO_THE_RESIDUAL_STREAM):
        return model.init_method_std / math.sqrt(2 * model.num_layers)
    return model.init_method_std
