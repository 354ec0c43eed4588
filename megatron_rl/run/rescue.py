"""When memory runs out: which phase it was, what to lower, and what is kept.

An allocation fails on one rank, and the others wait for it in a collective that it will never reach. So of several
ranks the launcher ends the others, and the last checkpoint is what there is. Only a run of one rank can still save,
and ranks that meet before anything else is asked of them: after a rollout without tensor parallelism.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from megatron_rl.config import RLConfig
from megatron_rl.errors import MemoryExhausted, SaveError
from megatron_rl.platform.memory import OutOfMemoryTogether, is_out_of_memory, reason_of

if TYPE_CHECKING:
    from megatron_rl.run.training import TrainingRun

Phase = Literal["rollout", "update"]


@contextlib.contextmanager
def naming_memory(config: RLConfig, phase: Phase) -> Iterator[None]:
    """An allocation that fails inside is told as one line.

    Raises:
        MemoryExhausted: in its place, once the memory that the failed call held is free again.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # Logits, activations and cache views are alive in the frames of the failed call: saving may need their room.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        article = "a rollout" if phase == "rollout" else "an update"
        advice = _to_lower_in_rollouts(config) if phase == "rollout" else _to_lower_in_updates(config)
        text = f"out of memory in {article} ({reason_of(error)}): {advice}"
        raise MemoryExhausted(text, on_all_ranks=isinstance(error, OutOfMemoryTogether)) from None


@contextlib.contextmanager
def finished_steps_kept(run: TrainingRun) -> Iterator[None]:
    """The step inside may run out of memory: then it has not been, and the steps before it are saved if they can be."""
    cursor, begun = run.source.state_dict(), run.optimization.updates_begun
    try:
        yield
    except MemoryExhausted as error:
        run.source.load_state_dict(cursor)
        all_here = error.on_all_ranks or run.groups.world_size == 1
        raise MemoryExhausted(f"{error}; {_save(run, run.optimization.updates_begun == begun, all_here)}") from None


def _save(run: TrainingRun, weights_are_the_steps: bool, all_here: bool) -> str:
    """Save the last finished step where that is possible; what a resume finds, in words. Collective if ``all_here``."""
    step = run.progress.step
    if all_here:
        run.checkpoints.finish()
    saved = run.checkpoints.saved_step
    newest = "the newest checkpoint, if there is one" if saved is None else f"step {saved}"
    if step == 0:
        return "no step was finished"
    if saved == step:
        return f"--resume goes on from step {step}"
    if not all_here:
        return f"step {step} is not saved, the other ranks cannot join in: --resume goes on from {newest}"
    if not weights_are_the_steps:
        return f"step {step} is not saved, the weights have changed since: --resume goes on from {newest}"
    try:
        run.save(final=True)
    except SaveError as failed:
        return f"step {step} could not be saved ({failed}): --resume goes on from {newest}"
    except (RuntimeError, MemoryError) as failed:
        if not is_out_of_memory(failed):
            raise
        return f"step {step} could not be saved for want of memory: --resume goes on from {newest}"
    return f"step {step} is saved, and --resume goes on from there"


def _to_lower_in_rollouts(config: RLConfig) -> str:
    rollout = config.rollout
    budget = rollout.inference_dynamic_batching_buffer_size_gb
    cache = f"--inference-dynamic-batching-buffer-size-gb ({'not given' if budget is None else budget})"
    longest = f"--rl-max-new-tokens ({rollout.rl_max_new_tokens})"
    offload = "" if rollout.rl_offload_optimizer_during_inference else (
        ", or give --rl-offload-optimizer-during-inference"
    )  # fmt: skip
    return f"lower --inference-max-batch-size ({rollout.inference_max_batch_size}), {cache} or {longest}{offload}"


def _to_lower_in_updates(config: RLConfig) -> str:
    training, kernels = config.training, config.kernels
    tokens = f"--rl-sequence-packing-bin-size ({training.rl_sequence_packing_bin_size})"
    if kernels.recompute_granularity == "full":
        more = "use more tensor-parallel ranks"
    else:
        more = "recompute layers with --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    return f"lower {tokens} or --micro-batch-size ({training.micro_batch_size}), or {more}"
