"""Dr. GRPO: reward minus the group's mean, not divided by its standard deviation (arXiv 2503.20783).

Dividing by the standard deviation gives tasks that are nearly always or nearly never solved more weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import Extension, Terms, TokenBatch
from megatron_rl.algorithms.groups import group_statistics


@dataclass(frozen=True, kw_only=True)
class Advantage(Extension):
    """``r - mean`` over the valid samples of the group."""

    def __call__(self, batch: TokenBatch) -> Terms:
        return batch.of_samples(group_statistics(batch.step).centred), {}
