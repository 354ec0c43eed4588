"""What settings of TRL and verl are called here: the rows of docs/coming_from.md, which a test compares with these."""

from __future__ import annotations

import functools
import re

TABLE = """\
model, model_name_or_path | --load-hf
reward_funcs, train_dataset, dataset_name | --langrl-env-config
reward_weights | –
learning_rate | --lr
lr_scheduler_type, warmup_steps, warmup_ratio | --lr-decay-style, --lr-warmup-iters, --lr-warmup-fraction
adam_epsilon, optim, max_grad_norm | --adam-eps, --optimizer, --clip-grad
max_steps | --train-iters
num_train_epochs | –
num_generations | --grpo-group-size
per_device_train_batch_size | --micro-batch-size
per_device_train_batch_size × gradient_accumulation_steps | --global-batch-size
generation_batch_size / num_generations | --grpo-prompts-per-step
num_iterations, max_completion_length | --grpo-iterations, --rl-max-new-tokens
max_prompt_length + max_completion_length | --seq-length
beta | --grpo-kl-beta
epsilon, epsilon_high | --grpo-clamp-eps-lower, --grpo-clamp-eps-upper
delta | --rl-dual-clip
loss_type=grpo | --rl-loss-aggregation sequence-mean
loss_type=dapo | --rl-loss-aggregation token-mean
loss_type=dr_grpo | --rl-loss-aggregation constant
scale_rewards=False, importance_sampling_level=sequence | --rl-advantage dr_grpo, --rl-policy-loss gspo
vllm_importance_sampling_correction, vllm_importance_sampling_cap | --rl-correction token_tis, --rl-correction-cap
temperature, mask_truncated_completions | --rl-temperature, --rl-truncated mask
top_p, top_k | –
gradient_checkpointing | --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
chat_template_kwargs, bf16 | --chat-template-kwargs, --bf16
output_dir, logging_dir, save_total_limit | --run-dir, --tensorboard-dir, --keep-last
save_steps, eval_steps, logging_steps | --save-interval, --eval-interval, --log-interval
resume_from_checkpoint | --resume
report_to=wandb, run_name | --wandb-project, --wandb-exp-name
vllm_tensor_parallel_size | --tensor-model-parallel-size
vllm_gpu_memory_utilization | --rl-rollout-memory-fraction
use_vllm, vllm_mode | –
model.path | --load-hf
data.train_files, data.val_files, custom_reward_function.path | --langrl-env-config
data.train_batch_size | --grpo-prompts-per-step
rollout.n | --grpo-group-size
actor.ppo_mini_batch_size × rollout.n | --global-batch-size
actor.ppo_micro_batch_size_per_gpu | --micro-batch-size
actor.ppo_max_token_len_per_gpu | --rl-sequence-packing-bin-size
actor.ppo_epochs, data.max_response_length | --grpo-iterations, --rl-max-new-tokens
data.max_prompt_length + data.max_response_length | --seq-length
actor.optim.lr, actor.optim.lr_warmup_steps | --lr, --lr-warmup-iters
actor.optim.weight_decay, actor.optim.clip_grad, actor.grad_clip | --weight-decay, --clip-grad, --clip-grad
algorithm.adv_estimator | --rl-advantage
algorithm.norm_adv_by_std_in_grpo=False | --rl-advantage dr_grpo
algorithm.gamma, algorithm.lam | --rl-gamma, --rl-gae-lambda
actor.clip_ratio | --grpo-clamp-eps-lower X --grpo-clamp-eps-upper X
actor.clip_ratio_low, actor.clip_ratio_high | --grpo-clamp-eps-lower, --grpo-clamp-eps-upper
actor.clip_ratio_c | --rl-dual-clip
actor.policy_loss.loss_mode, actor.entropy_coeff | --rl-policy-loss, --grpo-entropy-term-weight
actor.loss_agg_mode | --rl-loss-aggregation
actor.use_kl_loss, actor.kl_loss_coef | --grpo-kl-beta
actor.kl_loss_type | --rl-kl-estimator
algorithm.use_kl_in_reward | --rl-kl-in-reward
algorithm.filter_groups.enable | --rl-dynamic-sampling
algorithm.filter_groups.metric=acc | --rl-group-filter accuracy
algorithm.filter_groups.max_num_gen_batches | --rl-max-refills
reward_model.overlong_buffer.len | –
algorithm.rollout_correction.rollout_is=token | --rl-correction token_tis
algorithm.rollout_correction.rollout_is=sequence | --rl-correction sequence_tis
algorithm.rollout_correction.rollout_is_threshold, actor.tis_imp_ratio_cap | --rl-correction-cap
critic.optim.lr | --rl-critic-lr
critic.cliprange_value, trainer.critic_warmup | --rl-critic-clip-range, --rl-critic-warmup-steps
rollout.tensor_model_parallel_size, actor.megatron.tensor_model_parallel_size | --tensor-model-parallel-size
actor.megatron.pipeline_model_parallel_size | --pipeline-model-parallel-size
actor.megatron.expert_model_parallel_size | --expert-model-parallel-size
actor.megatron.context_parallel_size, actor.ulysses_sequence_parallel_size | --context-parallel-size
rollout.gpu_memory_utilization, rollout.temperature | --rl-rollout-memory-fraction, --rl-temperature
rollout.val_kwargs.n, rollout.val_kwargs.temperature | --rl-samples-per-eval-prompt, --rl-eval-temperature
rollout.val_kwargs.top_p, rollout.val_kwargs.top_k | --rl-eval-top-p, --rl-eval-top-k
trainer.nnodes, trainer.n_gpus_per_node | torchrun --nnodes, torchrun --nproc-per-node
trainer.total_training_steps, trainer.val_only | --train-iters, --eval-only
trainer.save_freq, trainer.test_freq, trainer.default_local_dir | --save-interval, --eval-interval, --run-dir
trainer.project_name, trainer.experiment_name | --wandb-project, --wandb-exp-name
"""
"""Theirs | ours, – where there is none. ``name=value`` is of that value alone; of several an earlier row decides."""


@functools.cache
def foreign() -> dict[str, str]:
    """Name, or ``name=value`` -> what to use, empty where there is nothing."""
    found: dict[str, str] = {}
    for line in TABLE.splitlines():
        left, right = line.split(" | ")
        names, ours = re.split(", | [×+/] ", left.lower()), right.replace("–", "").split(", ")
        for name, use in zip(names, ours if len(ours) == len(names) else ours * len(names), strict=True):
            found.setdefault(name, use)
    return dict.fromkeys((name.partition("=")[0] for name in found), "") | found


def foreign_hint(spelling: str, value: str = "") -> str | None:
    """What ``spelling`` is called here, empty if there is no such thing; None of a word that is in no row."""
    name = spelling.lower().replace("-", "_").removeprefix("actor_rollout_ref.")
    return foreign().get(f"{name}={value.lower()}", foreign().get(name))
