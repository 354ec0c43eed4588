"""What the structure of a model is described in: parameters, linears, what a layer keeps in rollouts, blocks."""

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
    """A parameter of the whole model, and how tensor-parallel ranks share it."""

    name: str
    """As megatron has it, layers and experts counted over all ranks: ``decoder.layers.3.mlp.linear_fc1.weight``."""
    shape: tuple[int, ...]
    """Of all ranks together, padding included."""
    cut: Literal["rows", "columns"] | None = None
    """None: every rank has all of it."""
    ranks: int = 1
    blocks: int = 1
    """The rows are so many blocks of one height, each cut by itself: 2 for gate and up projection."""
    stripes: Stripes = ()
    """The Hugging Face tensors that its rows are of, and how many rows of each, from top to bottom and then again.

    Empty: it is one tensor. Example: with 2 query heads of width 4 to a key, ``q_proj`` 8, ``k_proj`` 4, ``v_proj`` 4.
    A tensor that is named twice has the rows of its first place in all turns before those of its second. Example, 2
    turns of a 2, b 1, a 1: ``a0 a1 b0 a4``, then ``a2 a3 b1 a5``.
    """
    is_buffer: bool = False
    """It is not trained and always fp32, like a router's bias."""
    is_stored_in_fp32: bool = False
    """Files keep it in fp32 beside bf16 weights. A bf16 run trains it in bf16, unless it is a buffer."""

    @property
    def is_over_the_vocabulary(self) -> bool:
        """Its rows are tokens, and padding."""
        return self.name in (EMBEDDING, HEAD) and not self.is_value_head

    @property
    def is_value_head(self) -> bool:
        """Whether it is a critic's head; every tensor-parallel rank has all of it, where logits are always cut."""
        return self.name == HEAD and self.cut is None

    @property
    def is_of_an_expert(self) -> bool:
        """`ranks` are the expert-tensor-parallel ones."""
        return ".experts." in self.name

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what one rank holds."""
        if self.cut is None:
            return self.shape
        height, *width = self.shape
        return (height // self.ranks, *width) if self.cut == "rows" else (height, width[0] // self.ranks)

    @property
    def size(self) -> int:
        """Numbers on one rank."""
        return math.prod(self.local_shape)


@dataclass(frozen=True)
class Linear:
    """A parallel linear layer: y = x W^T + b."""

    name: str
    """``layers.0.mlp.linear_fc1``, layers counted over the whole model."""
    kind: Literal["column", "row"]
    """Which dimension tensor-parallel ranks share: the outputs (column), or the inputs, their products added (row)."""
    outputs: int
    """Of all ranks together, as ``inputs``."""
    inputs: int
    ranks: int = 1
    has_bias: bool = False
    blocks: int = 1
    """As `stripes`, see `Parameter`."""
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
        """Weight, and bias if it has one."""
        name, cut = f"decoder.{self.name}", "rows" if self.kind == "column" else "columns"
        shared = self.ranks, self.blocks, self.stripes
        yield Parameter(f"{name}.weight", (self.outputs, self.inputs), cut, *shared)
        if self.has_bias:
            yield Parameter(f"{name}.bias", (self.outputs,), "rows" if self.kind == "column" else None, *shared)


Part = Parameter | Linear


@dataclass(frozen=True)
class LayerCache:
    """A layer's cache on one rank: the key and the value of each token, head by head.

    A window saves nothing here: all tokens are kept, and masked.
    """

    heads: int
    key_width: int
    value_width: int
    is_latent: bool = False
    """A value is the beginning of its key, and not kept a second time."""

    def state_bytes(self, itemsize: int) -> int:
        """Count the bytes of a sequence beside its tokens: none."""
        del itemsize
        return 0

    def numbers(self, tokens: int) -> int:
        """Count what a sequence of ``tokens`` keeps. Example: 2 heads of 8 and 8 keep 96 numbers of 3 tokens."""
        return tokens * self.heads * (self.key_width + (0 if self.is_latent else self.value_width))


@dataclass(frozen=True)
class StateCache:
    """What a layer with a recurrent state keeps of a sequence on one rank, however long that is.

    A state cannot be cut back to fewer tokens, so prompts continue only from copies of it.
    """

    heads: int
    key_width: int
    value_width: int
    channels: int
    """Of the convolution before it."""
    taps: int
    """Tokens of the past that the convolution still reads."""

    def numbers(self, tokens: int) -> int:
        """Count what tokens keep each: nothing."""
        del tokens
        return 0

    def state_bytes(self, itemsize: int) -> int:
        """Count the bytes of a sequence: a matrix a head in fp32, and inputs of ``itemsize`` bytes each.

        Example: 2 heads of 8 x 8 and 3 tokens of 48 channels in bf16 keep 2 x 64 x 4 + 3 x 48 x 2 = 800 bytes.
        """
        return 4 * self.heads * self.key_width * self.value_width + itemsize * self.channels * self.taps


@dataclass(frozen=True)
class Block:
    """A mixer, or an MLP."""

    parts: Callable[[str, Architecture, int, ExpertShare], Iterator[Part]]
    """In megatron's order, of a module's name (``layers.0.mlp``), tensor-parallel ranks and share of experts."""
    kept: Callable[[Architecture, int, ExpertShare, bool], int]
    """Numbers of a token that a rank keeps for the backward pass: see `activation_elements`.

    True: attention between projections, or the MLP, is computed again.
    """
    names: Mapping[str, str]
    """How Llama's Hugging Face tensors call what megatron calls otherwise."""
    computes: frozenset[str] = frozenset()
    """The fields of `LayerKind` that it takes into account."""
    cache: Callable[[Architecture, int], LayerCache | StateCache] | None = None
    """Of a mixer, on each of so many tensor-parallel ranks."""
    varies: str | None = None
    """Why its bits on a GPU depend on what shares a batch; None if they do not, see `--batch-invariant-mode`."""


def norm(name: str, width: int, model: Architecture) -> Iterator[Parameter]:
    """Yield the parameters of a norm."""
    yield Parameter(f"{name}.weight", (width,))
    if model.normalization == "LayerNorm":
        yield Parameter(f"{name}.bias", (width,))
