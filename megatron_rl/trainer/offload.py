"""The optimizer's memory during rollouts: its state waits on the host, gradient buffers are given up.

    rollout begins ─► state to pinned host memory, its device memory released ─► the KV cache may take it
    rollout ends ───► device memory taken back, state copied into it ─► the next update

Storages shrink to nothing and grow again; tensors stay the same objects, so that views, main parameters and
the optimizer's tables need no care. Copies run on the stream that everything else runs on: the host goes on
at once, and what comes after a copy in the stream finds it done.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_rl.platform.storage import as_bytes, release, storages_of, take_back
from megatron_rl.trainer.optimizer import Optimization

logger = logging.getLogger(__name__)

SMALLEST_PIECE = 2**20
"""Bytes of the host's memory; what is left below it is one piece of any size."""


def pieces(size: int) -> list[int]:
    """``size`` bytes as powers of two, the largest first.

    torch rounds pinned memory up to a power of two, so that 17 GiB in one piece would take 32.
    """
    found = []
    while size >= SMALLEST_PIECE:
        found.append(1 << (size.bit_length() - 1))
        size -= found[-1]
    return found + [size] * (size > 0)


def state_storages(optimization: Optimization) -> list[torch.UntypedStorage]:
    """Where moments and fp32 main parameters lie on the device; weights of the model are not among them.

    Before the first update there are no moments. In fp32 the weights are their own main parameters.
    """
    tensors: list[torch.Tensor] = []
    for part in optimization.optimizer.chained_optimizers:
        tensors += [parameter.detach() for parameter in part.get_parameters()]
        for values in part.optimizer.state.values():
            tensors += [value for value in values.values() if torch.is_tensor(value)]
    device = optimization.policy.device
    # A step counter is one number.
    found = storages_of(
        (tensor for tensor in tensors if tensor.device == device and tensor.numel() > 1),
        without=[*optimization.wrapped.parameters(), *_gradients(optimization)],
    )
    return [storage for storage in found if storage.resizable()]


def gradient_storages(optimization: Optimization) -> list[torch.UntypedStorage]:
    """The buffers that gradients are accumulated and reduced in."""
    return storages_of(_gradients(optimization))


def _gradients(optimization: Optimization) -> list[torch.Tensor]:
    wrapped = optimization.wrapped
    return [buffer.grad_data for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers)]


@dataclass(frozen=True)
class _Away:
    storage: torch.UntypedStorage
    size: int
    values: list[torch.Tensor] | None
    """Pieces of uint8 on the host, ``size`` together; None where zeros come back."""


class OptimizerOffload:
    """`--rl-offload-optimizer-during-inference`."""

    def __init__(self, optimization: Optimization) -> None:
        self._optimization = optimization
        self._pinned = optimization.policy.device.type == "cuda"
        self._host: list[list[torch.Tensor]] = []
        self._away: list[_Away] = []
        self._told: tuple[int, int] | None = None
        optimization.bring_state_home = self.come_home

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Inside, state and gradients take no device memory; the values come back bit for bit."""
        try:
            self.leave()
            yield
        finally:
            self.come_home()

    def leave(self) -> None:
        """Move the state to the host and give the gradients up; nothing where it has left already.

        Gradients of the last update are gone then, as the next update's `Optimization.zero_grad` would have it.
        """
        if self._away:
            return
        optimization = self._optimization
        optimization.optimizer.zero_grad()  # main parameters hold views, or in bf16 fp32 copies, of gradients
        state, gradients = state_storages(optimization), gradient_storages(optimization)
        for index, storage in enumerate(state):
            self._send(storage, self._host_memory(index, storage.nbytes()))
        for storage in gradients:
            self._send(storage, None)
        self._tell(len(state))

    def come_home(self) -> None:
        """Bring the state back and take memory for the gradients; nothing where it is home.

        Where memory runs out half way, what has not come yet stays on the host, and a later call goes on.
        """
        while self._away:
            one = self._away[0]
            home = take_back(one.storage, one.size)
            if one.values is None:
                home.zero_()
            else:
                for part, values in zip(home.split([v.nbytes for v in one.values]), one.values, strict=True):
                    part.copy_(values, non_blocking=True)
            del self._away[0]

    def _send(self, storage: torch.UntypedStorage, values: list[torch.Tensor] | None) -> None:
        size = storage.nbytes()
        if values is not None:
            sizes = [piece.nbytes for piece in values]
            for piece, part in zip(values, as_bytes(storage).split(sizes), strict=True):
                piece.copy_(part, non_blocking=True)
                del part  # lest it hold the storage
        # The allocator gives this memory out again in the order of the stream: after the copy has read it.
        release(storage)
        self._away.append(_Away(storage, size, values))

    def _host_memory(self, index: int, size: int) -> list[torch.Tensor]:
        """Kept from rollout to rollout, because pinning is slow; sizes change when the moments come to be."""
        if index == len(self._host):
            self._host.append([])
        if sum(piece.nbytes for piece in self._host[index]) != size:
            self._host[index] = [
                torch.empty(piece, dtype=torch.uint8, device="cpu", pin_memory=self._pinned) for piece in pieces(size)
            ]
        return self._host[index]

    def _tell(self, states: int) -> None:
        sizes = [one.size for one in self._away]
        told = sum(sizes[:states]), sum(sizes[states:])
        if told != self._told:
            logger.info(
                "during rollouts %.2f MiB of optimizer state wait on the host and %.2f MiB of gradients are given up%s",
                told[0] / 2**20, told[1] / 2**20,
                "" if self._pinned else "; without a GPU the host's memory is the only one, so the state gains nothing",
            )  # fmt: skip
        self._told = told
