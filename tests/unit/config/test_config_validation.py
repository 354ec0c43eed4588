"""Each rule over several flags: it fires, says the numbers, and only then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.rl_config import RLConfig, resolve
from megatron_rl.config.rules import validate
from tests.support.flags import parse_config


def test_the_working_command_has_no_problems(problems):
    assert problems() == []
    assert problems(perform_rl_step=None, grpo_prompts_per_step=None, grpo_group_size=None) == []


def test_everything_required_is_listed_at_once():
    missing = [problem.flag for problem in validate(parse_config(["--perform-rl-step"]), 1)]
    assert missing == [
        "--num-layers", "--seq-length", "--lr",
        "--langrl-env-config", "--grpo-prompts-per-step", "--grpo-group-size", "--run-dir", "--train-iters",
    ]


def test_other_rules_are_silent_about_what_is_missing(problems):
    assert len(problems(num_attention_heads=None, num_query_groups="3", kv_channels="8")) == 1
    assert len(problems(seq_length=None, rl_max_new_tokens="3", sequence_parallel=True)) == 1


def test_groups_are_required_only_in_rl(problems):
    assert problems(grpo_group_size=None) == [
        "--grpo-group-size is missing: --perform-rl-step compares completions within a group; "
        "for example --grpo-group-size 16"
    ]
    assert problems(grpo_group_size=None, perform_rl_step=None) == []


ENGINE = {"transformer_impl": "transformer_engine"}
FP8_WEIGHTS = {
    **ENGINE, "bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": True,
}  # fmt: skip
CODES = {**FP8_WEIGHTS, "use_distributed_optimizer": True}
TENSOR_2 = {"tensor_model_parallel_size": "2"}
TENSOR_8 = {"tensor_model_parallel_size": "8"}
SAMPLES = {"train_iters": None, "train_samples": "3200"}
ONE_PROBLEM = [
    # changes, ranks, what the message must say
    (TENSOR_2, 3, ["world size 3", "divisible by 2", "start 2 or 4 ranks"]),
    ({"context_parallel_size": "2"}, 3, ["world size 3", "divisible by 2", "context parallel size", "2 or 4 ranks"]),
    ({"expert_model_parallel_size": "2"}, 1, ["--expert-model-parallel-size 2", "without --num-experts"]),
    (
        {**TENSOR_8, "num_attention_heads": "4", "group_query_attention": True, "num_query_groups": "4"}, 8,
        ["--num-attention-heads 4", "tensor-parallel size 8", "--tensor-model-parallel-size 1, 2 or 4"],
    ),
    ({"num_attention_heads": "12"}, 1, ["--hidden-size 64", "12", "60 or 72", "--kv-channels"]),
    ({"num_query_groups": "2"}, 1, ["--num-query-groups 2", "use 8", "add --group-query-attention"]),
    (
        {"group_query_attention": True, "num_query_groups": "3"}, 1,
        ["--num-query-groups 3", "--num-attention-heads 8", "use 1, 2, 4 or 8"],
    ),
    (
        {"num_attention_heads": "24", "kv_channels": "8", "group_query_attention": True,
         "num_query_groups": "6", "tensor_model_parallel_size": "4"}, 4,
        ["--num-query-groups 6", "tensor-parallel size 4", "1, 2, 3 or 6, or a multiple of 6"],
    ),
    ({**TENSOR_8, "ffn_hidden_size": "100"}, 8, ["--ffn-hidden-size 100", "size 8", "96 or 104"]),
    ({"overlap_param_gather": True, "overlap_grad_reduce": True}, 1, ["add --use-distributed-optimizer"]),
    ({"perform_rl_step": None, "global_batch_size": "2"}, 4, ["--global-batch-size 2 ", "4 data-parallel", "use 4"]),
    ({"perform_rl_step": None, "global_batch_size": "30"}, 4, ["--global-batch-size 30", "28 or 32"]),
    (
        {"global_batch_size": "12"}, 1,
        ["--global-batch-size 12", "32 samples", "8 prompts x 4 completions", "use 8 or 16"],
    ),
    ({"global_batch_size": "64"}, 1, ["--global-batch-size 64", "32 samples of a rollout", "use 32"]),
    ({"kv_channels": "7"}, 1, ["--kv-channels 7 gives 7 numbers", "in pairs", "even number"]),
    ({"rotary_percent": "0.1"}, 1, ["--kv-channels 8 (from", "--rotary-percent 0.1 gives 0 numbers", "even number"]),
    ({"rl_stop_strings=": True}, 1, ["--rl-stop-strings has an empty text", "leave it out"]),
    ({"grpo_group_size": "1"}, 1, ["--grpo-group-size 1", "2 or more"]),
    ({"train_iters": None, "train_samples": "31"}, 1, ["--train-samples 31", "step of 32", "at least 32"]),
    (
        {"inference_max_seq_length": "256", "max_position_embeddings": "200",
         "rl_sequence_packing_bin_size": "256"}, 1,
        ["--inference-max-seq-length 256", "--max-position-embeddings 200", "at most 200"],
    ),
    (
        {"inference_max_seq_length": "64", "max_position_embeddings": "100"}, 1,
        ["--seq-length 128", "--max-position-embeddings 100", "at most 100"],
    ),
    ({"rl_max_new_tokens": "128"}, 1, ["--rl-max-new-tokens 128", "128 tokens", "at most 127"]),
    (
        {"rl_sequence_packing_bin_size": "100"}, 1,
        ["--rl-sequence-packing-bin-size 100 ", "128 tokens", "at least 128"],
    ),
    ({"fp16": True}, 1, ["--fp16 is refused", "use --bf16"]),
    ({"fp8_param_gather": True}, 1, ["--fp8-param-gather needs --transformer-impl transformer_engine --fp8-format"]),
    (FP8_WEIGHTS, 1, ["needs --use-distributed-optimizer beside it; add it"]),
    (
        CODES | {"overlap_param_gather": True, "overlap_grad_reduce": True}, 1,
        ["--fp8-param-gather with --overlap-param-gather is not built"],
    ),
    (CODES | {"grpo_kl_beta": "0.1"}, 1, ["--fp8-param-gather with --grpo-kl-beta is not built"]),
    (CODES | {"rl_advantage": "gae"}, 1, ["--fp8-param-gather with --rl-advantage gae is not built"]),
    (CODES | {"use_precision_aware_optimizer": True}, 1, ["with --use-precision-aware-optimizer is not built"]),
    (CODES | {"use_cpu_initialization": True}, 1, ["--fp8-param-gather with --use-cpu-initialization is not built"]),
    (
        CODES | {"rl_rollout_quantization": "fp8_block_pow2", "rl_train_forward": "quantized"}, 1,
        ["--fp8-param-gather with --rl-train-forward quantized is not built"],
    ),
    ({"fp8_format": "e4m3"}, 1, ["--fp8-format e4m3 needs --fp8-recipe blockwise"]),
    ({"fp8_recipe": "blockwise"}, 1, ["--fp8-recipe blockwise needs --fp8-format e4m3"]),
    ({"fp8_format": "hybrid", "fp8_recipe": "blockwise"}, 1, ["hybrid", "refused", "--fp8-format e4m3"]),
    ({"fp8_format": "e4m3", "fp8_recipe": "delayed"}, 1, ["delayed", "refused", "--fp8-recipe blockwise"]),
    ({"rl_inference_engine": "mcore"}, 1, ["--rl-inference-engine 'mcore' is not built", "one engine; use rollout"]),
    (
        {**ENGINE, "num_experts": "4", "disable_bias_linear": True, "no_moe_grouped_gemm": True}, 1,
        ["transformer_engine with --num-experts needs --moe-grouped-gemm", "--transformer-impl local"],
    ),
    ({**ENGINE, "bf16": True, "fp8_recipe": "tensorwise"}, 1, ["--fp8-recipe tensorwise needs --fp8-format e4m3"]),
    (
        {**ENGINE, "bf16": True, "fp8_format": "hybrid", "fp8_recipe": "delayed"}, 1,
        ["--fp8-recipe delayed: delayed scales", "tensorwise or blockwise"],
    ),
    ({**ENGINE, "bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, 1, ["Blackwell", "blockwise"]),
    ({**ENGINE, "fp8_format": "e4m3", "fp8_recipe": "blockwise"}, 1, ["without --bf16", "add --bf16"]),
    (
        {**ENGINE, **TENSOR_2, "bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise", "ffn_hidden_size": "176"},
        2, ["--fp8-format e4m3 with --tensor-model-parallel-size 2", "mlp.linear_fc1 is 88 x 64", "multiples of 16"],
    ),
    (
        {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "rl_rollout_quantization": "int8"}, 1,
        ["--rl-rollout-quantization int8", "round differently", "fp8_block_pow2"],
    ),
    (
        {
            "num_layers": "4", "recompute_granularity": "full", "recompute_method": "uniform",
            "recompute_num_layers": "3",
        }, 1,
        ["--recompute-num-layers 3", "equal groups", "1, 2 or 4"],
    ),
    ({"rl_train_forward": "quantized"}, 1, ["nothing to quantise with", "--rl-rollout-quantization"]),
    ({"exp_avg_dtype": "fp8"}, 1, ["--exp-avg-dtype fp8 needs --use-precision-aware-optimizer"]),
    ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}, 1, ["needs --use-distributed-optimizer"]),
    ({"use_precision_aware_optimizer": True, "optimizer": "sgd"}, 1, ["with --optimizer sgd", "use --optimizer adam"]),
    ({"exp_avg_sq_dtype": "fp16"}, 1, ["--exp-avg-sq-dtype fp16 is not built", "use bf16"]),
    ({"main_params_dtype": "fp16"}, 1, ["--main-params-dtype 'fp16'"]),
    ({"main_grads_dtype": "bf16"}, 1, ["--main-grads-dtype 'bf16'"]),
    ({"rl_train_backward": "quantized"}, 1, ["--rl-train-backward quantized", "without --rl-train-forward quantized"]),
    (
        {"rl_train_forward": "quantized", "rl_rollout_quantization": "int8", "rl_mismatch_action": "fallback"}, 1,
        ["--rl-mismatch-action fallback", "use --rl-mismatch-action stop"],
    ),
    (
        {
            "rl_train_forward": "quantized", "rl_rollout_quantization": "int8", "overlap_param_gather": True,
            "overlap_grad_reduce": True, "use_distributed_optimizer": True,
        }, 1,
        ["--overlap-param-gather", "still on their way"],
    ),
    (
        {"rl_kv_cache_dtype": "bf16", "rl_train_forward": "quantized", "rl_rollout_quantization": "int8"}, 1,
        ["--rl-kv-cache-dtype bf16", "--rl-train-forward quantized", "use --rl-kv-cache-dtype auto"],
    ),
    (
        {"rl_kv_cache_dtype": "fp8", "rl_mismatch_action": "fallback"}, 1,
        ["--rl-mismatch-action fallback", "no safer format", "stop or warn"],
    ),
    (
        # 1 byte a number: half a GiB.
        {"inference_dynamic_batching_buffer_size_gb": "0.4", "seq_length": "1048576", "rl_kv_cache_dtype": "fp8"}, 1,
        ["gb 0.4", "fp8", "0.5 GiB", "at least 0.5"],
    ),
    ({"hidden_dropout": "0.1"}, 1, ["--hidden-dropout 0.1", "log-probs", "--hidden-dropout 0"]),
    (
        {"optimizer": "sgd", "use_distributed_optimizer": True}, 1,
        ["--optimizer sgd", "--use-distributed-optimizer", "--optimizer adam"],
    ),
    ({"attention_dropout": "0.1", "perform_rl_step": None}, 1, ["--attention-dropout '0.1' is not built", "use"]),
    ({"attention_backend": "fused"}, 1, ["--attention-backend fused", "auto, sdpa or flash"]),
    (
        {"recompute_granularity": "full", "recompute_method": "block"}, 1,
        ["--recompute-method uniform --recompute-num-layers 1"],
    ),
    ({"recompute_granularity": "full"}, 1, ["--recompute-method uniform --recompute-num-layers 1"]),
    (
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "5"}, 1,
        ["--recompute-num-layers 5", "4 layers", "at most 4"],
    ),
    (
        {"recompute_granularity": "selective", "recompute_method": "uniform"}, 1,
        ["only --recompute-granularity full"],
    ),
    ({"recompute_modules": "mlp"}, 1, ["--recompute-modules", "--recompute-granularity selective"]),
    (
        {"ckpt_format": "torch"}, 1,
        ["--ckpt-format torch is read but not written", "leave it out, or use torch_dist"],
    ),
    ({"min_lr": "0.01"}, 1, ["--min-lr 0.01", "--lr 0.001"]),
    ({"lr_warmup_init": "0.01"}, 1, ["--lr-warmup-init 0.01", "--lr 0.001"]),
    ({"lr_warmup_iters": "100"}, 1, ["warms up for 100", "decays after 100", "at most 99"]),
    ({"lr_decay_style": "WSD"}, 1, ["WSD needs", "give --lr-wsd-decay-iters N"]),
    ({**SAMPLES, "lr_decay_style": "WSD"}, 1, ["WSD needs", "give --lr-wsd-decay-iters N"]),
    (
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": "95", "lr_warmup_iters": "10"}, 1,
        ["warm-up of 10", "last phase of 95", "at most 90"],
    ),
    (
        # 2 x 4 layers x 8 heads x 8 channels x 4 bytes x 1048576 tokens = 2 GiB.
        {"inference_dynamic_batching_buffer_size_gb": "1.5", "seq_length": "1048576"}, 1,
        ["gb 1.5", "1048576 tokens", "fp32", "2 GiB", "at least 2"],
    ),
    (
        {"inference_dynamic_batching_buffer_size_gb": "2", "rl_rollout_memory_fraction": "0.5"}, 1,
        ["--rl-rollout-memory-fraction 0.5", "buffer-size-gb 2", "leave one of them out"],
    ),
    ({"rl_top_k": "50"}, 1, ["--rl-top-k 50", "whole distribution", "--rl-top-k 0"]),
    ({"rl_top_p": "0.9"}, 1, ["--rl-top-p 0.9", "--rl-top-p 1"]),
]


@pytest.mark.parametrize(("changes", "ranks", "fragments"), ONE_PROBLEM)
def test_one_broken_rule_gives_one_line_with_its_numbers(problems, changes, ranks, fragments):
    found = problems(ranks, **changes)
    assert len(found) == 1
    assert [text for text in fragments if text not in found[0]] == []
    assert "\n" not in found[0]


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        # Fewer key heads than ranks: each rank holds a copy of one.
        ({"group_query_attention": True, "num_query_groups": "2", "tensor_model_parallel_size": "4"}, 4),
        ({"num_query_groups": "8"}, 1),
        ({"num_attention_heads": "12", "kv_channels": "16"}, 1),
        ({"sequence_parallel": True, "seq_length": "4101"}, 1),
        ({"perform_rl_step": None, "hidden_dropout": "0.1"}, 1),
        ({"overlap_param_gather": True, "overlap_grad_reduce": True, "use_distributed_optimizer": True}, 1),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "1"}, 1),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": "90", "lr_warmup_iters": "10"}, 1),
        ({"rl_top_p": "0", "rl_top_k": "-1"}, 1),
        ({"perform_rl_step": None, "rl_top_p": "0.9", "rl_top_k": "50"}, 1),
        ({"calculate_per_token_loss": True}, 1),
        ({"min_lr": "1e-3", "lr_warmup_init": "1e-3"}, 1),
        ({"train_iters": None, "train_samples": "32"}, 1),
        # Dealt to the ranks by tokens: 2, 2, 1 and 1 groups; then a rank without a group or a sample.
        ({"grpo_prompts_per_step": "6"}, 4),
        ({"grpo_prompts_per_step": "6", "global_batch_size": "6"}, 4),
        ({"grpo_prompts_per_step": "7", "grpo_group_size": "3"}, 2),
        ({"grpo_prompts_per_step": "2"}, 4),
        ({"global_batch_size": "2"}, 4),
        ({"grpo_clamp_eps_lower": "1"}, 1),
        # The schedule of a training command does not matter to an evaluation.
        ({"eval_only": True, "load": "x", "lr_decay_style": "WSD", "lr_wsd_decay_iters": "45", "min_lr": "1e-4"}, 1),
        (
            {"eval_only": True, "load": "x", "train_iters": None, "train_samples": "3200", "lr_decay_samples": "1600",
             "lr_warmup_samples": "32"}, 1,
        ),
        ({"rl_policy_loss": "gspo", "rl_dual_clip": "3"}, 1),
        ({"grpo_group_size": "1", "rl_advantage": "batch-norm"}, 1),  # compares with the whole step
        ({"rl_kv_cache_dtype": "bf16", "bf16": True}, 1),
        (
            {"rl_kv_cache_dtype": "fp8", "rl_mismatch_action": "fallback", "rl_rollout_quantization": "int8"}, 1,
        ),
        ({"inference_dynamic_batching_buffer_size_gb": "2", "seq_length": "1048576"}, 1),
        ({"rl_rollout_memory_fraction": "1"}, 1),
        ({"rl_sequence_packing_bin_size": "128"}, 1),
        ({"rl_max_new_tokens": "127"}, 1),
    ],
)
def test_what_stands_just_inside_a_rule_is_allowed(problems, changes, ranks):
    assert problems(ranks, **changes) == []


def test_all_broken_rules_come_at_once(problems):
    found = problems(4, fp16=True, ckpt_format="torch", global_batch_size="12", min_lr="1")
    starts = {line.split()[0] for line in found}
    assert starts == {"--global-batch-size", "--fp16", "--ckpt-format", "--min-lr"}


def test_no_batch_is_called_uneven_when_the_ranks_do_not_fit_the_model(problems):
    found = problems(7, tensor_model_parallel_size="2", perform_rl_step=None, global_batch_size="32")
    assert [line.split(" is ")[0] for line in found] == ["world size 7"]


def test_bounds_hold_for_configurations_built_in_code():
    config = RLConfig(model=ModelConfig(num_attention_heads=0, normalization="BatchNorm"))
    assert list(map(str, validate(config, 1))) == [
        "--num-attention-heads must be at least 1, got 0",
        "--normalization is not RMSNorm or LayerNorm, got 'BatchNorm'",
    ]


def test_validating_resolved_or_not_is_the_same(config):
    broken = config(num_attention_heads="9", global_batch_size="5")
    assert validate(broken, 1) == validate(resolve(broken, 1), 1) != []


def test_sections_can_be_replaced_in_code(config):
    changed = replace(config(), algorithm=AlgorithmConfig(grpo_prompts_per_step=8, grpo_group_size=1))
    assert [problem.flag for problem in validate(changed, 1)] == ["--grpo-group-size"]


def test_fp8_of_transformer_engine_is_no_aligned_training(problems):
    """The same flags on local layers quantise the rollouts; there they must leave them as they are."""
    engine = {**ENGINE, "bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
    assert problems(**engine) == problems(**engine, num_experts="4", disable_bias_linear=True) == []
    flags = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
    local = resolve(parse_config(flags), 1).quantization
    other = resolve(parse_config([*flags, "--transformer-impl", "transformer_engine"]), 1).quantization
    assert (local.rl_rollout_quantization, local.rl_train_forward) == ("fp8_block_pow2", "quantized")
    assert (other.rl_rollout_quantization, other.rl_train_forward) == ("none", "plain")
