"""What `test_transformer_engine` runs, in a process whose Transformer Engine is the fake one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformer_engine as fake

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.context import ContextShare
from megatron_rl.checkpoint.hf.load import load_hf
from megatron_rl.checkpoint.stored import load_weights
from megatron_rl.checkpoint.tensors import load, save_tensors
from megatron_rl.families import read_model
from megatron_rl.loop import rl_step
from megatron_rl.models.blocks.dense import GatedMLP
from megatron_rl.models.gpt import PolicyModel, build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.tensor_files import TensorReader
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from tests.distributed import stage_programs
from tests.support.foreign import write_ranks
from tests.support.generation import generate, ragged_requests, rollout_engine
from tests.support.hugging_face import batch_of, hf_run, write_back, write_model
from tests.support.quantized import disturb, quantizable_policy, roll_out, rollout_quantization, short_requests
from tests.support.samples import random_samples
from tests.support.scoring import gaps, packed
from tests.support.tiny import VOCABULARY, single_thread, tiny_config, tiny_policy
from tests.support.tokens import changed
from tests.support.toy import toy_run

ENGINE = {"transformer_impl": "transformer_engine"}
FP8 = {**ENGINE, "bf16": True, "fp8_format": "hybrid", "fp8_recipe": "blockwise"}
INT8 = {"rl_rollout_quantization": "int8"}


def on_rank() -> dict[str, Any]:
    """Everything that can be compared, as numbers."""
    single_thread()
    groups = initialize(tiny_config().parallel, current_platform())
    report = {"same": _same_model(groups), "fp8": fp8(groups), "hf": hugging_face(groups, "qwen2")}
    report["steps"] = steps(groups, STEPS)
    recipes = ("int8", "int8_smooth", "fp8_block_pow2")
    report["quantised"] = {recipe: quantised(groups, recipe) for recipe in recipes}
    shut_down()
    return report


def on_context_rank() -> dict[str, float]:
    """Of two ranks that share a batch, against each of them alone: the largest differences."""
    single_thread()
    config = tiny_config(2, **ENGINE, context_parallel_size=2)
    groups = initialize(config.parallel, current_platform())
    policy, whole = tiny_policy(config), collate(random_samples(5), "cpu", round_to=2)
    scorer = Scorer(policy, groups, 1.0)
    share = ContextShare.of(whole.packing.lengths, groups.context_group.rank(), groups.context_group.size())
    found = []
    for batch in (whole, changed(whole, share=share)):
        policy.gpt.zero_grad()
        logprobs = scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs
        logprobs.sum().backward()
        found.append({"logprobs": logprobs.detach(), **{name: p.grad for name, p in policy.gpt.named_parameters()}})
    for gradient in list(found[1].values())[1:]:
        torch.distributed.all_reduce(gradient, group=groups.context_group)
    shut_down()
    return {name: (found[0][name] - values).abs().max().item() for name, values in found[1].items()}


def on_stages(parallel: Mapping[str, Any], cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Rollouts of each case, on this rank's stage."""
    return stage_programs.roll_out(parallel, cases)


def gradients(policy: PolicyModel, groups: ParallelGroups, batch: TokenBatch) -> dict[str, torch.Tensor]:
    scorer = Scorer(policy, groups, 1.0)
    scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs.sum().backward()
    return {name: parameter.grad for name, parameter in policy.gpt.named_parameters()}


