"""A Hugging Face directory as a checkpoint of ours, in one process."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.checkpoint.hf.load import load_hf
from megatron_rl.checkpoint.layout import commit, step_directory, temporary_directory
from megatron_rl.checkpoint.run_state import RunState, architecture_of, write_run_state
from megatron_rl.checkpoint.tensors import save_tensors
from megatron_rl.config import ModelConfig, PrecisionConfig, RLConfig, TokenizerConfig, TrainingConfig, resolve
from megatron_rl.errors import CheckpointError
from megatron_rl.families import HfModel
from megatron_rl.models import build_model
from megatron_rl.parallel import ParallelGroups
from megatron_rl.platform import current_platform

_SHORTEST = 2
"""Nothing is computed, so tables of positions need no length."""


def import_hf(
    model: HfModel, root: Path, groups: ParallelGroups, bf16: bool, vocab_divisible_by: int, tokenizer_size: int = 0
) -> Path:
    """Write ``root/step_0000000``, for `--pretrained-checkpoint`; any number of ranks can load it.

    The whole model is held in memory. Collective over a job of one rank.

    Args:
        vocab_divisible_by: rows of the embedding are padded to a multiple of this; times the tensor-parallel size
            of the run, it is that run's own padding.
        tokenizer_size: tokens of the tokenizer, which a run is then held to; 0 leaves it open.

    Raises:
        CheckpointError: there is a checkpoint already, or the files are not of this model.
    """
    if step_directory(root, 0).exists():
        raise CheckpointError(f"{step_directory(root, 0)} exists; choose another directory")
    config, rows = _config(model, bf16, vocab_divisible_by), model.architecture.vocab_size
    policy = build_model(config, current_platform(), rows)
    load_hf(model, policy, groups)
    target = temporary_directory(root, 0)
    target.mkdir(parents=True, exist_ok=True)
    save_tensors(target, policy, None)
    state = RunState(
        step=0,
        updates=0,
        policy_version=0,
        has_optimizer=False,
        vocab_size=tokenizer_size,
        padded_vocab_size=policy.padded_vocab_size,
        architecture=architecture_of(config),
    )
    write_run_state(target, state)
    return commit(root, 0)


def _config(model: HfModel, bf16: bool, vocab_divisible_by: int) -> RLConfig:
    settings = model.architecture.settings()
    rows = settings.pop("vocab_size")
    config = RLConfig(
        model=ModelConfig(**settings, group_query_attention=True),
        tokenizer=TokenizerConfig(vocab_size=rows, make_vocab_size_divisible_by=vocab_divisible_by),
        precision=PrecisionConfig(bf16=bf16),
        training=TrainingConfig(seq_length=_SHORTEST),
    )
    return resolve(config, 1)
