"""What has no default: every run needs it, or every RL run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules.wording import Rule

_EVERY_RUN = (
    ("model", "num_layers", "the model's shape has no default", "28"),
    ("model", "hidden_size", "the model's shape has no default", "1536"),
    ("model", "num_attention_heads", "the model's shape has no default", "12"),
    ("training", "seq_length", "batches are sized by it", "4096"),
    ("tokenizer", "tokenizer_model", "prompts are text", "Qwen/Qwen2.5-1.5B"),
    ("optimizer", "lr", "there is no learning rate for every model", "1e-6"),
    ("environment", "langrl_env_config", "it names the tasks to train on", "environments.yaml"),
)
_RL_RUN = (
    ("algorithm", "grpo_prompts_per_step", "--perform-rl-step samples that many prompts", "64"),
    ("algorithm", "grpo_group_size", "--perform-rl-step compares completions within a group", "16"),
)


def _flags(config: RLConfig) -> Iterator[str]:
    required = _EVERY_RUN + (_RL_RUN if config.training.perform_rl_step else ())
    for section, name, why, example in required:
        if getattr(getattr(config, section), name) is None:
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} is missing: {why}; for example {flag} {example}"


def _weights_to_evaluate(config: RLConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if config.training.eval_only and not (checkpoint.load or checkpoint.pretrained_checkpoint or checkpoint.load_hf):
        yield "--eval-only without weights to evaluate; give --load DIR, --pretrained-checkpoint DIR or --load-hf DIR"


def _one_start(config: RLConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.load_hf is not None and checkpoint.pretrained_checkpoint is not None:
        yield (
            f"--load-hf {checkpoint.load_hf} and --pretrained-checkpoint {checkpoint.pretrained_checkpoint} both say "
            "what to start from; keep one of them, or take shape and tokenizer from the one and weights from the other "
            f"with --hf-config {checkpoint.load_hf} in place of --load-hf"
        )


def _run_directory(config: RLConfig) -> Iterator[str]:
    if config.logging.run_dir is None:
        yield "--run-dir is missing: metrics need a place; give --run-dir runs/NAME or --save DIR"


def _length(config: RLConfig) -> Iterator[str]:
    iters, samples = config.training.train_iters, config.training.train_samples
    if iters is None and samples is None:
        yield "--train-iters is missing: the run needs an end; give --train-iters N or --train-samples N"
    if iters is not None and samples is not None:
        yield (
            f"--train-iters {iters} and --train-samples {samples} are two lengths for one run; "
            "keep one of them"
        )


RULES: tuple[Rule, ...] = (_flags, _weights_to_evaluate, _one_start, _run_directory, _length)
