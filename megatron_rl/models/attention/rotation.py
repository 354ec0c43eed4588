"""Rotary embedding tables of a model, including YaRN."""

from __future__ import annotations

import math

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_rl.families import Architecture
from megatron_rl.models.attention.plan import Ropes, RopeTable


def rope_tables(model: Architecture, reach: int, on_cpu: bool) -> Ropes:
    """Return the table of each rotation for ``reach`` positions."""
    ropes = {}
    for name, arguments in model.rotations.items():
        scaling, amplitude = arguments.pop("yarn", None), 1.0
        embedding = RotaryEmbedding(**arguments, use_cpu_initialization=on_cpu)
        if scaling is not None:  # megatron's own class rotates whole heads alone, and needs CUDA
            plain = embedding.inv_freq
            embedding.inv_freq, amplitude = yarn_rotation(
                2 * len(plain), arguments["rotary_base"], **scaling, device=plain.device
            )
        ropes[name] = RopeTable(embedding, reach, amplitude)
    return ropes


def yarn_rotation(
    width: int,
    base: float,
    *,
    rotary_scaling_factor: float,
    original_max_position_embeddings: int,
    beta_fast: float,
    beta_slow: float,
    mscale: float,
    mscale_all_dim: float,
    correction_range_round_to_int: bool,
    device: torch.device,
) -> tuple[torch.Tensor, float]:
    """Return YaRN's angles per position, fp32 [width / 2], for ``width`` rotated dimensions, and the factor of cos and
    sin.

    YaRN (arXiv:2309.00071, sections 3.2 to 3.4): high frequencies stay, low ones are divided by the scaling factor,
    those in between are interpolated; the factor of cos and sin sharpens scores. Arguments are flags. Operations are in
    the order of transformers, so the angles are bit-identical.
    """
    positions, factor = original_max_position_embeddings, rotary_scaling_factor

    def border(turns: float) -> float:
        """Return the pair index whose frequency makes ``turns`` rotations in the original context."""
        return width * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = border(beta_fast), border(beta_slow)
    if correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    periods = base ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    pairs = torch.arange(width // 2, dtype=torch.float32, device=device)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    angles = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    return angles, _gain(factor, mscale) / _gain(factor, mscale_all_dim)


def _gain(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
