"""Weights that are fp8 codes and scales, as in Transformer Engine 2.20, in plain torch; see `transformer_engine`.

The arithmetic is written out here and shares nothing with the library: it is what the library is compared with.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional

_BLOCK = 128


class Initialisation:
    """What `fp8_model_init` asks for at the moment."""

    recipe: Any = None
    keeps_first_values = False


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    before = Initialisation.recipe, Initialisation.keeps_first_values
    Initialisation.recipe = recipe if enabled else None
    Initialisation.keeps_first_values = preserve_high_precision_init_val
    try:
        yield
    finally:
        Initialisation.recipe, Initialisation.keeps_first_values = before


class QuantizedTensor(torch.Tensor):
    """Codes [N, K] uint8 with a scale a tile; to operations it is bf16, and each reads the dequantised numbers."""

    turned: bool
    """Whether the transposed codes, which the real one has for the backward pass, are of these codes."""
    block: int | None = None
    """Numbers a side of a tile; None: the tensor is one."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> QuantizedTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )
        made.codes, made.scale_inv, made.turned = codes, scale_inv, True
        return made

    @classmethod
    def of(cls, values: torch.Tensor) -> QuantizedTensor:
        tiles = [-(-size // (cls.block or size)) for size in values.shape]
        made = cls(torch.zeros(values.shape, dtype=torch.uint8), torch.ones(tiles), values.dtype)
        return made.quantize_(values)

    def quantize_(self, values: torch.Tensor) -> QuantizedTensor:
        assert values.shape == self.shape
        amax = self.largest(values.detach().float().flatten(), 0)
        self.write(values.detach().float().flatten(), 0, amax)
        self.turned = True
        return self

    def tiles_of(self, start: int, stop: int) -> torch.Tensor:
        """The tile, counted over the tensor, of each number of a flat part."""
        return _tiles(tuple(self.shape), self.block)[start:stop]

    def largest(self, part: torch.Tensor, start: int) -> torch.Tensor:
        """By tile, the largest magnitude in a flat part; 0 in tiles that have none of it."""
        amax = torch.zeros(self.scale_inv.numel())
        return amax.scatter_reduce_(0, self.tiles_of(start, start + len(part)), part.abs(), "amax")

    def write(self, part: torch.Tensor, start: int, amax: torch.Tensor) -> None:
        """Scales of all tiles, and the codes of a flat part."""
        scale_inv = torch.where(amax > 0, amax / 448, torch.ones_like(amax))
        if self.block is not None:
            scale_inv = torch.exp2(torch.log2(scale_inv.double()).ceil()).float()
        self.scale_inv.copy_(scale_inv.view_as(self.scale_inv))
        divisors = scale_inv[self.tiles_of(start, start + len(part))]
        codes = (part / divisors).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        self.codes.view(-1)[start : start + len(part)].copy_(codes)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        spread = self.scale_inv.flatten()[self.tiles_of(0, self.codes.numel())].view(self.codes.shape)
        return (self.codes.view(torch.float8_e4m3fn).float() * spread).to(dtype or self.dtype)

    def detach(self) -> QuantizedTensor:
        return type(self)(self.codes, self.scale_inv, self.dtype)

    def float(self) -> torch.Tensor:
        return self.dequantize(dtype=torch.float32)

    def get_data_tensors(self) -> tuple[torch.Tensor, None]:
        return self.codes, None

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0)

    def data_ptr(self) -> int:
        raise RuntimeError("a quantised tensor has no storage of its own")

    def _set_data(self, values: torch.Tensor) -> None:
        self.quantize_(values)

    data = property(lambda self: self, _set_data)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.ops.aten.detach.default:
            return args[0].detach()
        if func == torch.ops.aten.copy_.default and isinstance(args[0], QuantizedTensor):
            return args[0].quantize_(_plain(args[1]))
        if func == torch.ops.aten.view.default:
            raise NotImplementedError("views of a quantised tensor")
        assert not func._schema.is_mutable or not isinstance(args[0], QuantizedTensor), f"{func} on codes"
        flat, tree = torch.utils._pytree.tree_flatten((tuple(args), kwargs))
        args, kwargs = torch.utils._pytree.tree_unflatten([_plain(each) for each in flat], tree)
        return func(*args, **kwargs)


@functools.cache
def _tiles(shape: tuple[int, int], block: int | None) -> torch.Tensor:
    rows, columns = (torch.arange(size) // (block or size) for size in shape)
    return (rows[:, None] * (int(columns[-1]) + 1) + columns).flatten()


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


class Float8Tensor(QuantizedTensor):
    """One scale."""


class Float8BlockwiseQTensor(QuantizedTensor):
    """A power of two a tile."""

    block = _BLOCK


def kind_of(recipe: Any) -> type[QuantizedTensor]:
    return Float8BlockwiseQTensor if type(recipe).__name__ == "Float8BlockScaling" else Float8Tensor


def first_weight(values: torch.Tensor) -> torch.nn.Parameter:
    """Of a layer made inside `fp8_model_init` codes, and outside ``values``."""
    if Initialisation.recipe is None:
        return torch.nn.Parameter(values)
    weight = torch.nn.Parameter(kind_of(Initialisation.recipe).of(values))
    if Initialisation.keeps_first_values:
        weight.get_high_precision_init_val = lambda: values
        weight.clear_high_precision_init_val = lambda: vars(weight).pop("get_high_precision_init_val", None)
    return weight


class Product(torch.autograd.Function):
    """A product of the numbers that codes mean, whose gradient goes to the codes' parameter, or to bf16 weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, numbers)
        ctx.weight = weight
        return functional.linear(x, numbers)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, numbers = ctx.saved_tensors
        assert getattr(ctx.weight, "turned", True), "the backward pass would multiply by codes of before the update"
        return gradient @ numbers, gradient.flatten(0, -2).t() @ x.flatten(0, -2), None


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: torch.Tensor) -> None:
    assert new_raw_data.dtype == torch.uint8
    new_raw_data.detach().copy_(tensor.codes)
    tensor.codes = new_raw_data


def cast_master_weights_to_fp8(
    model_weights: Sequence[QuantizedTensor], master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None], group: dist.ProcessGroup, fsdp_shard_model_weights: Any = None,
    manual_post_all_gather_processing: bool = False,
) -> None:  # fmt: skip
    """Master weights are rounded to the nominal dtype first, as by the real one."""
    parts = [
        None if part is None else part.to(w.dtype).float()
        for w, part in zip(model_weights, master_weights, strict=True)
    ]
    given = list(zip(model_weights, parts, start_offsets, strict=True))
    amaxes = [
        torch.zeros(weight.scale_inv.numel()) if part is None else weight.largest(part, start)
        for weight, part, start in given
    ]
    packed = torch.cat(amaxes)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
    for weight in model_weights:
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()
    for (weight, part, start), amax in zip(given, packed.split([len(each) for each in amaxes]), strict=True):
        nothing = part is None
        weight.turned = not manual_post_all_gather_processing
        weight.write(packed.new_empty(0) if nothing else part, 0 if nothing else start, amax)


def post_all_gather_processing(model_weights: Sequence[QuantizedTensor]) -> None:
    for weight in model_weights:
        weight.turned = True
