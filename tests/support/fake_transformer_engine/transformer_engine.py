"""As much of Transformer Engine as megatron-core builds layers from, in plain torch, for CPUs.

It has the names, the parameters, the shapes it refuses and the caching of fp8 weights of the real one (2.3; of its
grouped linear those that 2.3 and 2.20 share), so that what is around its layers can be tested. Its fp8 rounds
activations and experts to E4M3 with a scale a row, whatever the recipe, and weights as `fake_quantized` does. It says
nothing about the real kernels. Put this folder on ``sys.path`` before megatron-core is imported.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fake_quantized
import torch
import torch.nn.functional as functional
from fake_exchanges import added_up, read_by_all

__version__ = "2.3.0"
__path__: list[str] = []  # a package, whose modules are made below

RECIPES: list[Any] = []
"""Every recipe that ``fp8_autocast`` was entered with."""

GROUPED: list[tuple[bool, tuple[int, ...]]] = []
"""Of every grouped product: whether it was in fp8, and the rows of its parts."""

PADDED: list[int] = []
"""Of every padding: the number of products that it is for."""


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class _Recipe:
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False


class Float8CurrentScaling(_Recipe):
    """A scale a tensor."""


class Float8BlockScaling(_Recipe):
    """Tiles."""


class DelayedScaling(_Recipe):
    """Base class of megatron's."""


class FP8GlobalStateManager:
    depth, recipe = 0, None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.depth > 0


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, fp8_group: Any = None) -> Iterator[None]:
    before, FP8GlobalStateManager.depth = FP8GlobalStateManager.depth, int(enabled)
    FP8GlobalStateManager.recipe = fp8_recipe
    RECIPES.append(fp8_recipe)
    try:
        yield
    finally:
        FP8GlobalStateManager.depth = before


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """To E4M3 and back, with a scale a row: a token's numbers do not depend on its neighbours. The gradient passes."""
    scale = x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return x + ((x.detach() / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale - x.detach())


class _Product(torch.nn.Module):
    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, return_bias: bool, params_dtype: torch.dtype,
        init_method: Any, tp_group: Any, tp_size: int, parallel_mode: str | None, sequence_parallel: bool,
        device: Any, **unused: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert parallel_mode in ("column", "row") and tp_size == tp_group.size()
        is_row, self.parallel_mode = parallel_mode == "row", parallel_mode
        assert (in_features if is_row else out_features) % tp_size == 0, f"{tp_size} ranks"
        self.in_features = in_features // tp_size if is_row else in_features
        self.out_features = out_features if is_row else out_features // tp_size
        self.tp_size, self.tp_group, self.sequence_parallel = tp_size, tp_group, sequence_parallel and tp_size > 1
        self.return_bias, self.use_bias = return_bias, bias
        weight = torch.empty(self.out_features, self.in_features, dtype=params_dtype)
        init_method(weight)
        self.weight = fake_quantized.first_weight(weight)
        vars(self.weight).update(tensor_model_parallel=True, partition_dim=int(is_row), partition_stride=1)
        values = torch.zeros(self.out_features, dtype=params_dtype)
        self.bias = torch.nn.Parameter(values) if bias else torch.Tensor()
        self._kept: torch.Tensor | None = None

    def product(self, x: torch.Tensor, is_first_microbatch: bool | None) -> Any:
        weight = self.weight
        if FP8GlobalStateManager.is_fp8_enabled():
            rows = x.numel() // x.shape[-1]
            assert rows % 8 == 0 and x.shape[-1] % 16 == 0, f"fp8 products of {rows} x {x.shape[-1]}: not padded"
            x = _rounded(x)
        if self.parallel_mode == "column" and self.tp_size > 1:
            x = read_by_all(x, self.tp_group, self.sequence_parallel)
        if FP8GlobalStateManager.is_fp8_enabled():
            out = fake_quantized.Product.apply(x, weight, self._numbers(is_first_microbatch))
        else:
            out = torch.matmul(x, weight.t())
        if self.parallel_mode == "row" and self.tp_size > 1:
            out = added_up(out, self.tp_group, self.sequence_parallel)
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out

    def _numbers(self, is_first_microbatch: bool | None) -> torch.Tensor:
        """What an fp8 product multiplies by."""
        if isinstance(self.weight, fake_quantized.QuantizedTensor):
            return self.weight.dequantize()
        if is_first_microbatch is None or is_first_microbatch or self._kept is None:
            kind = fake_quantized.kind_of(FP8GlobalStateManager.recipe)
            self._kept = kind.of(self.weight.detach()).dequantize()
        return self._kept

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None or state.numel() == 0


class Linear(_Product):
    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self.product(x, is_first_microbatch)


class LayerNormLinear(_Product):
    def __init__(self, in_features: int, out_features: int, *, eps: float, normalization: str, **rest: Any) -> None:
        super().__init__(in_features, out_features, **rest)
        assert normalization == "RMSNorm"
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=rest["params_dtype"]))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = functional.rms_norm(x, (self.in_features,), self.layer_norm_weight, self.eps)
        return self.product(normed, is_first_microbatch)


