"""The models that are measured, and what one step of them cannot do without: bytes read, products computed.

Everything here is arithmetic on sizes; bandwidth and peak are measured by ``roofline``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

_SCALE_BYTES = 4


@dataclass(frozen=True)
class ModelShape:
    """A Qwen2.5-like decoder: grouped queries, biased QKV, SwiGLU, RMSNorm."""

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    groups: int
    vocab: int
    tied: bool = False
    """One matrix for the embedding and the head."""
    whole_layers: int = 0
    """Of the model this one was cut from; 0 where nothing was cut."""

    def cut(self, layers: int) -> ModelShape:
        """The same model with fewer layers."""
        return replace(self, layers=layers, whole_layers=self.layers)

    @property
    def whole(self) -> ModelShape:
        """The model this one was cut from, or itself."""
        return replace(self, layers=self.whole_layers or self.layers, whole_layers=0)

    @property
    def head_width(self) -> int:
        """Numbers in a head."""
        return self.hidden // self.heads

    def flags(self) -> list[str]:
        """Of the training command."""
        sizes = {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "ffn-hidden-size": self.ffn,
            "num-attention-heads": self.heads,
            "num-query-groups": self.groups,
            "norm-epsilon": 1e-6,
            "make-vocab-size-divisible-by": 16,
        }
        switches = ["group-query-attention", "swiglu", "disable-bias-linear", "add-qkv-bias"]
        if not self.tied:
            switches.append("untie-embeddings-and-output-weights")
        return [f"--{name}={value}" for name, value in sizes.items()] + [f"--{name}" for name in switches]

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of a layer's four products."""
        attended = self.heads * self.head_width
        return {
            "linear_qkv": (attended + 2 * self.groups * self.head_width, self.hidden),
            "linear_proj": (self.hidden, attended),
            "linear_fc1": (2 * self.ffn, self.hidden),
            "linear_fc2": (self.hidden, self.ffn),
        }

    @property
    def linear_weights(self) -> int:
        """Numbers in the linears of all layers."""
        return self.layers * sum(rows * columns for rows, columns in self.linears.values())

    @property
    def linear_rows(self) -> int:
        """Output channels of all layers' linears: a scale each where they are quantised by row."""
        return self.layers * sum(rows for rows, _ in self.linears.values())

    @property
    def head_weights(self) -> int:
        """Numbers in the output head."""
        return self.vocab * self.hidden

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.groups * self.head_width


SMALL = ModelShape("0.5B", 896, 4864, 24, 14, 2, 151936, tied=True)
MIDDLE = ModelShape("7B", 3584, 18944, 28, 28, 4, 152064)
LARGE = ModelShape("32B", 5120, 27648, 64, 40, 8, 152064)


@dataclass(frozen=True)
class Format:
    """The numbers a rollout computes with. The head stays bf16."""

    name: str
    weight_bytes: int
    kv_bytes: int
    flags: tuple[str, ...] = ()


BF16 = Format("bf16", 2, 2)
FP8 = Format("fp8", 1, 2, ("--rl-rollout-quantization=fp8",))
FP8_KV = Format("fp8 + fp8 KV", 1, 1, (*FP8.flags, "--rl-kv-cache-dtype=fp8"))


def weight_bytes(shape: ModelShape, kind: Format) -> int:
    """Weights read by one decode step, scales included; norms and biases are left out."""
    scales = 0 if kind.weight_bytes == 2 else _SCALE_BYTES * shape.linear_rows
    return shape.linear_weights * kind.weight_bytes + scales + 2 * shape.head_weights


def decode_bytes(shape: ModelShape, kind: Format, batch: int, context: int) -> int:
    """Bytes that a decode step of ``batch`` rows, ``context`` tokens each, has to read."""
    return weight_bytes(shape, kind) + batch * context * shape.kv_numbers * kind.kv_bytes


def roofline_ms(size: int, bandwidth: float | None) -> float | None:
    """Milliseconds to move ``size`` bytes at ``bandwidth`` bytes a second; None where that is not known."""
    return None if bandwidth is None else 1e3 * size / bandwidth


def ratio(measured: float, least: float | None) -> float | None:
    """How many times the least; None where that is not known."""
    return None if least is None else measured / least


def forward_flops(shape: ModelShape, lengths: Iterable[int], *, head: bool) -> int:
    """Multiplications and additions of a forward pass over sequences of these ``lengths``.

    A weight costs 2 a token. Causal attention costs ``length^2 / 2`` products of queries with keys and as many of
    probabilities with values, 2 a number. ``head`` says whether every position gets logits.
    """
    flops = 0
    for length in lengths:
        weights = shape.linear_weights + (shape.head_weights if head else 0)
        flops += 2 * weights * length + 2 * shape.layers * shape.heads * shape.head_width * length**2
    return flops


def training_flops(shape: ModelShape, lengths: Iterable[int]) -> int:
    """Forward and backward: the backward pass differentiates by input and by weight, a product each."""
    return 3 * forward_flops(shape, lengths, head=True)


def utilisation(flops: int, seconds: float, peak: float | None) -> float | None:
    """Share of the measured ``peak`` (flop/s) that was used; None where that is not known."""
    return None if peak is None else flops / seconds / peak
