"""The frozen reference policy of the KL penalty, without a second model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from megatron_rl.models import PolicyModel


class ReferencePolicy:
    """A host copy of the weights at the start of the run, swapped in for the reference pass.

    Values move, storage does not: optimizer buffers and captured graphs keep pointing at the
    parameters. While the reference is in, the policy's own values wait on the host, and they come
    back bit for bit.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self._parameters = list(policy.gpt.parameters())
        self._frozen = [_host_copy(parameter) for parameter in self._parameters]
        self.on_swap: list[Callable[[], None]] = []
        """Called after every exchange of weights: whoever trains on something made of them."""

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
        for notify in self.on_swap:
            notify()


def _host_copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to("cpu", copy=True)