class RMSNorm(torch.nn.Module):
    def __init__(
        self, normalized_shape: int | None = None, eps: float = 1e-5, sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None, zero_centered_gamma: bool = False, hidden_size: int | None = None,
        **unused: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps = eps
        # megatron-core 0.16.1 gives the old name, 0.19.2 the new one.
        width = hidden_size if normalized_shape is None else normalized_shape
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class GroupedLinear(torch.nn.Module):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Any = None, rng_tracker_name: str | None = None, init_method: Any = None,
        bias: bool = True, return_bias: bool = False, params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None, device: Any = "cuda", ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False, ub_name: str | None = None, delay_wgrad_compute: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        assert not bias and tp_size == 1, "the fake has no biases, and takes experts as they are cut"
        self.num_gemms, self.in_features = num_gemms, in_features
        for number in range(num_gemms):
            values = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{number}", torch.nn.Parameter(values))
            torch.nn.init.normal_(values) if init_method is None else init_method(values)
        self._kept: list[torch.Tensor] = []

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> torch.Tensor:
        assert len(m_splits) == self.num_gemms and sum(m_splits) == len(inp)
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        GROUPED.append((FP8GlobalStateManager.is_fp8_enabled(), tuple(m_splits)))
        if FP8GlobalStateManager.is_fp8_enabled():
            assert not any(rows % 16 for rows in m_splits) and inp.shape[-1] % 16 == 0, f"fp8 of {m_splits}: not padded"
            if is_first_microbatch is None or is_first_microbatch or not self._kept:
                self._kept = [_rounded(weight) for weight in weights]
            inp, weights = _rounded(inp), self._kept
        return torch.cat([rows @ weight.t() for rows, weight in zip(inp.split(m_splits), weights, strict=True)])


class Fp8Padding(torch.nn.Module):
    """The rows of each product to multiples of 16."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        assert len(m_splits) == self.num_gemms and FP8GlobalStateManager.is_fp8_enabled()
        PADDED.append(self.num_gemms)
        padded = [-(-rows // 16) * 16 for rows in m_splits]
        parts = zip(inp.split(m_splits), m_splits, padded, strict=True)
        return torch.cat([functional.pad(part, (0, 0, 0, more - rows)) for part, rows, more in parts]), padded


class Fp8Unpadding(Fp8Padding):
    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        padded = [-(-rows // 16) * 16 for rows in m_splits]
        return torch.cat([part[:rows] for part, rows in zip(inp.split(padded), m_splits, strict=True)])


class _Absent(torch.nn.Module):
    """A base class that nobody here makes an object of."""


def _module(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(f"{__name__}.{name}")
    vars(module).update(content, __path__=[])
    sys.modules[module.__name__] = module
    return module


common = _module(
    "common",
    recipe=_module(
        "common.recipe",
        Format=Format,
        DelayedScaling=DelayedScaling,
        Float8CurrentScaling=Float8CurrentScaling,
        Float8BlockScaling=Float8BlockScaling,
    ),
)
pytorch = _module(
    "pytorch",
    Linear=Linear,
    LayerNormLinear=LayerNormLinear,
    GroupedLinear=GroupedLinear,
    DotProductAttention=_Absent,
    RMSNorm=RMSNorm,
    LayerNorm=_Absent,
    Fp8Padding=Fp8Padding,
    Fp8Unpadding=Fp8Unpadding,
    fp8_autocast=fp8_autocast,
    fp8_model_init=fake_quantized.fp8_model_init,
    fp8=_module(
        "pytorch.fp8",
        FP8GlobalStateManager=FP8GlobalStateManager,
        fp8_autocast=fp8_autocast,
        fp8_model_init=fake_quantized.fp8_model_init,
    ),
    distributed=_module(
        "pytorch.distributed", CudaRNGStatesTracker=object, activation_recompute_forward=_Absent
    ),
    ops=_module("pytorch.ops", Sequential=_Absent, FusibleOperation=_Absent),
    tensor=_module(
        "pytorch.tensor",
        QuantizedTensor=fake_quantized.QuantizedTensor,
        utils=_module(
            "pytorch.tensor.utils",
            replace_raw_data=fake_quantized.replace_raw_data,
            cast_master_weights_to_fp8=fake_quantized.cast_master_weights_to_fp8,
            post_all_gather_processing=fake_quantized.post_all_gather_processing,
        ),
    ),
)
