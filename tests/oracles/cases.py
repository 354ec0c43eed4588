"""Which runs are recomputed: a handful in every test run, the whole table with ``--long``."""

from __future__ import annotations

from tests.oracles.models import FAMILIES
from tests.oracles.product import NARROW, TWO_PASSES, TWO_UPDATES, Case

TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
INT8 = {"rl_rollout_quantization": "int8"}
CAP, VETO = {"rl_correction_cap": 1.005}, {"rl_correction_veto": 0.97}
BOUNDS = {"rl_correction_lower": 0.995, "rl_correction_upper": 1.005}
"""Amid the gaps of INT8 rollouts of these models, so that each correction does something to some tokens."""
SAMPLED = {"eval_only": True, "rl_prompts_per_eval": 2, "rl_samples_per_eval_prompt": 1000, "rl_max_new_tokens": 2}
"""An evaluation: training refuses top-k and top-p."""

QUICK = (
    Case("plain", flags={"rl_temperature": 0.7, "rl_sequence_packing_bin_size": 48}),
    Case("kl", "llama3", tied=True, flags={
        **TWO_UPDATES, **NARROW, "train_iters": 2, "rl_dual_clip": 1.05, "grpo_kl_beta": 0.1, "rl_advantage": "rloo",
        "rl_loss_aggregation": "sequence-mean"}),
    Case("entropy", "qwen3_experts", flags={
        **TWO_PASSES, **NARROW, "rl_policy_loss": "gspo", "rl_loss_aggregation": "sequence-mean",
        "grpo_entropy_term_weight": 0.1, "clip_grad": 0}),
    Case("talk", "qwen3", tied=True, environment="Talk", flags={
        **TWO_UPDATES, "rl_policy_loss": "cispo", "rl_advantage": "dr_grpo", "rl_loss_aggregation": "constant",
        "rl_max_new_tokens": 7, "grpo_clamp_eps_lower": 0.1, "grpo_clamp_eps_upper": 0.3}),
    Case("rare", environment="Rare", flags={
        "rl_advantage": "batch_norm", "grpo_prompts_per_step": 8, "rl_log_rollouts": 8, "rl_max_failed_share": 1}),
    Case("int8", flags={**INT8, **BOUNDS, **VETO, "rl_correction": "masked_is+veto"}),
    Case("data_parallel", "qwen3", ranks=2, flags={**TWO_UPDATES, "use_distributed_optimizer": True}),
    Case("tensor_parallel", "llama3", ranks=2, flags={**TENSOR, **TWO_UPDATES, "grpo_entropy_term_weight": 0.1}),
)  # fmt: skip
"""Between them: two steps, every family, tied and untied, every loss, advantage, denominator and layout."""

SAMPLING = (
    Case("temperature", flags={**SAMPLED, "rl_temperature": 0.6}),
    Case("top_k_top_p", "qwen3", flags={**SAMPLED, "rl_temperature": 1.3, "rl_top_k": 9, "rl_top_p": 0.8}),
)
SAMPLING_TABLE = (
    Case("top_k", flags={**SAMPLED, "rl_top_k": 4}),
    Case("top_p", "qwen3_experts", flags={**SAMPLED, "rl_top_p": 0.6}),
    Case("sampled_tensor_parallel", "llama3", ranks=2, flags={**SAMPLED, **TENSOR, "rl_temperature": 0.8}),
)

