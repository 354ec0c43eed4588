"""What `test_engine_tensor_parallel` runs, on ranks whose Transformer Engine is the fake one, and on one without it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.checkpoint.tensors import load, save_tensors
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import update
from tests.distributed.programs import gather_whole
from tests.support.generation import generate, ragged_requests, rollout_engine
from tests.support.hugging_face import batch_of
from tests.support.quantized import roll_out, rollout_quantization, short_requests
from tests.support.scoring import gaps, packed
from tests.support.tiny import MIXED, VOCABULARY, single_thread, tiny_config, tiny_policy

ENGINE = {"transformer_impl": "transformer_engine"}
FP8 = {**ENGINE, "bf16": True, "fp8_format": "hybrid", "fp8_recipe": "blockwise"}
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
DENSE = {"disable_bias_linear": False, "qk_layernorm": True, "num_query_groups": 1}
EXPERTS = MIXED | {
    "num_layers": 2, "moe_layer_freq": "([0]*1+[1]*1)", "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True,
}  # fmt: skip
UPDATES = {"use_distributed_optimizer": True, "lr_decay_style": "constant", "adam_eps": 1e-2}
"""A gradient that is nearly 0 does not decide about the sign of an update."""

Whole = dict[str, torch.Tensor]


def on_ranks(folder: str) -> dict[str, Any]:
    """How far the numbers of two ranks are from one rank's, which lie in ``folder``; and two kinds of fp8."""
    single_thread()
    groups, dense = initialize(tiny_config(2, **TENSOR).parallel, current_platform()), Path(folder, "dense.pt")
    cases = {"local": SEQUENCE, "tensor": TENSOR | ENGINE, "sequence": SEQUENCE | ENGINE}
    report = {name: apart(groups, DENSE | flags, dense, Path(folder, name)) for name, flags in cases.items()}
    report["experts"] = apart(groups, EXPERTS | SEQUENCE | ENGINE, Path(folder, "experts.pt"), Path(folder, "experts"))
    whole_batch, shares = (in_fp8(groups, layout) for layout in (TENSOR, SEQUENCE))
    wanted, found = whole_batch.pop("found"), shares.pop("found")
    report["fp8"] = {"tensor": whole_batch, "sequence": shares}
    report["fp8 apart"] = {name: farthest(values, wanted[name]) for name, values in found.items()}
    report["quantised"] = {recipe: quantised(groups, recipe, SEQUENCE) for recipe in ("int8", "fp8_block_pow2")}
    shut_down()
    return report


def on_expert_ranks(folder: str) -> dict[str, Any]:
    """Of two ranks that share every layer but the experts, of which each has half."""
    single_thread()
    shape = EXPERTS | SEQUENCE | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    groups = initialize(tiny_config(2, **shape).parallel, current_platform())
    report = {"experts": apart(groups, shape | ENGINE, Path(folder, "experts.pt"), Path(folder, "parallel"))}
    report["fp8"] = in_fp8(groups, shape)
    del report["fp8"]["found"]
    report["quantised"] = quantised(groups, "int8", shape)
    shut_down()
    return report


def apart(groups: ParallelGroups, flags: Mapping[str, Any], expected: Path, checkpoint: Path) -> dict[str, Any]:
    """The largest differences from one rank; between two updates a ``checkpoint`` is written, and read again."""
    config = tiny_config(groups.world_size, **flags, **UPDATES)
    policy, (batch, wanted) = waved(config), torch.load(expected, weights_only=False)
    report: dict[str, Any] = {"rollout": rollout_of(policy, groups)}
    logprobs = Scorer(policy, groups, 1.0).logprobs([batch])[0]
    report["logprobs"] = (logprobs - wanted["logprobs"]).abs().max().item()
    optimization = Optimization(policy, config)
    for number in (1, 2):
        for name, found in updated(optimization, batch, groups).items():
            report[f"{name} {number}"] = farthest(found, wanted[f"{name} {number}"])
        if number == 1:
            checkpoint.mkdir(exist_ok=True)
            save_tensors(checkpoint, policy, optimization)
            again = tiny_policy(tiny_config(groups.world_size, **flags | {"transformer_impl": "local"}), seed=7)
            load(checkpoint, again)
            report["read by local layers"] = farthest(whole(again, groups), whole(policy, groups))[0]
    return report


def on_one_rank(groups: ParallelGroups, shape: Mapping[str, Any], path: Path) -> dict[str, list[Any]]:
    """Local layers on one rank: writes the numbers to compare with, and returns its rollout."""
    config = tiny_config(**shape, **UPDATES)
    policy = waved(config)
    batch, rollout = batch_of(VOCABULARY, (9, 5, 12)), rollout_of(policy, groups)
    found = {"logprobs": Scorer(policy, groups, 1.0).logprobs([batch])[0]}
    optimization = Optimization(policy, config)
    for number in (1, 2):
        found |= {f"{name} {number}": values for name, values in updated(optimization, batch, groups).items()}
    torch.save((batch, found), path)
    return rollout


def resumed(groups: ParallelGroups, checkpoint: Path, expected: Path) -> tuple[float, str]:
    """Local layers on one rank go on after the first update: how far from those that made both?"""
    config, (batch, wanted) = tiny_config(**DENSE, **UPDATES), torch.load(expected, weights_only=False)
    policy = tiny_policy(config, seed=9)
    optimization = Optimization(policy, config)
    load(checkpoint, policy, optimization)
    return farthest(updated(optimization, batch, groups)["weights"], wanted["weights 2"])


