"""Defaults of a run on a GPU: bins (packed batches) that fill its memory, and the line that says what is on."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules import why_uncaptured
from megatron_rl.run.memory.estimate import estimate
from megatron_rl.run.preflight.starts import run_to_continue

MOST_BIN = 16_384
"""Tokens of a bin; more makes no step faster."""
FILLED = 0.7
"""Share of the free memory that may be planned with: activations are an approximation."""
BIN_FLAGS = {"micro_batch_size", "rl_sequence_packing_bin_size"}


def bin_size(config: RLConfig, world_size: int, vocab_size: int, memory: int) -> int:
    """Return the tokens of a bin on GPUs of ``memory`` bytes.

    The flags come first, then the checkpoint that the run continues from, so that its batches stay the same, then the
    largest bin that fits and leaves every pipeline stage at least one bin of an update.
    """
    training = config.training
    if BIN_FLAGS & set(config.typed) or training.eval_only:
        return training.rl_sequence_packing_bin_size
    if continued := run_to_continue(config):
        from megatron_rl.checkpoint.layout import find_checkpoint
        from megatron_rl.checkpoint.run_state import read_run_state

        settings = read_run_state(find_checkpoint(continued[1], contents=False)).components.get("settings", {})
        if (size := settings.get("rl_sequence_packing_bin_size", 0)) >= training.seq_length:
            return size
    most = training.global_batch_size // config.data_parallel_size(world_size) // config.stages.count
    return training.seq_length * most_sequences(config, world_size, vocab_size, int(memory * FILLED), most)[0]


def most_sequences(config: RLConfig, world_size: int, vocab_size: int, usable: int, most: int) -> tuple[int, int]:
    """Return how many sequences, a power of two up to ``most``, a bin may have in ``usable`` bytes, and what it needs.

    1 where none fits.
    """
    length = config.training.seq_length
    for exponent in reversed(range(max(1, min(most, MOST_BIN // length)).bit_length())):
        found = estimate(config.with_values(rl_sequence_packing_bin_size=length << exponent), world_size, vocab_size)
        needed = max(found.training - found.for_rollouts, found.rollout - found.kv_cache.rollout)
        if needed <= usable:
            break
    return 1 << exponent, needed


def gpu_lines(config: RLConfig, tokens: int) -> Iterator[str]:
    """Say what a run with bins of ``tokens`` has on a GPU, and what fp32 costs there."""
    after = None if why_uncaptured(config) else config.kernels.graphs_after
    training, parts = config.training, list[str]()
    if training.perform_rl_step or training.eval_interval:
        graphs = f"CUDA graphs after {after} decode steps" if after else "CUDA graphs"
        parts.append("no CUDA graphs" if after is None else graphs)
    if not training.eval_only:
        parts.append(f"bins of {tokens:,} tokens")
    parts.append("bf16" if config.precision.bf16 else "fp32")
    yield f"on this GPU: {', '.join(parts)}"
    if not config.precision.bf16:
        yield "note: fp32 GEMMs use no tensor cores, and heads wider than 64 cannot use triton_paged; add --bf16"
