"""The frozen reference policy of the KL penalty, without a second model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron_rl.models import PolicyModel
from megatron_rl.quantization.rollout import RolloutQuantization


class ReferencePolicy:
    """A host copy of the weights at the start of the run, swapped in for the reference pass.

    Values move, storage does not: optimizer buffers and captured graphs keep pointing at the
    parameters. While the reference is in, the policy's own values wait on the host, and they come
    back bit for bit.
    """

    def __init__(self, policy: PolicyModel, copies: RolloutQuantization | None = None) -> None:
        """``copies`` of the weights hear of every exchange: aligned training runs on them."""
        self._copies = copies
        self._parameters = list(policy.gpt.parameters())
        self._frozen = [_host_copy(parameter) for parameter in self._parameters]

    @contextlib.contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """The model holds the reference weights inside the ``with`` block."""
        own = [_host_copy(parameter) for parameter in self._parameters]
        self._write(self._frozen)
        try:
            yield
        finally:
            self._write(own)

    def _write(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data.copy_(value)
        if self._copies is not None:
            self._copies.weights_changed()


def _host_copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to("cpu", copy=True)
