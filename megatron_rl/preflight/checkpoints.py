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
    if checkpoint.load is None or checkpoint.save is None or checkpoint.finetune:
        return False
    return Path(checkpoint.load).resolve() == Path(checkpoint.save).resolve()


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
    from megatron_rl.checkpoint import list_checkpoints

    checkpoint = config.checkpoint
    wanted = []
    if checkpoint.pretrained_checkpoint is not None:
        wanted.append(("--pretrained-checkpoint", checkpoint.pretrained_checkpoint, False))
    if resumes(config):
        if checkpoint.save is not None and list_checkpoints(Path(checkpoint.save)):
            wanted.append(("--resume", checkpoint.save, True))
    elif checkpoint.load is not None:
        wanted.append(("--load", checkpoint.load, not checkpoint.finetune))
    return wanted