def _same_model(groups: ParallelGroups) -> dict[str, Any]:
    """A checkpoint of local layers in Transformer Engine's, and the way back with an optimizer's state."""
    local, other = tiny_policy(), tiny_policy(tiny_config(**ENGINE), seed=2)
    assert all(isinstance(layer.mlp, GatedMLP) for layer in other.layers), "SwiGLU would keep more"
    with torch.no_grad():
        for name, parameter in local.gpt.named_parameters():
            if "norm" in name:  # they all begin as ones
                parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)))
    requests = ragged_requests(4, num_samples=2, max_new_tokens=12, greedy=True)
    with tempfile.TemporaryDirectory() as folder:
        save_tensors(made(folder, "weights"), local, None)
        load(Path(folder, "weights"), other)
        torch_format_report = _torch_format(local, groups, Path(folder))
        completions = [generate(policy, rollout_engine(policy), requests) for policy in (local, other)]
        batch = packed(requests, completions[0])
        ours, theirs = (gradients(policy, groups, batch) for policy in (local, other))
        report: dict[str, Any] = {
            "modules": sorted({type(m).__name__ for m in other.gpt.decoder.layers.modules()}),
            "parameters": sorted(theirs),
            "tokens": [[list(c.token_ids) for group in groups_ for c in group] for groups_ in completions],
            "gap": gaps(other, groups, batch, 1.0).max().item(),
            "gradient": (ours["output_layer.weight"] - theirs["output_layer.weight"]).abs().max().item(),
            "norm_gradient": (
                ours["decoder.layers.0.input_layernorm.weight"]
                - theirs["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"]
            ).abs().max().item(),
        }  # fmt: skip
        report |= _resumed(other, local, groups, Path(folder)) | torch_format_report
    return report


def _torch_format(local: PolicyModel, groups: ParallelGroups, folder: Path) -> dict[str, Any]:
    """Weights of local layers by name."""
    other = tiny_policy(tiny_config(**ENGINE), seed=3)
    os.environ["HF_HOME"] = str(folder)  # of what is converted
    load_weights(write_ranks(folder, local, None), other, groups)
    ours, theirs = (dict(policy.gpt.named_parameters()) for policy in (local, other))
    norm = theirs["decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"]
    same = torch.equal(ours["decoder.layers.1.input_layernorm.weight"], norm)
    weight = "decoder.layers.1.self_attention.linear_qkv.weight"
    return {"by_name": same and torch.equal(ours[weight], theirs[weight])}


def made(folder: str | Path, name: str) -> Path:
    directory = Path(folder, name)
    directory.mkdir()
    return directory


def _resumed(other: PolicyModel, local: PolicyModel, groups: ParallelGroups, folder: Path) -> dict[str, Any]:
    """Train the one, resume with the other, take one more step with both: the same weights after it?"""
    flags = {"use_distributed_optimizer": True, "lr_decay_style": "constant"}
    optimizations = [Optimization(other, tiny_config(**ENGINE, **flags)), Optimization(local, tiny_config(**flags))]
    step(optimizations[0], seed=1)
    save_tensors(made(folder, "all"), other, optimizations[0])
    load(folder / "all", local, optimizations[1])
    for optimization in optimizations:
        step(optimization, seed=2)
    pairs = {
        "output_layer.weight": "output_layer.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight": "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.mlp.linear_fc1.weight": "decoder.layers.1.mlp.linear_fc1.weight",
    }
    theirs = dict(other.gpt.named_parameters())
    gaps = ((local.gpt.get_parameter(a) - theirs[b]).abs().max().item() for a, b in pairs.items())
    return {"after_resume": max(gaps)}


def step(optimization: Optimization, seed: int) -> None:
    """With gradients that depend on a parameter's shape only."""
    optimization.zero_grad()
    for parameter in filter(lambda each: each.requires_grad, optimization.policy.parameters()):
        generator = torch.Generator().manual_seed(seed)
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimization.step()


