"""What is loaded at the start."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config import RLConfig
from megatron_rl.errors import CheckpointError
from megatron_rl.tokenizer import Tokenizer


def resumes(config: RLConfig) -> bool:
    """Whether the run continues what its own directory holds: asked for, or `--load` names `--save`."""
    checkpoint = config.checkpoint
    if checkpoint.resume:
        return True
    return not checkpoint.finetune and _loads_what_it_saves(config)


def _loads_what_it_saves(config: RLConfig) -> bool:
    load, save = config.checkpoint.load, config.checkpoint.save
    return None not in (load, save) and Path(load).resolve() == Path(save).resolve()


def checkpoint_problems(config: RLConfig, tokenizer: Tokenizer | None) -> list[str]:
    """Checkpoints that are absent, of another model, or of a run this one cannot continue.

    Checksums are compared when a checkpoint is loaded: at the size of a large model they take minutes.
    """
    # imported here: megatron-core takes seconds, which --help and wrong flags need not wait for
    from megatron_rl.checkpoint import architecture_problems, continuation_problems, find_checkpoint

    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    problems = []
    for flag, path, continues in _to_load(config):
        try:
            directory = find_checkpoint(path, contents=False)
            found = architecture_problems(config, directory, vocab_size)
            found += continuation_problems(config, directory) if continues else []
        except CheckpointError as error:
            found = [str(error)]
        problems += [f"{flag}: {line}" for line in found]
    return problems


def _to_load(config: RLConfig) -> list[tuple[str, str, bool]]:
    """(flag, path, whether the run goes on from there rather than take its weights)."""
    from megatron_rl.checkpoint import holds_checkpoint, list_checkpoints

    checkpoint = config.checkpoint
    wanted = []
    if checkpoint.pretrained_checkpoint is not None:
        wanted.append(("--pretrained-checkpoint", checkpoint.pretrained_checkpoint, False))
    if resumes(config):
        if checkpoint.save is not None and list_checkpoints(Path(checkpoint.save)):
            wanted.append(("--resume", checkpoint.save, True))
    elif checkpoint.load is not None:
        # Megatron's habit: the first start of a run names an empty --load, and where else to start from.
        may_be_empty = checkpoint.pretrained_checkpoint is not None or checkpoint.load_hf is not None
        may_be_empty = may_be_empty or _loads_what_it_saves(config)
        if holds_checkpoint(checkpoint.load) or not may_be_empty:
            wanted.append(("--load", checkpoint.load, not checkpoint.finetune))
    return wanted
