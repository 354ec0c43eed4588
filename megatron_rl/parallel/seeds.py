"""Random-number seeds of a rank."""

from __future__ import annotations

import random

import numpy
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and megatron's tensor-parallel generators.

    Every rank gets the same seed: replicated weights must start equal, and weights made on the
    CPU are cut from one master weight. megatron's tracker adds the tensor-parallel offset itself.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
