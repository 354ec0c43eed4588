"""Rules of mixture-of-experts layers."""

from __future__ import annotations

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import resolve

TENSOR = {"tensor_model_parallel_size": "2", "sequence_parallel": True}
THREE = {
    "tensor_model_parallel_size": "3", "sequence_parallel": True, "num_attention_heads": "6", "hidden_size": "96",
    "ffn_hidden_size": "96", "seq_length": "126",
}  # fmt: skip
SHARED = {"expert_model_parallel_size": "2", "perform_rl_step": None}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_topk": "2"}
MIXTURE = {"num_experts": "4", "swiglu": True, "disable_bias_linear": True}


@pytest.mark.parametrize(
    ("ranks", "changes", "fragments"),
    [
        (1, {"moe_router_topk": "5"}, ["--moe-router-topk 5", "--num-experts 4", "at most 4"]),
        (1, {"moe_router_topk": "1"}, ["--moe-router-topk 1", "add --moe-router-pre-softmax"]),
        (4, SHARED | TENSOR | {"disable_bias_linear": None},
         ["biases", "--expert-tensor-parallel-size 1", "--expert-model-parallel-size 2", "or --disable-bias-linear"]),
        (2, {"tensor_model_parallel_size": "2"}, ["needs --sequence-parallel"]),
        (2, {"tensor_model_parallel_size": "2", "sequence_parallel": True, "moe_ffn_hidden_size": "33"},
         ["--moe-ffn-hidden-size 33", "use 32 or 34"]),
        (1, {"recompute_granularity": "selective", "recompute_modules": "mlp"}, ["--recompute-modules mlp"]),
        (1, {"moe_router_load_balancing_type": "aux_loss"}, ["aux_loss has no effect", "--moe-aux-loss-coeff 0.001"]),
        (1, {"moe_aux_loss_coeff": "0.01"}, ["--moe-aux-loss-coeff 0.01", "-balancing-type seq_aux_loss"]),
        (1, {"num_experts": None, "moe_z_loss_coeff": "0.01"}, ["--moe-z-loss-coeff without --num-experts"]),
        (1, SIGMOID | {"num_experts": None, "moe_router_topk": None},
         ["--moe-router-score-function without --num-experts"]),
        (1, {"moe_layer_freq": "3,4"}, ["--moe-layer-freq 3,4", "([0]*1+[1]*3)"]),
        (1, {"moe_layer_freq": "([0]*1+[1]*9)"}, ["--moe-layer-freq", "lists 10 layers", "--num-layers is"]),
        (1, {"moe_layer_freq": "[0]*4"}, ["--moe-layer-freq", "no layer experts"]),
        (1, {"moe_router_enable_expert_bias": True}, ["--moe-router-enable-expert-bias", "-score-function sigmoid"]),
        (1, SIGMOID | {"moe_router_pre_softmax": True}, ["--moe-router-pre-softmax has no effect"]),
        (1, SIGMOID | {"moe_router_num_groups": "2"}, ["--moe-router-num-groups 2", "add --moe-router-group-topk"]),
        (1, SIGMOID | {"moe_router_num_groups": "2", "moe_router_group_topk": "2"},
         ["--moe-router-group-topk 2", "--moe-router-topk 2 1 times, not twice"]),
        (1, SIGMOID | {"moe_router_num_groups": "4", "moe_router_group_topk": "1"}, ["groups of two experts"]),
        (1, {"moe_shared_expert_gate": True}, ["without --moe-shared-expert-intermediate-size"]),
        (2, TENSOR | {"moe_shared_expert_intermediate_size": "33"}, ["use 32 or 34"]),
        (1, {"moe_grouped_gemm": True, "moe_ffn_hidden_size": "30"},
         ["--moe-ffn-hidden-size 30", "16 bytes", "use 28 or 32"]),
        (1, {"num_layers": "1000", "num_experts": "128"}, ["--num-experts 128", "1000 layers", "100,000 experts"]),
        (1, {"num_experts": None, "moe_ffn_hidden_size": "64"}, ["--moe-ffn-hidden-size without --num-experts"]),
        (3, SHARED | {"expert_model_parallel_size": "3"}, ["--expert-model-parallel-size 3", "experts 4", "1, 2 or 4"]),
        (3, SHARED, ["--expert-model-parallel-size 2", "world size 3", "start 2 or 4"]),
        (2, SHARED | TENSOR, ["--expert-model-parallel-size 2", "world size 2", "divisible by 4", "start 4 ranks"]),
        (8, SHARED | TENSOR | {"expert_tensor_parallel_size": "4"},
         ["--expert-tensor-parallel-size 4", "--tensor-model-parallel-size 2", "use 1 or 2"]),
        (2, TENSOR | {"expert_tensor_parallel_size": "1"},
         ["--expert-tensor-parallel-size 1", "with --expert-model-parallel-size 1", "--expert-model-parallel-size 2"]),
        (12, SHARED | THREE | {"expert_model_parallel_size": "4", "expert_tensor_parallel_size": "1"},
         ["--expert-model-parallel-size 4", "use 1 or 3, or a multiple of 3"]),
        (2, SHARED | {"num_experts": None}, ["without --num-experts"]),
        (1, {"num_experts": None, "rl_router_replay": True}, ["--rl-router-replay without --num-experts", "no router"]),
        (1, {"rl_router_replay": True, "perform_rl_step": None}, ["--rl-router-replay without --perform-rl-step"]),
        (2, {"rl_router_replay": True, "rl_surplus": "keep", "rl_dynamic_sampling": True,
             "pipeline_model_parallel_size": "2"},
         ["--rl-router-replay with --rl-surplus keep", "pipeline stages", "leave one of them out"]),
        (2, {"rl_router_replay": True, "rl_partial_rollouts": True, "pipeline_model_parallel_size": "2"},
         ["--rl-router-replay with --rl-partial-rollouts", "pipeline stages", "leave one of them out"]),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_line(problems, ranks, changes, fragments) -> None:
    (line,) = problems(ranks, **MIXTURE | changes)
    assert [text for text in fragments if text not in line] == []


def test_recomputing_the_experts_alone_is_not_a_choice(command) -> None:
    """Recomputed without its layer, a router would not hear again where tokens go (`--rl-router-replay`)."""
    argv = command(**MIXTURE, rl_router_replay=True, recompute_granularity="selective", recompute_modules="moe")
    _, problems = read_config(argv, 1)
    (line,) = map(str, problems)
    assert "--recompute-modules" in line
    assert "core_attn" in line


def test_what_goes_together_is_fine(problems) -> None:
    assert problems(1, **MIXTURE) == []
    assert problems(1, **MIXTURE | {"disable_bias_linear": None}) == []
    assert problems(1, **MIXTURE, perform_rl_step=True, rl_router_replay=True, rl_partial_rollouts=True) == []
    assert problems(2, **MIXTURE, tensor_model_parallel_size="2", sequence_parallel=True) == []
    assert problems(2, **MIXTURE, expert_model_parallel_size="2", rl_rollout_quantization="int8") == []
    assert problems(4, **MIXTURE, expert_model_parallel_size="2", pipeline_model_parallel_size="2") == []
    assert problems(4, **MIXTURE | TENSOR, expert_model_parallel_size="4", expert_tensor_parallel_size="1") == []


def test_an_expert_is_as_wide_as_a_dense_layer_unless_said_otherwise(config) -> None:
    model = resolve(config(**MIXTURE, ffn_hidden_size="96"), 1).model
    assert model.moe_ffn_hidden_size == 96
    assert resolve(config(ffn_hidden_size="96"), 1).model.moe_ffn_hidden_size is None


def test_recorded_experts_are_part_of_the_cache(config) -> None:
    """A byte an expert, with 256 experts two: the largest number is no expert's."""
    for experts, size in (("255", 1), ("256", 2)):
        known = resolve(config(**MIXTURE | {"num_experts": experts}, rl_router_replay=True), 1)
        without = resolve(config(**MIXTURE | {"num_experts": experts}), 1)
        assert known.kv_cache_bytes(10) - without.kv_cache_bytes(10) == 10 * 4 * 2 * size


def test_an_evaluation_replays_nothing(config) -> None:
    """The command of a training run goes on as it is."""
    assert not resolve(config(**MIXTURE, rl_router_replay=True, eval_only=True), 1).rollout.rl_router_replay


@pytest.mark.parametrize(
    ("changes", "grouped"),
    [
        ({}, True),
        ({"moe_ffn_hidden_size": "36"}, True),
        ({"moe_ffn_hidden_size": "36", "bf16": True}, False),
        ({"no_moe_grouped_gemm": True}, False),
        ({"num_experts": None}, False),
    ],
)
def test_experts_are_grouped_where_they_can_be(config, changes, grouped) -> None:
    """Rows of 36 fp32 numbers are 9 times 16 bytes, of bf16 numbers 4.5 times."""
    assert resolve(config(**MIXTURE | changes), 1).model.moe_grouped_gemm is grouped
