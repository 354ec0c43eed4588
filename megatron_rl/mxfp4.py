"""MXFP4 in safetensors: 4-bit numbers with an exponent for each 32, as gpt-oss publishes its experts.

A stack of matrices X [E, K, N] is two tensors, by columns: ``X_blocks`` [E, N, K / 32, 16], two codes a byte with the
lower half first, and ``X_scales`` [E, N, K / 32], a power of two each. Here a matrix is [N, K], like a linear's weight.
The numbers are those of the OCP's Microscaling Formats, version 1.0; every one of them is exact in bf16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megatron_rl.errors import CheckpointError
from megatron_rl.tensor_files import StoredTensor, TensorEntry

if TYPE_CHECKING:  # headers are read where torch is not wanted
    import torch

    from megatron_rl.tensor_files import TensorReader

MXFP4 = "MXFP4"
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
_BIAS = 127
"""Of an exponent as it is stored."""
_NO_NUMBER = 255
"""The exponent of a block that holds no numbers."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of codes 0 to 7; 8 to 15 are the same with a minus."""


def as_matrices(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a directory, with X of type `MXFP4` in the place of ``X_blocks`` and ``X_scales``."""
    found = dict(stored)
    for name in [name for name in stored if name.endswith(BLOCKS)]:
        whole, (experts, rows, blocks, *_) = name.removesuffix(BLOCKS), (*stored[name].shape, 0, 0, 0)
        scales = stored.get(whole + SCALES)
        fits = scales is not None and stored[name].shape == (*scales.shape, BLOCK // 2)
        if fits and len(scales.shape) == 3 and stored[name].dtype == scales.dtype == "U8":
            del found[name], found[whole + SCALES]
            found[whole] = StoredTensor(MXFP4, (experts, blocks * BLOCK, rows), stored[name].file)
    return found


def entries(name: str, shape: tuple[int, ...]) -> dict[str, TensorEntry]:
    """Return what is stored of X ``name`` [E, K, N]."""
    experts, columns, rows = shape
    scales = (experts, rows, columns // BLOCK)
    return {name + BLOCKS: TensorEntry("U8", (*scales, BLOCK // 2)), name + SCALES: TensorEntry("U8", scales)}


def is_stored(name: str, reader: TensorReader) -> bool:
    """Return whether X ``name`` is there as blocks."""
    return name not in reader.stored and name + BLOCKS in reader.stored


def read(
    reader: TensorReader, name: str, index: int, rows: tuple[int, int], columns: tuple[int, int] | None = None
) -> torch.Tensor:
    """Read rows (and columns, whole blocks) of matrix ``index`` of X ``name``, [rows, K] fp32.

    Raises:
        CheckpointError: a file cannot be read, or a block holds no numbers.
    """
    part = None if columns is None else (columns[0] // BLOCK, columns[1] // BLOCK)
    blocks, scales = (reader.read(name + ending, rows, part, index) for ending in (BLOCKS, SCALES))
    if bool((scales == _NO_NUMBER).any()):
        text = f"{reader.stored[name + SCALES].file}: {name} holds NaN; give a checkpoint that is whole"
        raise CheckpointError(text)
    return decode(blocks, scales)


def decode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Map codes [.., K / 32, 16] and exponents [.., K / 32], uint8, to [.., K] fp32."""
    import torch

    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return torch.ldexp(values[codes.int()], scales[..., None].int() - _BIAS).flatten(-2)


def encode(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map [.., K] to codes and exponents as `decode` takes them: the nearest number, in a tie the even code.

    A block's exponent is that of its largest number by the formats' rule (section 6.3), or one more where that is
    nearer: by the rule alone a largest number of 3.99, whose scale is 1/2, would become 3.
    """
    import torch

    parts = numbers.float().unflatten(-1, (-1, BLOCK))
    exponents = torch.frexp(parts.abs().amax(-1)).exponent - 3  # frexp's of 4, whose scale is 1, is 3
    by_rule, larger = (_encode(parts, (exponents + more).clamp(-_BIAS, _BIAS)) for more in (0, 1))
    errors = [(decode(*each) - numbers).unflatten(-1, (-1, BLOCK)).square().sum(-1) for each in (by_rule, larger)]
    is_nearer = errors[1] < errors[0]
    codes, scales = zip(by_rule, larger, strict=True)
    return torch.where(is_nearer[..., None], *codes[::-1]), torch.where(is_nearer, *scales[::-1])


def _encode(parts: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    scaled = torch.ldexp(parts, -exponents[..., None])
    edges = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(_MAGNITUDES)], device=parts.device)
    edges[1::2] = edges[1::2].nextafter(edges.new_zeros(()))  # a tie goes up where the code above is even
    codes = torch.bucketize(scaled.abs(), edges).to(torch.uint8) | (scaled.signbit().to(torch.uint8) << 3)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + _BIAS).to(torch.uint8)


class Encoder:
    """Encodes stacks matrix by matrix. Blocks whose numbers are still those of ``origin`` keep its bytes."""

    def __init__(self, origin: TensorReader | None) -> None:
        """``origin``: the files that the numbers came from, if they are there."""
        self._origin, self._next = origin, dict[str, int]()
        self.numbers = self.rounded = 0
        """How many were encoded, and how many of them are not what they were."""

    def parts(self, name: str, matrix: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and the next numbers of what is stored of X ``name``, of its next ``matrix`` [N, K]."""
        import torch

        index = self._next.get(name, 0)
        self._next[name] = index + 1
        numbers = matrix.float().contiguous()
        blocks, scales = encode(numbers)
        if self._origin is not None and is_stored(name, self._origin):
            there = [self._origin.read(name + ending, None, None, index) for ending in (BLOCKS, SCALES)]
            same = (decode(*there) == numbers).unflatten(-1, (-1, BLOCK)).all(-1)
            blocks, scales = torch.where(same[..., None], there[0], blocks), torch.where(same, there[1], scales)
        self.numbers += numbers.numel()
        self.rounded += int((decode(blocks, scales) != numbers).sum())
        yield from ((name + BLOCKS, blocks), (name + SCALES, scales))
