"""What really goes into and comes out of the linear layers: for calibration and for the audit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_rl.quantization.linears import parallel_linears

AUDITED_TOKENS = 64


@dataclass
class Observation:
    """One layer's traffic."""

    calls: int = 0
    channel_amax: torch.Tensor | None = None
    """[K] fp32: largest magnitude of every input channel over all calls."""
    inputs: torch.Tensor | None = None
    """[T, K] of the call with the most tokens, at most ``AUDITED_TOKENS`` of them."""
    outputs: torch.Tensor | None = None
    """[T, N] of the same tokens, without a bias that the caller adds."""


@contextlib.contextmanager
def observed(model: torch.nn.Module, channels: bool) -> Iterator[dict[str, Observation]]:
    """Inside, every forward pass of the decoder's linears is noted; ``channels`` asks for the channel maxima."""
    observations: dict[str, Observation] = {}
    handles = []
    for name, module in parallel_linears(model).items():
        seen = observations.setdefault(name, Observation())

        def note(_module, args, output, seen=seen) -> None:
            _note(seen, args[0].detach(), output[0].detach(), channels)

        handles.append(module.register_forward_hook(note))
    try:
        yield observations
    finally:
        for handle in handles:
            handle.remove()


def _note(seen: Observation, x: torch.Tensor, y: torch.Tensor, channels: bool) -> None:
    if not x.numel():  # an expert that no token was sent to
        return
    seen.calls += 1
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    if channels:
        amax = x.abs().amax(0).float()
        seen.channel_amax = amax if seen.channel_amax is None else torch.maximum(seen.channel_amax, amax)
    if seen.inputs is None or seen.inputs.shape[0] < min(AUDITED_TOKENS, x.shape[0]):
        seen.inputs, seen.outputs = x[:AUDITED_TOKENS].clone(), y[:AUDITED_TOKENS].clone()