def rollout_of(policy: PolicyModel, groups: ParallelGroups) -> dict[str, Any]:
    """Greedy tokens, their log-probs, and the distance of the trainer's."""
    requests = ragged_requests(3, num_samples=1, max_new_tokens=8, greedy=True)
    completions = generate(policy, rollout_engine(policy), requests)
    return {
        "tokens": [list(one.token_ids) for group in completions for one in group],
        "logprobs": [number for group in completions for one in group for number in one.inference_logprobs],
        "gap": gaps(policy, groups, packed(requests, completions), 1.0).max().item(),
    }


def updated(optimization: Optimization, batch: TokenBatch, groups: ParallelGroups) -> dict[str, Whole]:
    """Gradients of the whole model, and its weights after an update by them."""
    policy, scorer = optimization.policy, Scorer(optimization.policy, groups, 1.0)
    slopes = torch.linspace(-1, 2, batch.samples.token_ids.numel()) * batch.loss_mask

    def loss(logits: torch.Tensor, batch: TokenBatch) -> Any:
        total = (scorer.select(logits, batch).current_logprobs * slopes).sum()
        return total, batch.loss_mask.sum(), {}

    outcome, _ = update(optimization, [batch], scorer.forward, loss)
    assert outcome.applied
    found = {"gradients": whole(policy, groups, "main_grad"), "weights": whole(policy, groups)}
    return found | {"norm": {"norm": torch.tensor(outcome.grad_norm)}}


@torch.no_grad()
def whole(policy: PolicyModel, groups: ParallelGroups, attribute: str = "data") -> Whole:
    """Of all that is trained, over the tensor-parallel ranks; of experts those that this rank has."""
    found = {}
    for name, parameter in policy.named_parameters():
        values = getattr(parameter, attribute, None)
        if values is None:  # not trained
            continue
        part = values.detach().clone()
        for mark in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            setattr(part, mark, getattr(parameter, mark, None))
        is_here = ".local_experts." in name and policy.config.expert_tensor_parallel_size == 1
        found[name] = part if is_here else gather_whole(part, groups.tensor_group)
    return found


def farthest(found: Whole, wanted: Whole) -> tuple[float, str]:
    """The largest difference, in parts of the parameter's largest number, and whose it is."""
    assert all(name in found for name in wanted if ".local_experts." not in name), "a parameter is missing"
    apart = {
        name: ((values - wanted[name]).abs().max() / wanted[name].abs().max().clamp_min(1e-3)).item()
        for name, values in found.items()
    }
    name = max(apart, key=apart.__getitem__)
    return apart[name], name


@torch.no_grad()
def waved(config: RLConfig) -> PolicyModel:
    """A model whose norms and biases are not 1 and 0, the same in every layout and in layers of both kinds."""
    policy = tiny_policy(config)
    for name, parameter in policy.named_parameters():
        if parameter.dim() == 1:
            phase = zlib.crc32(name.encode()) % 10
            is_part = getattr(parameter, "tensor_model_parallel", False)
            wave = 0.3 * torch.sin(1.7 * torch.arange(1024) + phase)
            parameter.add_(wave[0] if is_part else wave[: parameter.numel()])
    return policy


def in_fp8(groups: ParallelGroups, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Of fp8 training, on shares of seven tokens: gaps of rollouts; log-probs and gradient's norm beside bf16's."""
    batch, report, found = batch_of(VOCABULARY, (9, 5)), {"gaps": []}, []
    for flags in (ENGINE | {"bf16": True}, FP8):
        config = tiny_config(groups.world_size, **shape, **flags, **UPDATES)
        policy = waved(config)
        optimization, logprobs = Optimization(policy, config), Scorer(policy, groups, 1.0).logprobs([batch])[0]
        report["gaps"].append(rollout_of(policy, groups)["gap"])
        found.append({"logprobs": {"all": logprobs}} | updated(optimization, batch, groups))
        report["gaps"].append(rollout_of(policy, groups)["gap"])
    plain, rounded = found
    report["rounded"] = (rounded["logprobs"]["all"] - plain["logprobs"]["all"]).abs().mean().item()
    report["norm"] = (rounded["norm"]["norm"] / plain["norm"]["norm"]).item()
    return report | {"found": rounded}


def quantised(groups: ParallelGroups, recipe: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy 8-bit rollouts on layers of both kinds, before and after an update, and the copies' gradients."""
    report: dict[str, list[Any]] = {"tokens": [], "gaps": [], "audits": []}
    batch, gradients = batch_of(VOCABULARY, (9, 5)), []
    for kind in ("local", "transformer_engine"):
        config = tiny_config(groups.world_size, **shape, **UPDATES, transformer_impl=kind)
        policy, audits, requests = waved(config), [], short_requests(2, max_new_tokens=8, greedy=True)
        copies, engine = rollout_quantization(policy, recipe, audits), rollout_engine(policy)
        optimization = Optimization(policy, config, copies)
        for _ in range(2):
            rolled = roll_out(policy, engine, copies, requests)
            report["tokens"].append(rolled.samples.token_ids.tolist())
            with copies.emulated():
                report["gaps"].append(gaps(policy, groups, rolled, 1.0).max().item())
                gradients.append(updated(optimization, batch, groups)["gradients"])
        report["audits"].append([(row.layer, row.ran, row.agrees) for row in audits[0]])
    apart = [farthest(gradients[2 + number], gradients[number])[0] for number in (0, 1)]
    return report | {"gradients": apart}
