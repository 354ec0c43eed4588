"""Checkpoints as Megatron-LM writes them: torch_dist by megatron-core itself, files of ranks cut by hand."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.enums import ModelType
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from megatron_rl.checkpoint.run_state import architecture_of
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.families import ExpertShare, ModelLayout, Stages
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.parameters import part_of
from megatron_rl.platform.megatron import asynchronous_writer
from tests.support.tiny import VOCABULARY, tiny_policy

MODEL_FILE = "model_optim_rng.pt"
POINTER = "latest_checkpointed_iteration.txt"
Rename = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Of a rank's tensors: how another choice of layers calls and stacks them."""


@dataclass(frozen=True)
class Topology:
    """The parallel layout of the model whose files a test writes."""

    tensor: int = 1
    stages: int = 1
    experts: int = 1
    """Expert-parallel ranks."""
    cut: int | None = None
    """Ranks that share each expert; None: the tensor-parallel ones."""

    @property
    def parts(self) -> int:
        return self.cut or self.tensor

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Tensor-parallel rank, expert-parallel rank and part of an expert, of the ranks that hold a stage once."""
        ranks = range(max(self.tensor, self.experts * self.parts))
        return [(rank % self.tensor, rank // self.parts % self.experts, rank % self.parts) for rank in ranks]

    @property
    def args(self) -> dict[str, int | None]:
        """Megatron-LM's flags."""
        sizes = {"tensor": self.tensor, "pipeline": self.stages, "expert": self.experts}
        return {f"{name}_model_parallel_size": size for name, size in sizes.items()} | {
            "expert_tensor_parallel_size": self.cut
        }

    def name(self, tensor_rank: int, stage: int, expert_rank: int = 0) -> str:
        """Name the directory of a rank's file. Example: ``mp_rank_01``, or with several stages ``mp_rank_01_000``."""
        numbers = [stage] * (self.stages > 1) + [expert_rank] * (self.experts > 1)
        return f"mp_rank_{tensor_rank:02d}" + "".join(f"_{number:03d}" for number in numbers)


def random_policy(config: RLConfig, seed: int = 1) -> PolicyModel:
    """`tiny_policy` whose norms and biases are random too."""
    policy, generator = tiny_policy(config, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return policy


def args_of(config: RLConfig, **changes: Any) -> argparse.Namespace:
    """Some of the flags that Megatron-LM saves, of the model's shape and of other kinds."""
    given = {**architecture_of(config.architecture()), "group_query_attention": True, "padded_vocab_size": VOCABULARY,
             "attention_backend": AttnBackend.auto, "params_dtype": torch.float32, "moe_router_topk": 2,
             "model_type": ModelType.encoder_or_decoder, "moe_router_score_function": "softmax", "window_size": None,
             "moe_layer_freq": 1, "kv_lora_rank": 32, "qk_head_dim": 128, "v_head_dim": 128,
             "save": Path("somewhere")}  # fmt: skip
    return argparse.Namespace(**given | changes)


def write_dist(
    root: Path, policy: PolicyModel, args: argparse.Namespace | None, step: int = 100, **metadata: bool
) -> Path:
    """In torch_dist, with moments of an optimizer; ``metadata`` are megatron-core's choices of how layers are named."""
    directory = root / f"iter_{step:07d}"
    directory.mkdir(parents=True)
    model = policy.gpt.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(dict(metadata)))
    moments = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.decoder.layers.x", torch.zeros(2, 3))
    state = {"checkpoint_version": 3.0, "iteration": step, "model": model, "optimizer": {"exp_avg": moments}}
    state |= {} if args is None else {"args": args, "content_metadata": dict(metadata)}
    dist_checkpointing.save(state, str(directory), **asynchronous_writer())
    (root / POINTER).write_text(f"{step}\n")
    return directory


