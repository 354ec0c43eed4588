"""Weights of Transformer Engine's linears that exist only as fp8 codes: `--fp8-param-gather`.

    built      megatron-core makes codes; bf16 weights replace them, and are filled like those of any model
    trained    the codes are quantised and put back; main parameters start from the bf16 weights, not from codes
    updated    megatron-core quantises its main parameters, and gathers codes
    saved      main parameters rounded to bf16, from which a resumed run makes the same codes; codes are less exact
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes

from megatron_rl.platform.megatron import owned_slice


class Fp8Weights:
    """The fp8 codes of a model, and the bf16 weights that replace them while weights are filled."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """``chunks``: built with codes; afterwards they have uninitialised bf16 weights."""
        modules = (module for gpt in chunks for module in gpt.modules())
        linears = [module for module in modules if is_float8tensor(getattr(module, "weight", None))]
        self._codes: dict[torch.nn.Module, torch.nn.Parameter] = {linear: linear.weight for linear in linears}
        self._optimizer: Any = None
        for codes in self._codes.values():
            codes.clear_high_precision_init_val()  # what memory held
        self._restore_bf16()

    def _restore_bf16(self) -> None:
        for linear, codes in self._codes.items():
            numbers = torch.empty(codes.shape, dtype=codes.dtype, device=codes.device)
            linear.weight = torch.nn.Parameter(numbers)
            copy_tensor_model_parallel_attributes(linear.weight, codes)

    @torch.no_grad()
    def quantize(self) -> None:
        """Quantise the bf16 weights and put the codes back."""
        for linear, codes in self._codes.items():
            codes.copy_(linear.weight)
            first = [linear.weight.detach().cpu()]
            # Transformer Engine's names for the initial values of main parameters, which megatron-core reads.
            codes.get_high_precision_init_val = partial(first.__getitem__, 0)
            codes.clear_high_precision_init_val = first.clear
            linear.weight = codes

    @contextlib.contextmanager
    def bf16_weights(self) -> Iterator[None]:
        """Replace the codes by uninitialised bf16 weights, to be filled inside the context."""
        self._restore_bf16()
        yield
        self.quantize()

    def set_optimizer(self, optimizer: Any) -> None:
        """Set the optimizer, which has the main parameters."""
        self._optimizer = optimizer

    @torch.no_grad()
    def init_main_parameters(self) -> None:
        """Initialise main parameters from the last bf16 weights."""
        for codes in self._codes.values():
            place = owned_slice(self._optimizer, codes)
            if place is not None:
                codes.main_param.copy_(codes.get_high_precision_init_val().view(-1)[place])
            codes.clear_high_precision_init_val()

    @torch.no_grad()
    def main_values(self, codes: torch.nn.Parameter) -> torch.Tensor:
        """Return the main parameters of ``codes``, rounded to bf16, on every rank; collective."""
        whole = torch.zeros(codes.shape, dtype=codes.dtype, device=codes.device)
        place = owned_slice(self._optimizer, codes)
        if place is not None:
            whole.view(-1)[place] = codes.main_param.to(whole.dtype)
        dense, *_ = self._optimizer.chained_optimizers  # then that of experts, who have no codes
        dist.all_reduce(whole.view(torch.uint8), group=dense.data_parallel_group)  # a byte is of one rank
        return whole
