"""Building blocks of model layouts: parameters, linears, caches, blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_rl.families.architecture import Architecture, ExpertShare

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
Stripes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model, and its split over tensor-parallel ranks."""

    name: str
    """megatron's name with global layer and expert numbers: ``decoder.layers.3.mlp.linear_fc1.weight``."""
    shape: tuple[int, ...]
    """Shape over all ranks, including padding."""
    cut: Literal["rows", "columns"] | None = None
    """None: replicated."""
    ranks: int = 1
    blocks: int = 1
    """Number of row blocks of equal height that are split separately: 2 for gate and up projection."""
    stripes: Stripes = ()
    """Hugging Face tensors of the rows, as (name, rows), repeated to the end. Empty: a single tensor.

    Example: with 2 query heads of width 4 per key, ``q_proj`` 8, ``k_proj`` 4, ``v_proj`` 4. A tensor may own two row
    ranges per repeat; it stores all first ranges, then all second ones. Example, 2 repeats of a 2, b 1, a 1: ``a0 a1 b0
    a4``, then ``a2 a3 b1 a5``.
    """
    is_buffer: bool = False
    """Not trained and always fp32, like a router's bias."""
    is_stored_in_fp32: bool = False
    """Stored in fp32 beside bf16 weights. bf16 runs train it in bf16, unless it is a buffer."""

    @property
    def is_over_the_vocabulary(self) -> bool:
        """Whether its rows are tokens (and padding)."""
        return self.name in (EMBEDDING, HEAD) and not self.is_value_head

    @property
    def is_value_head(self) -> bool:
        """Whether it is a critic's head, which is replicated, unlike a vocabulary head."""
        return self.name == HEAD and self.cut is None

    @property
    def is_of_an_expert(self) -> bool:
        """Whether `ranks` are expert-tensor-parallel."""
        return ".experts." in self.name

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on one rank."""
        if self.cut is None:
            return self.shape
        height, *width = self.shape
        return (height // self.ranks, *width) if self.cut == "rows" else (height, width[0] // self.ranks)

    @property
    def size(self) -> int:
        """Number of elements on one rank."""
        return math.prod(self.local_shape)


@dataclass(frozen=True)
class Linear:
    """A parallel linear layer: y = x W^T + b."""

    name: str
    """``layers.0.mlp.linear_fc1``, with a global layer number."""
    kind: Literal["column", "row"]
    """Split dimension: outputs (column), or inputs with summed products (row)."""
    outputs: int
    """Over all ranks, like ``inputs``."""
    inputs: int
    ranks: int = 1
    has_bias: bool = False
    blocks: int = 1
    """Like `stripes`, see `Parameter`."""
    stripes: Stripes = ()

    @property
    def rows(self) -> int:
        """Outputs of one rank."""
        return self.outputs // self.ranks if self.kind == "column" else self.outputs

    @property
    def columns(self) -> int:
        """Inputs of one rank."""
        return self.inputs // self.ranks if self.kind == "row" else self.inputs

    @property
    def parameters(self) -> Iterator[Parameter]:
        """Weight, and bias if any."""
        name, cut = f"decoder.{self.name}", "rows" if self.kind == "column" else "columns"
        shared = self.ranks, self.blocks, self.stripes
        yield Parameter(f"{name}.weight", (self.outputs, self.inputs), cut, *shared)
        if self.has_bias:
            yield Parameter(f"{name}.bias", (self.outputs,), "rows" if self.kind == "column" else None, *shared)


Part = Parameter | Linear


@dataclass(frozen=True)
class LayerCache:
    """A layer's KV cache on one rank. Sliding windows save nothing: all tokens are kept, and masked."""

    heads: int
    key_width: int
    value_width: int
    is_latent: bool = False
    """MLA: a value is the beginning of its key, and not stored again."""

    def state_bytes(self, itemsize: int) -> int:
        """Count the bytes of a sequence's state: none."""
        del itemsize
        return 0

    def numbers(self, tokens: int) -> int:
        """Count the numbers of a sequence of ``tokens``. Example: 2 heads of widths 8 and 8 need 96 for 3 tokens."""
        return tokens * self.heads * (self.key_width + (0 if self.is_latent else self.value_width))


@dataclass(frozen=True)
class StateCache:
    """A layer's state of a sequence on one rank, of fixed size. It cannot be truncated: prompts continue from
    snapshots.
    """

    heads: int
    key_width: int
    value_width: int
    channels: int
    """Channels of the convolution."""
    taps: int
    """Past tokens that the convolution reads."""

    def numbers(self, tokens: int) -> int:
        """Count the numbers per token: none."""
        del tokens
        return 0

    def state_bytes(self, itemsize: int) -> int:
        """Count the bytes of a sequence: a matrix per head in fp32, and inputs of ``itemsize`` bytes.

        Example: 2 heads of 8 x 8 and 3 tokens of 48 channels in bf16 need 2 x 64 x 4 + 3 x 48 x 2 = 800 bytes.
        """
        return 4 * self.heads * self.key_width * self.value_width + itemsize * self.channels * self.taps


@dataclass(frozen=True)
class Block:
    """A mixer or an MLP."""

    parts: Callable[[str, Architecture, int, ExpertShare], Iterator[Part]]
    """(module name like ``layers.0.mlp``, architecture, tensor-parallel ranks, experts) -> parts in megatron's order.
    """
    kept: Callable[[Architecture, int, ExpertShare, bool], int]
    """Numbers per token that a rank stores for the backward pass: see `activation_elements`.

    True: with recomputation of attention between projections, or of the MLP.
    """
    names: Mapping[str, str]
    """megatron's names -> names in Llama's Hugging Face tensors, where they differ."""
    computes: frozenset[str] = frozenset()
    """The fields of `LayerKind` that it supports."""
    cache: Callable[[Architecture, int], LayerCache | StateCache] | None = None
    """Cache of a mixer: (architecture, tensor-parallel ranks)."""
    varies: str | None = None
    """Why its bits on a GPU depend on the rest of a batch; None if they do not, see `--batch-invariant-mode`."""


def norm(name: str, width: int, model: Architecture) -> Iterator[Parameter]:
    """Yield the parameters of a norm."""
    yield Parameter(f"{name}.weight", (width,))
    if model.normalization == "LayerNorm":
        yield Parameter(f"{name}.bias", (width,))
