"""Several corrections as one: ``token_tis+veto``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_rl.algorithms.interfaces import Correction, CorrectionConfig, CorrectionFunction


def compose(parts: Sequence[CorrectionFunction]) -> CorrectionFunction:
    """Each part sees the same log-probs; weights multiply, and ``clipped`` is what any part clipped.

    Args:
        parts: one or more; a single one is returned as it is.
    """
    if len(parts) == 1:
        return parts[0]

    def composed(
        old_logprobs: Tensor,
        inference_logprobs: Tensor,
        loss_mask: Tensor,
        sequence_index: Tensor,
        num_sequences: int,
        config: CorrectionConfig,
    ) -> Correction:
        """Args and result as in ``interfaces.CorrectionFunction``."""
        results = [
            part(old_logprobs, inference_logprobs, loss_mask, sequence_index, num_sequences, config)
            for part in parts
        ]
        weights, clipped = results[0].weights, results[0].clipped
        for result in results[1:]:
            weights, clipped = weights * result.weights, clipped | result.clipped
        return Correction(weights=weights, clipped=clipped)

    return composed
