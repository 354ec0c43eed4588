"""Sizes that are legal one by one, and together more than any machine has."""

from __future__ import annotations

from megatron_rl.config import RLConfig
from megatron_rl.estimate.memory import Estimate, estimate, slot_bytes

MOST_BYTES = 4 * 2**40
"""Of one rank. Beyond the memory of any device there is, and of all but a few hosts."""

_MODEL = "use a smaller model or more ranks"
_BIN = "lower --seq-length or --rl-sequence-packing-bin-size"


def size_problems(config: RLConfig, world_size: int) -> list[str]:
    """What fits no machine at all; a device's own memory is the run's to find out.

    For a configuration without other problems. The KV cache counts with one sequence: it takes what is there.
    The tokenizer's vocabulary does not count unless `--vocab-size` says it: reading it takes longer than it matters.
    """
    result = estimate(config, world_size, config.tokenizer.vocab_size or 1)
    uses = {
        "weights, gradients and optimizer state": (_state(result), _MODEL),
        "activations of one bin": (result.activations, _BIN),
        "logits of one bin": (result.training_logits, _BIN),
    }
    if result.cache_slots:
        uses["the KV cache of one sequence"] = (slot_bytes(config), "lower --inference-max-seq-length")
    return [
        f"{use} take {size / 2**40:,.1f} TiB on each rank, which is more than any machine has; {advice}"
        for use, (size, advice) in uses.items()
        if size > MOST_BYTES
    ]


def _state(result: Estimate) -> int:
    return result.weights + result.gradients + result.optimizer + result.quantized
