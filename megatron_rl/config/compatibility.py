"""Flags of a Megatron command line that are accepted and have no effect: each with the reason, printed when it is used.

Those of RL are all of Megatron-LM's `RLConfig` of November 2026 that have no effect here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_rl.config.flags import Finding, flag

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig

_AT_ONCE = "--inference-max-batch-size says how many completions are decoded at once"
_TOGETHER = "a step submits all its groups at once and takes them together"
_JOURNAL = "finished groups are always kept in the run directory's journal until a checkpoint covers them"
_ONE_MODEL = "the weights that train are those that generate, so nothing is copied"
_NOT_FUSED = "layers run without this fused kernel in this version"


@dataclass(frozen=True, kw_only=True)
class CompatibilityConfig:
    """Megatron flags that are accepted without effect, and why."""

    use_mcore_models: bool = flag(False, note="models are always built from megatron-core")
    use_rotary_position_embeddings: bool = flag(False, note="see --position-embedding-type, whose default is rotary")
    use_flash_attn: bool = flag(False, note="see --attention-backend, which picks flash attention where it runs")
    attention_softmax_in_fp32: bool = flag(False, note="every attention kernel computes its softmax in fp32")
    masked_softmax_fusion: bool = flag(True, off="--no-masked-softmax-fusion", note=_NOT_FUSED)
    bias_gelu_fusion: bool = flag(True, off="--no-bias-gelu-fusion", note=_NOT_FUSED)
    bias_swiglu_fusion: bool = flag(True, off="--no-bias-swiglu-fusion", note="a SwiGLU in training is always fused")
    bias_dropout_fusion: bool = flag(True, off="--no-bias-dropout-fusion", note=_NOT_FUSED)
    apply_rope_fusion: bool = flag(True, off="--no-rope-fusion", note=_NOT_FUSED)
    gradient_accumulation_fusion: bool = flag(True, off="--no-gradient-accumulation-fusion", note=_NOT_FUSED)
    te_rng_tracker: bool = flag(False, note="only CUDA graphs of Transformer Engine's layers need it")
    initialize_socket_comms: bool = flag(False, note="rollouts and training share one process")
    data_parallel_random_init: bool = flag(False, note="every replica draws the same weights")
    tokenizer_hf_include_special_tokens: bool = flag(False, note="the chat template decides")
    rl_skip_bos_token: bool = flag(False, note="the chat template says whether a prompt starts with a begin token")
    mock_data: bool = flag(False, note="tasks come from the environments, so there is no dataset to mock")
    num_workers: int = flag(2, note="prompts are read in the training process, graders have their own")
    split: str | None = flag(None, note="each environment says which of its tasks are for training")
    dataloader_type: Literal["single", "cyclic", "external"] | None = flag(
        None, note="prompts are reshuffled every epoch"
    )
    data_cache_path: str | None = flag(None, note="there is no dataset index to cache")
    create_attention_mask_in_dataloader: bool = flag(
        True, off="--no-create-attention-mask-in-dataloader", note="packed sequences need none"
    )
    rl_use_sequence_packing: bool = flag(False, note="sequences are always packed")
    rl_sequence_packing_algo: Literal["fifo", "round-robin"] = flag(
        "fifo", note="bins are filled best-fit and balanced over ranks"
    )
    eval_iters: int | None = flag(None, note="see --rl-prompts-per-eval and --rl-samples-per-eval-prompt")
    exit_signal_handler: bool = flag(False, note="SIGTERM always saves and stops; see --exit-grace-seconds")
    save_retain_interval: int | None = flag(None, note="--keep-last says how many checkpoints are kept")
    grpo_filter_groups_with_same_reward: bool = flag(False, note="see --rl-keep-zero-variance-groups")
    inference_dynamic_batching: bool = flag(False, note="the rollout engine always batches dynamically")
    inference_dynamic_batching_buffer_guaranteed_fraction: float = flag(
        0.2, note="a completion waits until its KV blocks are free"
    )
    inference_dynamic_batching_unified_memory_level: int = flag(0, note="the KV cache is in device memory")
    rl_max_inflight_requests: int | None = flag(None, note=_AT_ONCE)
    rl_parallel_generation_tasks: int = flag(512, note=_AT_ONCE)
    rl_submission_granularity: Literal["R", "G", "B"] = flag("B", note=_TOGETHER)
    rl_consumption_granularity: Literal["G", "B"] = flag("B", note=_TOGETHER)
    rl_durable_rollout_bank: bool = flag(False, note=_JOURNAL)
    rl_rollout_bank_dir: str | None = flag(None, note=_JOURNAL)
    rl_rollout_bank_max_bytes: int = flag(0, note=_JOURNAL)
    rl_sequence_packing_max_sequences_per_bin: int = flag(50, note="--rl-sequence-packing-bin-size bounds a bin")
    rl_training_cuda_graphs: bool = flag(False, note="training has no CUDA graphs in this version")
    rl_kv_cache_management_mode: Literal["persist", "offload", "recompute"] = flag(
        "persist", note="training takes the cache's memory where it needs it"
    )
    rl_inference_tensor_model_parallel_size: int | None = flag(None, ge=1)
    """Must equal the size in training: rollouts use the same layout."""
    rl_inference_pipeline_model_parallel_size: int | None = flag(None, ge=1)
    """Must equal the size in training: rollouts use the same layout."""
    rl_inference_expert_model_parallel_size: int | None = flag(None, ge=1)
    """Must equal the size in training: rollouts use the same layout."""
    rl_inference_expert_tensor_model_parallel_size: int | None = flag(None, ge=1)
    """Must equal the size in training: rollouts use the same layout."""
    rl_inference_model_unified_memory_level: Literal[0, 1] = flag(0, note=_ONE_MODEL)
    rl_offload_inference_model_weights: bool = flag(
        False, aliases=("--rl-offload-inference-model-weights-when-idle",), note=_ONE_MODEL
    )
    refit_method: Literal["nccl", "nccl_m2n", "gloo", "nvshmem", "nixl"] = flag("gloo", note=_ONE_MODEL)
    refit_execution_batch_bytes: int | None = flag(None, note=_ONE_MODEL)
    rl_verify_model_weights_swap: bool = flag(
        False, note=f"{_ONE_MODEL}; every step compares log-probs (training/rollout_logprob_gap_max)"
    )
    rl_profile: bool = flag(False, note="the seconds of every stage are always among the metrics")
    rl_profile_dir: str | None = flag(None, note="the seconds of every stage are always among the metrics")
    rl_inference_parsers: tuple[str, ...] = flag((), note="see --rl-tool-call-parser and --rl-reasoning-parser")
    log_timers_to_tensorboard: bool = flag(False, note="the seconds of every stage are always among the metrics")
    log_progress: bool = flag(False, note="metrics.jsonl records time, tokens and FLOPs of every step")
    log_memory_to_tensorboard: bool = flag(False, note="memory figures are always among the metrics")
    tensorboard_log_interval: int = flag(1, note="TensorBoard gets every step that --log-interval logs")
    timing_log_option: Literal["max", "minmax", "all"] = flag("minmax", note="timers report minimum and maximum")
    straggler_minmax_count: int = flag(1, note="--log-straggler reports the slowest and the fastest rank")
    disable_straggler_on_startup: bool = flag(False, note="--log-straggler is on from the first step")


_LAYOUT = {
    "rl_inference_tensor_model_parallel_size": "tensor_model_parallel_size",
    "rl_inference_pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "rl_inference_expert_model_parallel_size": "expert_model_parallel_size",
    "rl_inference_expert_tensor_model_parallel_size": "expert_tensor_parallel_size",
}


def megatron_rl_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report what Megatron's RL flags may ask for and nobody here does."""
    asked = config.compatibility
    for name, own in _LAYOUT.items():
        size, given = getattr(config.parallel, own), getattr(asked, name)
        if given not in (None, size):
            yield name, (
                f"is not --{own.replace('_', '-')} {size}: rollouts run in place, in training's layout; leave it out"
            )
