"""When memory runs out: which phase it was, and what to lower."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator
from typing import Literal

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import MemoryExhausted
from megatron_rl.platform.device import OutOfMemoryOnAllRanks, is_out_of_memory, reason_of

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
        raise MemoryExhausted(text, on_all_ranks=isinstance(error, OutOfMemoryOnAllRanks)) from None


def _to_lower_in_rollouts(config: RLConfig) -> str:
    rollout = config.rollout
    budget, share = rollout.inference_dynamic_batching_buffer_size_gb, rollout.rl_rollout_memory_fraction
    cache = f"--inference-dynamic-batching-buffer-size-gb ({'not given' if budget is None else budget})"
    if share is not None:
        cache = f"--rl-rollout-memory-fraction ({share:g})"
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
