"""How much is trained, on what batches, and when the run stops."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, batch sizes and life cycle of the run."""

    config: str | None = flag(None, path=True, common=True)
    """YAML file that sets flags (name: value); the command line wins."""
    perform_rl_step: bool = flag(False, common=True)
    """Train by reinforcement; without it, on the environments' demonstrations."""
    train_iters: int | None = flag(None, ge=1, common=True)
    """Steps of the run: in RL a rollout with all its updates, else one update. Or give --train-samples."""
    train_samples: int | None = flag(None, ge=1)
    """Samples of the run, those of a rollout counted once; or give --train-iters."""
    micro_batch_size: int = flag(1, ge=1)
    """Sequences of full length in a micro-batch; sets --rl-sequence-packing-bin-size."""
    global_batch_size: int | None = flag(None, ge=1, common=True)
    """Most samples of an optimizer update; where samples are dropped, a rollout makes fewer updates.

    Without it those of a rollout; supervised: a micro-batch a replica.
    """
    seq_length: int | None = flag(None, ge=2, common=True)
    """Longest training sequence in tokens, prompt included."""
    rl_sequence_packing_bin_size: int | None = flag(None, ge=2)
    """Tokens of a packed micro-batch. Without it micro-batch-size x seq-length."""
    seed: int = flag(1234, ge=0, le=2**32 - 1)
    """Seed of weights, data order and sampling."""
    eval_interval: int | None = flag(None, ge=1, common=True)
    """Evaluate every this many steps; without it never (Megatron's default: 1000)."""
    eval_only: bool = flag(False, common=True)
    """Evaluate the weights of --load or --pretrained-checkpoint on the held-out tasks once, and stop."""
    eval_iters: int | None = flag(
        None, note="--rl-prompts-per-eval and --rl-samples-per-eval-prompt set the size of an evaluation"
    )
    """Megatron's number of evaluation batches."""
    exit_interval: int | None = flag(None, ge=1)
    """Save and stop after a step that is a multiple of this."""
    exit_duration_in_mins: int | None = flag(None, ge=1)
    """Save and stop after this many minutes."""
    exit_grace_seconds: int = flag(0, ge=0, le=86_400)
    """Time that running rollouts get to finish after Ctrl-C or SIGTERM; torchrun kills a rank after 30 s."""
    empty_unused_memory_level: int = flag(0, ge=0, le=2)
    """Return cached device memory: 0 never, 1 after the backward pass, 2 also after the update."""
    mock_data: bool = flag(False, note="tasks come from the environments, so there is no dataset to mock")
    """Megatron's made-up dataset."""
    check: bool = flag(False, common=True)
    """Check this configuration and stop before the model is built."""
    check_world_size: int | None = flag(None, ge=1)
    """With --check or --estimate: the number of ranks to look at, instead of those of this launch."""
    estimate: bool = flag(False)
    """Print how many bytes each rank will need in rollouts and in training, and stop."""
    estimate_vocab_size: int | None = flag(None, ge=1)
    """With --estimate: tokens of the vocabulary, where there is no tokenizer to read."""
