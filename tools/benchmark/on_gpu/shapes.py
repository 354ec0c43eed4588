"""The models that are measured, and what one step of them cannot do without: bytes read, products computed.

Everything here is arithmetic on sizes; bandwidth and peak are measured by ``roofline``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tools.benchmark.common import Shape

_SCALE_BYTES = 4


SMALL = Shape("0.5B", 896, 4864, 24, 14, 2, 151936, tied=True)
MIDDLE = Shape("7B", 3584, 18944, 28, 28, 4, 152064)
LARGE = Shape("32B", 5120, 27648, 64, 40, 8, 152064)


@dataclass(frozen=True)
class ExpertShape(Shape):
    """A Qwen3-like decoder: experts in every layer, ``ffn`` wide each, normed heads, no biases."""

    experts: int = 128
    active: int = 8
    """A token is sent to."""
    head_width: int = 128

    def flags(self) -> list[str]:
        """Of the training command."""
        sizes = {"num-experts": self.experts, "moe-router-topk": self.active, "moe-ffn-hidden-size": self.ffn,
                 "kv-channels": self.head_width}  # fmt: skip
        plain = [flag for flag in super().flags() if flag != "--add-qkv-bias"]
        return [*plain, *(f"--{name}={size}" for name, size in sizes.items()), "--qk-layernorm"]


EXPERTS = ExpertShape("30B-A3B", 2048, 768, 48, 32, 4, 151936)


@dataclass(frozen=True)
class Format:
    """The numbers a rollout computes with. The head stays bf16."""

    name: str
    weight_bytes: int
    kv_bytes: int
    flags: tuple[str, ...] = ()


BF16 = Format("bf16", 2, 2)
FP8 = Format("fp8", 1, 2, ("--rl-rollout-quantization=fp8",))
INT8 = Format("int8", 1, 2, ("--rl-rollout-quantization=int8",))
FP8_KV = Format("fp8 + fp8 KV", 1, 1, (*FP8.flags, "--rl-kv-cache-dtype=fp8"))


def weight_bytes(shape: Shape, kind: Format, rows: int | None = None) -> int:
    """Weights read by a decode step of ``rows``, None: all; scales are included, norms, biases, routers left out."""
    scales = 0 if kind.weight_bytes == 2 else _SCALE_BYTES
    read = 0.0
    for linear in shape.layout.linears:
        share = share_of_experts(shape, rows) if ".experts." in linear.name else 1.0
        read += share * linear.outputs * (linear.inputs * kind.weight_bytes + scales)
    return round(read) + 2 * shape.head_weights


def share_of_experts(shape: Shape, rows: int | None) -> float:
    """Share of the experts that ``rows`` tokens come to, if routers send them anywhere alike; None: all."""
    if not isinstance(shape, ExpertShape) or rows is None:
        return 1.0
    return 1 - (1 - shape.active / shape.experts) ** rows


def decode_bytes(shape: Shape, kind: Format, batch: int, context: int) -> int:
    """Bytes that a decode step of ``batch`` rows, ``context`` tokens each, has to read."""
    return weight_bytes(shape, kind, batch) + batch * shape.layout.cache_numbers(context) * kind.kv_bytes


def roofline_ms(size: int, bandwidth: float | None) -> float | None:
    """Milliseconds to move ``size`` bytes at ``bandwidth`` bytes a second; None where that is not known."""
    return None if bandwidth is None else 1e3 * size / bandwidth


def ratio(measured: float, least: float | None) -> float | None:
    """How many times the least; None where that is not known."""
    return None if least is None else measured / least


def forward_flops(shape: Shape, lengths: Iterable[int], *, head: bool) -> int:
    """Multiplications and additions of a forward pass over sequences of these ``lengths``.

    A weight costs 2 a token. Causal attention costs ``length^2 / 2`` products of queries with keys and as many of
    probabilities with values, 2 a number; a layer's queries are as wide as the model. ``head`` says whether every
    position gets logits.
    """
    flops = 0
    for length in lengths:
        weights = shape.linear_weights + (shape.head_weights if head else 0)
        flops += 2 * weights * length + 2 * shape.layers * shape.hidden * length**2
    return flops


def training_flops(shape: Shape, lengths: Iterable[int]) -> int:
    """Forward and backward: the backward pass differentiates by input and by weight, a product each."""
    return 3 * forward_flops(shape, lengths, head=True)


def utilisation(flops: int, seconds: float, peak: float | None) -> float | None:
    """Share of the measured ``peak`` (flop/s) that was used; None where that is not known."""
    return None if peak is None else flops / seconds / peak
