"""pass@k: the chance that at least one of k answers to a task is right, estimated from n >= k answers."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pass_at_k(num_samples: ArrayLike, num_correct: ArrayLike, k: int) -> NDArray[np.float64]:
    """``1 - C(n - c, k) / C(n, k)``, the unbiased estimate of Chen et al., arXiv 2107.03374, eq. 1.

    Taken as the product of ``(n - c - i) / (n - i)`` over i < k: the binomials overflow fp64 at n = 1030.

    Args:
        num_samples: n, answers drawn, an integer or one per task; k at least.
        num_correct: c, right ones among them.
        k: attempts granted, the same for all tasks.

    Returns:
        fp64 of the broadcast shape, in [0, 1].
    """
    samples, wrong = np.asarray(num_samples), np.subtract(num_samples, num_correct)
    drawn = np.arange(k)
    # With fewer than k wrong answers one factor is exactly 0, and so is the chance of missing.
    return 1.0 - np.prod((wrong[..., None] - drawn) / (samples[..., None] - drawn), axis=-1)
