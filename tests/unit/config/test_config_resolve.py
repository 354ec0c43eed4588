"""Derived defaults and derived numbers."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_rl.algorithms.extension import loss_of
from megatron_rl.config.rl_config import RLConfig, resolve


def test_derived_defaults_of_an_rl_run(config):
    resolved = resolve(config(bf16=True), world_size=2)
    model, training, rollout = resolved.model, resolved.training, resolved.rollout
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (256, 8, 8)
    assert (model.max_position_embeddings, model.embedding_init_method_std) == (128, 0.02)
    assert (training.global_batch_size, training.rl_sequence_packing_bin_size) == (32, 128)
    assert (rollout.inference_max_seq_length, rollout.rl_max_new_tokens) == (128, 127)
    assert rollout.inference_max_batch_size == 16  # 32 samples on 2 replicas
    uneven = resolve(config(grpo_prompts_per_step="3"), 2).rollout
    assert uneven.inference_max_batch_size == 8  # two groups of four on one of them
    assert resolved.schedule.lr_decay_iters == 100


def test_paths_follow_the_run_directory(config):
    resolved = resolve(config(), 1)
    assert resolved.checkpoint.save == "runs/test/checkpoints"
    assert resolved.logging.tensorboard_dir == "runs/test/tensorboard"
    assert resolved.logging.wandb_save_dir == "runs/test/wandb"
    assert resolved.logging.wandb_exp_name == "test"


def test_without_a_run_directory_it_is_a_folder_beside_the_checkpoints(config):
    """Logs, records and TensorBoard's files are not among the checkpoints."""
    resolved = resolve(config(run_dir=None, save="out/mine"), 1)
    assert (resolved.logging.run_dir, resolved.checkpoint.save) == ("out/mine/run", "out/mine")
    assert resolved.logging.tensorboard_dir == "out/mine/run/tensorboard"
    assert resolved.logging.wandb_exp_name == "mine"
    assert resolve(resolved, 1) == resolved


def test_typed_values_are_never_overwritten(config):
    typed = {
        "ffn_hidden_size": 100, "num_query_groups": 2, "kv_channels": 16, "max_position_embeddings": 999,
        "global_batch_size": 16, "rl_sequence_packing_bin_size": 512, "inference_max_seq_length": 100,
        "rl_max_new_tokens": 50, "inference_max_batch_size": 3, "lr_decay_iters": 40,
        "embedding_init_method_std": 0.5,
    }
    resolved = resolve(config(**{name: str(value) for name, value in typed.items()}), 1)
    sections = [getattr(resolved, f.name) for f in dataclasses.fields(resolved) if f.name != "typed"]
    found = {name: getattr(s, name) for s in sections for name in typed if hasattr(s, name)}
    assert found == typed


def test_resolving_twice_changes_nothing(config):
    once = resolve(config(sequence_parallel=True, recompute_activations=True), 4)
    assert resolve(once, 4) == once


def test_a_configuration_without_anything_can_be_resolved():
    resolved = resolve(RLConfig(), 1)
    assert resolved.model.ffn_hidden_size is None
    assert resolved.rollout.inference_max_batch_size == 256


def test_a_gated_mlp_is_narrower_as_in_megatron(config):
    assert resolve(config(swiglu=True, hidden_size="5120"), 1).model.ffn_hidden_size == 13632
    assert resolve(config(hidden_size="5120"), 1).model.ffn_hidden_size == 20480


def test_query_groups_count_only_with_group_query_attention(config):
    assert resolve(config(group_query_attention=True), 1).model.num_query_groups == 1
    assert resolve(config(group_query_attention=True, num_query_groups="2"), 1).model.num_query_groups == 2


def test_supervised_batch_is_a_micro_batch_a_replica(config):
    resolved = resolve(config(perform_rl_step=None, micro_batch_size="3"), world_size=4)
    assert resolved.training.global_batch_size == 12
    assert resolved.samples_per_step == 12
    assert resolved.rollout.inference_max_batch_size == 128  # 64 x 8 evaluation completions on 4 replicas


def test_sequence_parallel_is_off_without_tensor_parallel_ranks(config):
    assert resolve(config(sequence_parallel=True), 1).parallel.sequence_parallel is False
    both = config(sequence_parallel=True, tensor_model_parallel_size="2")
    assert resolve(both, 2).parallel.sequence_parallel is True


def test_megatron_spellings_of_sampling_switched_off(config):
    rollout = resolve(config(rl_top_p="0", rl_top_k="-1"), 1).rollout
    assert (rollout.rl_top_p, rollout.rl_top_k) == (1.0, 0)


@pytest.mark.parametrize(
    ("changes", "total_steps"),
    [
        ({}, 100),
        ({"global_batch_size": "16"}, 100),
        ({"global_batch_size": "8", "grpo_iterations": "2"}, 100),
        ({"train_iters": None, "train_samples": "330"}, 10),
        ({"train_iters": None, "train_samples": "330", "global_batch_size": "8", "grpo_iterations": "2"}, 10),
    ],
)
def test_iters_and_samples_count_steps(config, changes, total_steps):
    """Not updates: of those a step makes several, and fewer where groups are dropped."""
    resolved = resolve(config(**changes), 1)
    assert resolved.samples_per_step == 32
    assert resolved.total_steps == resolved.lr_decay_steps == total_steps


@pytest.mark.parametrize(
    ("changes", "clamp", "aggregation"),
    [
        ({}, (0.2, 0.2), "token-mean"),
        # Of the papers: GSPO's range is of the ratio of a sequence, CISPO's has no lower bound.
        ({"rl_policy_loss": "gspo"}, (3e-4, 4e-4), "sequence-mean"),
        ({"rl_policy_loss": "cispo"}, (1.0, 0.2), "token-mean"),
        ({"rl_policy_loss": "gspo", "grpo_clamp_eps_upper": "0.01"}, (3e-4, 0.01), "sequence-mean"),
        ({"rl_policy_loss": "gspo", "rl_loss_aggregation": "token-mean"}, (3e-4, 4e-4), "token-mean"),
        ({"rl_policy_loss": "gspo", "calculate_per_token_loss": True}, (3e-4, 4e-4), "token-mean"),
        ({"grpo_clamp_eps_lower": "1"}, (1.0, 0.2), "token-mean"),
    ],
)
def test_a_policy_loss_has_its_own_clip_range_and_denominator(config, changes, clamp, aggregation):
    resolved = resolve(config(**changes), 1)
    loss = loss_of(resolved)
    assert (loss.clamp_eps_lower, loss.clamp_eps_upper) == clamp
    assert resolved.algorithm.rl_loss_aggregation == aggregation


def test_data_parallel_size(config):
    assert config(tensor_model_parallel_size="8").data_parallel_size(64) == 8
    assert config(tensor_model_parallel_size="8").data_parallel_size(4) == 1


def test_kv_cache_of_a_shape_worked_out_by_hand(config):
    # 2 (K and V) x 4 layers x 8 heads x 8 channels x 2 bytes = 1024 bytes a token.
    assert resolve(config(bf16=True), 1).kv_cache_bytes(1) == 1024
    assert resolve(config(), 1).kv_cache_bytes(1) == 2048
    two_ranks = resolve(config(bf16=True, tensor_model_parallel_size="2"), 2)
    assert two_ranks.kv_cache_bytes(1) == 512
    assert resolve(config(bf16=True, rl_kv_cache_dtype="fp8"), 1).kv_cache_bytes(1) == 512
    assert resolve(config(rl_kv_cache_dtype="bf16"), 1).kv_cache_bytes(1) == 1024