_LAYOUTS = {"one": (1, {}), "data": (2, {}), "tensor": (2, TENSOR)}
_ALGORITHMS = {
    **{f"loss_{name}": {**TWO_PASSES, **NARROW, "rl_policy_loss": name, "rl_loss_aggregation": "token-mean"}
       for name in ("clip", "gspo", "cispo")},
    **{f"defaults_of_{name}": {**TWO_PASSES, "rl_policy_loss": name} for name in ("clip", "gspo", "cispo")},
    **{f"advantage_{name}": {"rl_advantage": name} for name in ("grpo", "dr_grpo", "rloo", "batch_norm")},
    **{f"aggregation_{name}": {**TWO_UPDATES, "rl_loss_aggregation": name}
       for name in ("token-mean", "sequence-mean", "constant")},
    **{f"correction_{name}": {**INT8, **bounds, "rl_correction": name}
       for name, bounds in (("none", {}), ("token_tis", CAP), ("masked_is", BOUNDS), ("sequence_tis", CAP),
                            ("geometric", BOUNDS), ("veto", VETO), ("token_tis+geometric", {**CAP, **BOUNDS}))},
    **{f"kl_{name}": {**TWO_UPDATES, "grpo_kl_beta": 0.2, "rl_kl_estimator": name} for name in ("k1", "k2", "k3")},
    "dual_clip": {**TWO_PASSES, **NARROW, "rl_dual_clip": 1.05},
    "entropy_bonus": {**TWO_UPDATES, "grpo_entropy_term_weight": 0.2},
    "sgd": {**TWO_PASSES, "optimizer": "sgd", "lr": 0.1},
    "moments": {**TWO_PASSES, "adam_beta1": 0.5, "adam_beta2": 0.6, "weight_decay": 0.5, "clip_grad": 0.3},
    "fused_head": {**TWO_UPDATES, "rl_fused_output_layer": True, "grpo_entropy_term_weight": 0.1},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "one_sequence_a_batch": {"rl_sequence_packing_bin_size": 24, "seq_length": 24, "rl_temperature": 0.7},
    "all_groups": {"rl_keep_zero_variance_groups": True},
}  # fmt: skip
TABLE = (
    *(Case(f"{family}_{'tied' if tied else 'untied'}_{layout}", family, tied, ranks, flags={
        **TWO_UPDATES, **flags, "rl_temperature": 0.8})
      for family in FAMILIES for tied in (False, True) for layout, (ranks, flags) in _LAYOUTS.items()),
    *(Case(name, flags=flags) for name, flags in _ALGORITHMS.items()),
    *(Case(f"{name}_tensor", "qwen3", True, 2, flags={**_ALGORITHMS[name], **TENSOR})
      for name in ("loss_gspo", "kl_k3", "entropy_bonus", "correction_sequence_tis", "moments", "fused_head")),
    *(Case(f"{name}_data", "qwen3_experts", False, 2, flags=_ALGORITHMS[name])
      for name in ("loss_gspo", "kl_k3", "aggregation_sequence-mean", "advantage_batch_norm", "moments")),
    *(Case(f"rare_{name}", environment="Rare", flags={"rl_advantage": name, "rl_max_failed_share": 1,
      "grpo_prompts_per_step": 8, "rl_log_rollouts": 8, **flags})
      for name, flags in (("grpo", TWO_UPDATES), ("rloo", {"rl_keep_zero_variance_groups": True}))),
    Case("overlapping", "qwen3", ranks=2, flags={
        **TWO_PASSES, "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    Case("talk_data", "qwen3", ranks=2, environment="Talk", flags={**TWO_UPDATES, "rl_max_new_tokens": 7}),
    Case("talk_tensor", "qwen2", ranks=2, environment="Talk", flags={**TENSOR, "rl_max_new_tokens": 7}),
    Case("three_steps", "qwen3_experts", flags={**TWO_UPDATES, "train_iters": 3, "grpo_kl_beta": 0.1}),
    Case("three_steps_data", "qwen3", ranks=2, flags={
        **TWO_UPDATES, "train_iters": 3, "grpo_kl_beta": 0.1, "use_distributed_optimizer": True}),
    Case("three_steps_tensor", "llama3", tied=True, ranks=2, flags={
        **TWO_UPDATES, **TENSOR, "train_iters": 3, "grpo_kl_beta": 0.1}),
    Case("fp8", flags={"rl_rollout_quantization": "fp8"}),
    Case("fp8_experts", "qwen3_experts", flags={"rl_rollout_quantization": "fp8"}),
)  # fmt: skip
