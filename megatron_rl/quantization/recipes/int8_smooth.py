"""INT8 with SmoothQuant (https://arxiv.org/abs/2211.10438): outlier channels move from activations to weights."""

from __future__ import annotations

from megatron_rl.quantization.recipes.int8 import Int8


class Int8Smooth(Int8):
    """Activations of channel j are divided by ``sqrt(max|x_j| / max|w_j|)``, weights multiplied by it.

    The factors come from a calibration before the first rollout; until then they are 1, as in ``int8``.
    """

    name = "int8_smooth"
    format = "int8, channel x token, smoothed"
    safer = "none"
    needs_calibration = True


RECIPE = Int8Smooth()
