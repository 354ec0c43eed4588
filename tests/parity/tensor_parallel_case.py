"""What every rank of `test_tensor_parallel` runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.checkpoint.tensors import weights_fingerprint
from megatron_rl.inference.engine import Engine
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models.attention.kv_format import FP8, rounded_attention
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.trainer.scoring import Scorer
from tests.support.generation import generate, mcore_engine, ragged_requests, rollout_engine
from tests.support.quantized import complete, rollout_quantization
from tests.support.scoring import gaps, packed
from tests.support.tiny import DELTA, single_thread, tiny_config, tiny_policy

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"untie_embeddings_and_output_weights": False, "qk_layernorm": True},
    "fewer_groups_than_ranks": {"num_query_groups": 1},
    "recurrent": DELTA | {"num_query_groups": 1},
}


def on_ranks(tensor_size: int) -> dict[str, dict[str, Any]]:
    """All `MODELS` on ``tensor_size`` ranks, with sequence parallelism in training."""
    single_thread()
    parallel = {"tensor_model_parallel_size": tensor_size, "sequence_parallel": tensor_size > 1}
    groups = initialize(tiny_config(tensor_size, **parallel).parallel, current_platform())
    report = {name: report_of(groups, parallel | changes) for name, changes in MODELS.items()}
    report["fingerprints"] = fingerprints_of(groups, parallel)
    report["int8"] = in_8_bits(groups, parallel)
    shut_down()
    return report


def fingerprints_of(groups: ParallelGroups, changes: Mapping[str, Any]) -> dict[str, int]:
    """Of weights as they are drawn, by the rows that the vocabulary of 32 tokens is padded to."""
    configs = {
        rows: tiny_config(groups.world_size, **changes, make_vocab_size_divisible_by=rows // groups.tensor_group.size())
        for rows in (32, 40)
    }
    return {str(rows): weights_fingerprint(tiny_policy(config), groups) for rows, config in configs.items()}


def report_of(groups: ParallelGroups, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy and sampled completions of both engines and their distance from the trainer's log-probs.

    After them the model is trained on, which fails when a rollout left an inference tensor behind.
    """
    policy = tiny_policy(tiny_config(groups.world_size, **changes))
    report: dict[str, Any] = {}
    engines = {"rollout": rollout_engine(policy)}
    if not policy.layout.state_layers:
        engines |= {"fp8 cache": rollout_engine(policy, kv_cache_dtype=FP8), "mcore": mcore_engine(policy)}
    for name, engine in engines.items():
        for kind in ("greedy", "sampled"):
            requests = ragged_requests(4, num_samples=2, max_new_tokens=16, greedy=kind == "greedy")
            completions = generate(policy, engine, requests)
            batch = packed(requests, completions)
            report[f"{name} {kind}"] = {
                "tokens": [list(c.token_ids) for group in completions for c in group],
                "logprobs": [x for group in completions for c in group for x in c.inference_logprobs],
                "gap": gap_of(policy, groups, batch, engine).max().item(),
            }
    scorer = Scorer(policy, groups, 1.0)
    scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs.sum().backward()
    return report


def in_8_bits(groups: ParallelGroups, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Rollouts of the recurrent model in int8: what the audit saw, and how far the trainer's emulated pass is off."""
    policy = tiny_policy(tiny_config(groups.world_size, **changes, **MODELS["recurrent"]))
    audits: list[Any] = []
    quantization = rollout_quantization(policy, "int8", audits)
    requests = ragged_requests(4, num_samples=2, max_new_tokens=16)
    completions = complete(policy, rollout_engine(policy), quantization, requests)
    with quantization.emulated():
        gap = gaps(policy, groups, packed(requests, completions), 1.0)
    ran = {row.layer: row.ran for row in audits[0]}
    return {"tokens": [c.token_ids for group in completions for c in group], "ran": ran, "gap": gap.median().item()}


def gap_of(policy: PolicyModel, groups: ParallelGroups, batch: TokenBatch, engine: Engine) -> torch.Tensor:
    """To a trainer that rounds keys and values as the engine's cache does."""
    if not isinstance(engine, RolloutEngine):
        return gaps(policy, groups, batch, 1.0)
    with rounded_attention(policy.gpt.decoder.layers, engine.kv_format):
        return gaps(policy, groups, batch, 1.0)
