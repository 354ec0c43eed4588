"""Number formats of the KV cache: the model's dtype, bf16, or E4M3 codes with a scale per layer and KV head.

All rollout attention, also of prompts, uses keys and values as the cache would return them. So a completion does not
depend on how its prompt was chunked, and the trainer can repeat the rounding (`rounded_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from megatron_rl.models import override
from megatron_rl.quantization.formats import FP8, FP8_MAX, fp8_codes, fp8_numbers, power_of_two

MARGIN = 4.0
"""Headroom: later tokens may be this much larger than the first prompts' maximum before they are clamped."""
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60


class KVFormat:
    """The number format of one cache. E4M3 codes are stored as uint8, which torch can copy and index on every device.

    Scales are powers of two, which change only the exponent. So the calibration prompts matter only for numbers that
    are too large (clamped) or below about 1/3500 of the largest (fewer digits). Scales are set once per rollout, in
    place, so captured graphs see them.
    """

    def __init__(
        self, layers: int, groups: int, dtype: torch.dtype, stored: torch.dtype | None, device: torch.device
    ) -> None:
        """``dtype``: of activations; ``stored``: bf16 or E4M3; None: ``dtype``."""
        self.dtype = dtype
        self.stored = stored or dtype
        self.storage = torch.uint8 if self.stored == FP8 else self.stored
        """The dtype of the cache's tensors."""
        self.key_scales, self.value_scales = (
            torch.ones(layers, groups, device=device) if self.stored == FP8 else None for _ in range(2)
        )
        """[layers, groups] fp32; None unless E4M3."""
        self._due = [True] * layers

    def scales(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the scales of keys and of values, [groups] fp32 each; empty unless E4M3."""
        return () if self.key_scales is None else (self.key_scales[layer], self.value_scales[layer])

    def begin(self) -> None:
        """Start a rollout: the next prompts set the scales."""
        self._due = [True] * len(self._due)

    def calibrate(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Set a layer's scales from the first prompts of a rollout, ``[T, 1, groups, D]``; later calls do nothing."""
        if self.key_scales is None or not self._due[layer]:
            return
        self._due[layer] = False
        for scales, numbers in zip(self.scales(layer), (key, value), strict=True):
            scales.copy_(_scales_of(numbers))

    def pack(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert ``[T, 1, groups, D]`` to the cache's format."""
        if self.key_scales is None:
            return key.to(self.stored), value.to(self.stored)
        key_scales, value_scales = (scales[:, None] for scales in self.scales(layer))
        return fp8_codes(key, key_scales).view(torch.uint8), fp8_codes(value, value_scales).view(torch.uint8)

    def unpack(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert cached ``[N, groups, K, D]`` to the model's dtype."""
        if self.key_scales is None:
            return keys.to(self.dtype), values.to(self.dtype)
        key_scales, value_scales = self.scales(layer)
        return _decoded(keys, key_scales, self.dtype), _decoded(values, value_scales, self.dtype)

    def round_trip(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[T, 1, groups, D]`` with the rounding of the cache."""
        if self.stored == self.dtype:
            return key, value
        rows = self.pack(layer, key, value)
        keys, values = self.unpack(layer, *(row.transpose(1, 2) for row in rows))
        return keys.transpose(1, 2), values.transpose(1, 2)


def rounded_attention(layers: Sequence[torch.nn.Module], kv_format: KVFormat) -> AbstractContextManager[None]:
    """Make ``layers`` round keys and values of packed batches like the KV cache, inside the context."""
    rounding = {layer.self_attention: partial(kv_format.round_trip, index) for index, layer in enumerate(layers)}
    return override("kv_rounding", rounding)


def _scales_of(numbers: torch.Tensor) -> torch.Tensor:
    """Map [T, 1, groups, D] to scales [groups] fp32: powers of two with room for `MARGIN` times the largest number."""
    largest = numbers.float().abs().amax((0, 1, 3)).nan_to_num(nan=1.0)
    return power_of_two((largest * (MARGIN / FP8_MAX)).clamp(_SMALLEST, _LARGEST))


def _decoded(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode [N, groups, K, D] with ``scales`` [groups]; exact in bf16, as the scales are powers of two."""
    return fp8_numbers(codes.view(FP8), dtype).mul_(scales[:, None, None].to(dtype))
