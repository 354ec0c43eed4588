"""Weights of Transformer Engine's linears that are fp8 codes and nothing else: `--fp8-param-gather`.

    built      megatron-core makes codes; bf16 weights stand in for them, and are filled like those of any other model
    trained    the codes are quantised and take their places; main parameters begin as the bf16 weights, not as codes
    updated    megatron-core quantises its main parameters, and gathers codes
    saved      main parameters rounded to bf16, of which a run that goes on makes the same codes: codes say less
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

from megatron_rl.platform.megatron import owned_numbers


class Fp8Weights:
    """The codes of a model, and the bf16 weights that stand in for them where a weight is to be filled."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """``chunks`` were built with codes; when this returns they have bf16 weights, as the memory is."""
        modules = (module for gpt in chunks for module in gpt.modules())
        linears = [module for module in modules if is_float8tensor(getattr(module, "weight", None))]
        self._codes: dict[torch.nn.Module, torch.nn.Parameter] = {linear: linear.weight for linear in linears}
        self._optimizer: Any = None
        for codes in self._codes.values():
            codes.clear_high_precision_init_val()  # what memory held
        self._take_out()

    def _take_out(self) -> None:
        for linear, codes in self._codes.items():
            numbers = torch.empty(codes.shape, dtype=codes.dtype, device=codes.device)
            linear.weight = torch.nn.Parameter(numbers)
            copy_tensor_model_parallel_attributes(linear.weight, codes)

    @torch.no_grad()
    def put_in(self) -> None:
        """Quantise the bf16 weights, and put the codes in their places."""
        for linear, codes in self._codes.items():
            codes.copy_(linear.weight)
            first = [linear.weight.detach().cpu()]
            # The names by which Transformer Engine keeps, and megatron-core asks for, what main parameters begin as.
            codes.get_high_precision_init_val = partial(first.__getitem__, 0)
            codes.clear_high_precision_init_val = first.clear
            linear.weight = codes

    @contextlib.contextmanager
    def taken_out(self) -> Iterator[None]:
        """Enter a block in which bf16 weights, all of them to be filled, stand in for the codes again."""
        self._take_out()
        yield
        self.put_in()

    def trained_by(self, optimizer: Any) -> None:
        """Note who has the main parameters."""
        self._optimizer = optimizer

    @torch.no_grad()
    def begin_main_parameters(self) -> None:
        """Make main parameters of the bf16 weights that were put in last."""
        for codes in self._codes.values():
            place = owned_numbers(self._optimizer, codes)
            if place is not None:
                codes.main_param.copy_(codes.get_high_precision_init_val().view(-1)[place])
            codes.clear_high_precision_init_val()

    @torch.no_grad()
    def numbers_of(self, codes: torch.nn.Parameter) -> torch.Tensor:
        """Return the main parameters of ``codes``, rounded to bf16, on every rank; collective."""
        whole = torch.zeros(codes.shape, dtype=codes.dtype, device=codes.device)
        place = owned_numbers(self._optimizer, codes)
        if place is not None:
            whole.view(-1)[place] = codes.main_param.to(whole.dtype)
        dense, *_ = self._optimizer.chained_optimizers  # then that of experts, who have no codes
        dist.all_reduce(whole.view(torch.uint8), group=dense.data_parallel_group)  # a byte is of one rank
        return whole