def fp8(groups: ParallelGroups, **shape: Any) -> dict[str, Any]:
    """Rollouts, scores and gradients through fp8 products, of numbers of tokens that are multiples of nothing."""
    policy, plain = tiny_policy(tiny_config(**FP8, **shape)), tiny_policy(tiny_config(**ENGINE, **shape, bf16=True))
    requests = ragged_requests(6, num_samples=1, max_new_tokens=9)
    engine = rollout_engine(policy)
    batch = packed(requests, generate(policy, engine, requests))
    odd = batch_of(VOCABULARY, (9, 4))
    report = {
        "recipes": sorted({type(recipe).__name__ for recipe in fake.RECIPES}),
        "formats": sorted({recipe.fp8_format.value for recipe in fake.RECIPES}),
        "tokens": odd.samples.token_ids.numel(),
        "gap": gaps(policy, groups, batch, 1.0).mean().item(),
        "gap_of_bf16": gaps(plain, groups, batch, 1.0).mean().item(),
        "finite": all(bool(grad.isfinite().all()) for grad in gradients(policy, groups, odd).values()),
    }
    before = Scorer(policy, groups, 1.0).logprobs([batch])[0]
    with torch.no_grad():
        next(parameter for name, parameter in policy.gpt.named_parameters() if "linear_fc1.weight" in name).mul_(-1)
    after = Scorer(policy, groups, 1.0).logprobs([batch])[0]
    return report | {"moved": (after - before).abs().max().item()}


def quantised(groups: ParallelGroups, recipe: str, **shape: Any) -> dict[str, Any]:
    """8-bit rollouts on both kinds of layers with the same weights, before and after a change of these."""
    local, other = quantizable_policy(**shape), tiny_policy(tiny_config(**ENGINE, **shape), seed=2)
    report: dict[str, Any] = {"tokens": [], "gap": 0.0}
    copies, audits = [], []
    for policy in (local, other):
        copies.append(rollout_quantization(policy, recipe, audits))
    names = sorted(other.gpt.state_dict())
    for by in (0.0, 0.3):
        disturb(local, by)
        with tempfile.TemporaryDirectory() as folder:
            save_tensors(made(folder, "weights"), local, None)
            load(Path(folder, "weights"), other)
        batches = []
        for policy, quantization in zip((local, other), copies, strict=True):
            quantization.weights_changed()
            batches.append(roll_out(policy, rollout_engine(policy), quantization, short_requests(greedy=True)))
        report["tokens"].append([batch.samples.token_ids.tolist() for batch in batches])
        with copies[1].emulated():
            report["gap"] = max(report["gap"], gaps(other, groups, batches[1], 1.0).max().item())
    report["formats"] = [sorted({(row.layer, row.ran) for row in rows}) for rows in audits]
    report["agree"] = all(row.agrees for rows in audits for row in rows)
    report["same_names"] = sorted(other.gpt.state_dict()) == names
    return report


STEPS = {
    "bf16": {"bf16": True}, "fp8": FP8, "int8": INT8 | {"bf16": True},
    "aligned": INT8 | {"rl_train_forward": "quantized"}, "fp8 with int8": FP8 | INT8,
}  # fmt: skip


def steps(groups: ParallelGroups, cases: Mapping[str, Mapping[str, Any]], **shape: Any) -> dict[str, Any]:
    """Whole steps of a run; the gap of later ones says whether rollouts and scores use the weights of the updates."""
    found = {}
    for name, flags in cases.items():
        config = tiny_config(groups.world_size, use_distributed_optimizer=True, **ENGINE | shape | dict(flags))
        run = toy_run(config, groups)
        try:
            found[name] = [rl_step(run, number).metrics for number in (1, 2, 3)]
        finally:
            run.closing.close()
    return found


def hugging_face(groups: ParallelGroups, family: str, **changes: Any) -> dict[str, Any]:
    """Load one directory into both kinds of layers, save the model of Transformer Engine's again."""
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 40, "tie_word_embeddings": False, **changes}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        write_model(source, family, settings)
        model, scores = read_model(source), []
        batch = batch_of(40, (9, 5))
        for flags in ({}, ENGINE):
            policy = build_model(hf_run(source, **flags), current_platform(), 40)
            load_hf(model, policy, groups)
            scores.append(Scorer(policy, groups, 1.0).logprobs([batch])[0])
        write_back(policy, model, target)
        with TensorReader(source) as before, TensorReader(target) as after:
            same = all(
                torch.equal(*(reader.read(name) for reader in (before, after)))
                for name in model.weights.tensors
            )
    return {"score": (scores[0] - scores[1]).abs().max().item(), "saved": same}