def write_ranks(
    root: Path,
    policy: PolicyModel,
    args: argparse.Namespace | None,
    topology: Topology | None = None,
    stages: Stages | None = None,
    rename: Rename = lambda tensors: tensors,
    padded: int = VOCABULARY,
    step: int = 12,
) -> Path:
    """A file a rank, of a model that one rank has. ``padded`` are the rows of the embedding over all ranks.

    Without ``args`` those of the parallel layout are there alone.
    """
    topology = topology or Topology()
    args = argparse.Namespace(**topology.args | ({} if args is None else vars(args)))
    stages, directory = stages or Stages(topology.stages), root / f"iter_{step:07d}"
    for (rank, expert_rank, part), stage in itertools.product(topology.places, range(topology.stages)):
        chunks = _chunks(policy, topology, stages, rank, stage, expert_rank, part, padded)
        chunks = [rename(tensors) for tensors in chunks]
        models = {"model": chunks[0]} if len(chunks) == 1 else {f"model{n}": chunk for n, chunk in enumerate(chunks)}
        random_state = {"np_rng_state": np.random.RandomState(1).get_state(), "torch_rng_state": torch.get_rng_state()}
        content = {"checkpoint_version": 3.0, "iteration": step, **models, "rng_state": [random_state]}
        target = directory / topology.name(rank, stage, expert_rank)
        target.mkdir(parents=True)
        torch.save(content | {"args": args}, target / MODEL_FILE)
    (root / POINTER).write_text(f"{step}\n")
    return directory


def _chunks(
    policy: PolicyModel, topology: Topology, stages: Stages, rank: int, stage: int, expert_rank: int, part: int,
    padded: int,
) -> list[dict[str, torch.Tensor]]:
    """Layers and experts are counted from 0 in each; a tied last stage has a copy of the embedding."""
    whole, model = dict(policy.named_parameters()), policy.layout.architecture
    share = ExpertShare(topology.experts, expert_rank, topology.parts)
    layers = stages.layers_of(stage, model.num_layers)
    found: list[dict[str, torch.Tensor]] = [{} for _ in layers]
    for parameter in ModelLayout.of(model, topology.tensor, padded, stage, stages, share).parameters:
        words = parameter.name.split(".")
        values, number = whole[parameter.name].detach(), rank
        if parameter.is_over_the_vocabulary:
            values = torch.cat([values, torch.full((padded, values.shape[1]), 0.5)])[:padded]
        if parameter.is_of_an_expert:
            words[6], number = str(int(words[6]) - share.of(model.num_experts).start), part
        chunk = 0 if words[0] == "embedding" else len(layers) - 1
        if words[1] == "layers":
            chunk = next(index for index, numbers in enumerate(layers) if int(words[2]) in numbers)
            words[2] = str(int(words[2]) - layers[chunk].start)
        is_copy = words[0] == "embedding" and stage > 0
        name = "output_layer.weight" if is_copy else ".".join(words)
        found[-1 if is_copy else chunk][name] = part_of(values, parameter, number).clone()
    return found


def transformer_engine(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its linear layers hold the norms before them, and a state beside each weight."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        found[name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")] = tensor
        if ".linear_" in name and name.endswith("weight"):
            found[f"{name.removesuffix('weight')}_extra_state"] = torch.zeros(0, dtype=torch.uint8)
    return found


def numbered_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transformer Engine's grouped experts: a layer's are ``weight0``, ``weight1`` ... of one linear."""
    found = {}
    for name, tensor in tensors.items():
        before, _, expert = name.partition("local_experts.")
        number, _, rest = expert.partition(".")
        found[f"{before}{rest}{number}" if expert else name] = tensor
    return found


def stacked_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """megatron-core's own: ``weight1`` [hidden, experts x rows] and ``weight2`` [experts x columns, hidden].

    Its ``sharded_state_dict`` views them as [experts, ...] and transposes each.
    """
    found, stacks = {}, {}
    for name, tensor in tensors.items():
        before, _, expert = name.partition("local_experts.")
        if not expert:
            found[name] = tensor
            continue
        stacks.setdefault(f"{before}weight{1 if 'fc1' in expert else 2}", []).append(tensor.t())
    for name, each in stacks.items():
        hidden = each[0].shape[0] if name.endswith("1") else each[0].shape[1]
        shape = (hidden, -1) if name.endswith("1") else (-1, hidden)
        found[name] = torch.stack(each).reshape(shape)
    return found
