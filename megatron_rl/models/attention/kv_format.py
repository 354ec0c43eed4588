"""What the KV cache stores: the model's numbers, bf16, or E4M3 codes with a scale a layer and KV head.

Whatever attends in a rollout attends to what the cache would give back, prompts included, so a completion does not
depend on how its prompt was cut into chunks, and the trainer can repeat the rounding (`rounded_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from megatron_rl.models import changed
from megatron_rl.quantization.formats import FP8, FP8_MAX, fp8_codes, fp8_numbers, power_of_two

MARGIN = 4.0
"""Later tokens may be this much larger than the largest number of the first prompts before they are clamped."""
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60


class KVFormat:
    """The number format of one cache. E4M3 codes lie in uint8 tensors, which torch moves on every device.

    Scales are powers of two: they move the exponent and leave the digits, so which prompts set them matters for
    numbers that are too large (clamped) or below about 1/3500 of the largest (fewer digits), and for no others.
    They are set once a rollout and updated in place, so captured graphs see them.
    """

    def __init__(
        self, layers: int, groups: int, dtype: torch.dtype, stored: torch.dtype | None, device: torch.device
    ) -> None:
        """``dtype`` of the model's activations; ``stored``: None is the same, else bf16 or E4M3."""
        self.dtype = dtype
        self.stored = stored or dtype
        self.storage = torch.uint8 if self.stored == FP8 else self.stored
        """The dtype of the cache's tensors."""
        self.key_scales, self.value_scales = (
            torch.ones(layers, groups, device=device) if self.stored == FP8 else None for _ in range(2)
        )
        """[layers, groups] fp32; None unless codes are stored."""
        self._due = [True] * layers

    def scales(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return [groups] fp32 of keys and of values; empty unless codes are stored."""
        return () if self.key_scales is None else (self.key_scales[layer], self.value_scales[layer])

    def begin(self) -> None:
        """Begin a rollout: the next prompts set the scales."""
        self._due = [True] * len(self._due)

    def calibrate(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Set a layer's scales by the first prompts of a rollout, ``[T, 1, groups, D]``; later ones change nothing."""
        if self.key_scales is None or not self._due[layer]:
            return
        self._due[layer] = False
        for scales, numbers in zip(self.scales(layer), (key, value), strict=True):
            scales.copy_(_scales_of(numbers))

    def pack(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[T, 1, groups, D]`` as the cache stores them."""
        if self.key_scales is None:
            return key.to(self.stored), value.to(self.stored)
        key_scales, value_scales = (scales[:, None] for scales in self.scales(layer))
        return fp8_codes(key, key_scales).view(torch.uint8), fp8_codes(value, value_scales).view(torch.uint8)

    def unpack(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what was stored, ``[N, groups, K, D]``, as numbers of the model's dtype."""
        if self.key_scales is None:
            return keys.to(self.dtype), values.to(self.dtype)
        key_scales, value_scales = self.scales(layer)
        return _decoded(keys, key_scales, self.dtype), _decoded(values, value_scales, self.dtype)

    def round_trip(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[T, 1, groups, D]`` written and read again."""
        if self.stored == self.dtype:
            return key, value
        rows = self.pack(layer, key, value)
        keys, values = self.unpack(layer, *(row.transpose(1, 2) for row in rows))
        return keys.transpose(1, 2), values.transpose(1, 2)


def rounded_attention(layers: Sequence[torch.nn.Module], kv_format: KVFormat) -> AbstractContextManager[None]:
    """Enter a block in which ``layers`` round keys and values in packed batches as a rollout does."""
    rounding = {layer.self_attention: partial(kv_format.round_trip, index) for index, layer in enumerate(layers)}
    return changed("kv_rounding", rounding)


def _scales_of(numbers: torch.Tensor) -> torch.Tensor:
    """[T, 1, groups, D] -> [groups] fp32: the power of two that leaves room for `MARGIN` times the largest."""
    largest = numbers.float().abs().amax((0, 1, 3)).nan_to_num(nan=1.0)
    return power_of_two((largest * (MARGIN / FP8_MAX)).clamp(_SMALLEST, _LARGEST))


def _decoded(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[N, groups, K, D] and [groups]; exact in bf16: a code has four digits and the scale none."""
    return fp8_numbers(codes.view(FP8), dtype).mul_(scales[:, None, None].to(dtype))
