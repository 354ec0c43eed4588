"""What a run holds for training, and how rollouts do without it.

    gradients        given up: an update begins with zeros
    optimizer state  waits in pinned host memory
    weights          of quantised linears: made again from the optimizer's main parameters, as after an update

Storages shrink to nothing and grow again; tensors stay the same objects, so that views, main parameters and
the optimizer's tables need no care. Copies run on the stream that everything else runs on: the host goes on
at once, and what comes after a copy in the stream finds it done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron_rl.platform.device import OffloadableFactory, OffloadableTensors, as_bytes, release, restore, storages_of
from megatron_rl.platform.megatron import copy_main_parameters
from megatron_rl.trainer.optimizer import Optimization

SMALLEST_PIECE = 2**20
"""Bytes of the host's memory; what is left below it is one piece of any size."""


def pieces(size: int) -> list[int]:
    """Return ``size`` bytes as powers of two, the largest first.

    torch rounds pinned memory up to a power of two, so that 17 GiB in one piece would take 32.
    """
    found = []
    while size >= SMALLEST_PIECE:
        found.append(1 << (size.bit_length() - 1))
        size -= found[-1]
    return found + [size] * (size > 0)


def size_of(storages: Iterable[torch.UntypedStorage]) -> int:
    """Return bytes on the device now."""
    return sum(storage.nbytes() for storage in storages)


def _buffers(optimization: Optimization) -> list:
    return [buffer for chunk in optimization.wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def state_storages(optimization: Optimization) -> list[torch.UntypedStorage]:
    """Return where moments and fp32 main parameters lie on the device; weights of the model are not among them.

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
        without=[*optimization.policy.parameters(), *(buffer.grad_data for buffer in _buffers(optimization))],
    )
    return [storage for storage in found if storage.resizable()]


class Gradients:
    """The buffers that gradients are accumulated and reduced in."""

    def __init__(self, optimization: Optimization) -> None:
        self._optimization = optimization
        self.storages = storages_of(buffer.grad_data for buffer in _buffers(optimization))
        self._sizes = [storage.nbytes() for storage in self.storages]

    def leave(self) -> None:
        """Give them up, with the gradients of the last update: `Optimization.zero_grad` begins the next one."""
        self._optimization.optimizer.zero_grad()  # main parameters hold views, or in bf16 fp32 copies, of gradients
        for storage in self.storages:
            release(storage)

    def come_home(self) -> None:
        """Take memory again, with anything in it; nothing where it is there."""
        for storage, size in zip(self.storages, self._sizes, strict=True):
            if storage.nbytes() != size:
                restore(storage, size)


class OptimizerState:
    """Moments and main parameters; on the host for `--rl-offload-optimizer-during-inference`.

    ``with_weights``: also the trained weights, of a model that rollouts do not read.
    """

    def __init__(self, optimization: Optimization, with_weights: bool = False) -> None:
        self._optimization = optimization
        self._with_weights = with_weights
        self._pinned = optimization.policy.device.type == "cuda"
        self.host: list[list[torch.Tensor]] = []
        """The host's memory by storage, in pieces; kept from rollout to rollout, because pinning is slow."""
        self._away: list[tuple[torch.UntypedStorage, list[torch.Tensor]]] = []
        """Storages and their values: pieces of uint8 on the host."""

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """The storages that are on the device now."""
        trained = (parameter for parameter in self._optimization.policy.parameters() if parameter.requires_grad)
        weights = storages_of(trained) if self._with_weights else []
        return [*weights, *state_storages(self._optimization)]

    def leave(self) -> None:
        """Move the state to the host; nothing where it has left already."""
        if self._away:
            return
        for index, storage in enumerate(self.storages):
            values = self._host_memory(index, storage.nbytes())
            for piece, part in zip(values, as_bytes(storage).split([v.nbytes for v in values]), strict=True):
                piece.copy_(part, non_blocking=True)
                del part  # lest it hold the storage
            # The allocator gives this memory out again in the order of the stream: after the copy has read it.
            release(storage)
            self._away.append((storage, values))

    def come_home(self) -> None:
        """Bring the state back; nothing where it is home.

        Where memory runs out half way, what has not come yet stays on the host, and a later call goes on.
        """
        while self._away:
            storage, values = self._away[0]
            sizes = [piece.nbytes for piece in values]
            for part, piece in zip(restore(storage, sum(sizes)).split(sizes), values, strict=True):
                part.copy_(piece, non_blocking=True)
            del self._away[0]

    def _host_memory(self, index: int, size: int) -> list[torch.Tensor]:
        """Sizes change when the moments come to be."""
        if index == len(self.host):
            self.host.append([])
        if sum(piece.nbytes for piece in self.host[index]) != size:
            self.host[index] = [
                torch.empty(piece, dtype=torch.uint8, device="cpu", pin_memory=self._pinned) for piece in pieces(size)
            ]
        return self.host[index]


class Holdings:
    """The memory of a model in training: gradients and optimizer state, and ``with_weights`` its weights, too."""

    def __init__(self, optimization: Optimization, with_weights: bool = False) -> None:
        self.gradients = Gradients(optimization)
        self.state = OptimizerState(optimization, with_weights)

    @property
    def size(self) -> int:
        """Bytes on the device now."""
        return size_of(self.gradients.storages) + size_of(self.state.storages)


class Weights:
    """The buffers that the distributed optimizer has all parameters in."""

    def __init__(self, optimization: Optimization, offloadable: OffloadableFactory = OffloadableTensors) -> None:
        """``offloadable``: makes the copies that are set aside offloadable."""
        self._optimization = optimization
        self._offloadable = offloadable
        tensors = [buffer.param_data for buffer in _buffers(optimization) if buffer.param_data is not None]
        # fp32 weights are their own main parameters, and frozen ones have none: nothing else has their values.
        is_made_of_main = optimization.policy.dtype == torch.bfloat16 and optimization.policy.fp8_weights is None
        is_made_of_main &= all(parameter.requires_grad for parameter in optimization.policy.parameters())
        self._buffers = OffloadableTensors(tensors if is_made_of_main else ())
        self._aside: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._memory_aside = offloadable(())
        self._homes: dict[torch.nn.Parameter, torch.Tensor] = {}

    @property
    def can_leave(self) -> bool:
        """Whether an optimizer has what they are made of."""
        return self._buffers.size > 0

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """The storages of all parameters, with copies of some set aside."""
        aside = () if self._memory_aside.is_released else self._aside.values()
        return storages_of((*self._optimization.policy.parameters(), *aside))

    def leave(self, unread: Sequence[torch.nn.Parameter]) -> None:
        """Give up all but what is read in rollouts, which is set aside; nothing where they have left already.

        What is set aside has the same address at every rollout until `release_aside`: captured graphs read it there.
        """
        if self._homes or not self.can_leave:
            return
        skipped = set(unread)
        read = [parameter for parameter in self._optimization.policy.parameters() if parameter not in skipped]
        if not self._aside.keys() >= set(read):
            self._aside = {parameter: torch.empty_like(parameter) for parameter in read}
            self._memory_aside = self._offloadable(list(self._aside.values()))
        self._memory_aside.restore(zeroed=False)
        for parameter in self._optimization.policy.parameters():
            self._homes[parameter] = home = parameter.data
            if parameter not in skipped:
                parameter.data = self._aside[parameter].copy_(home)
        self._buffers.release()

    def come_home(self) -> None:
        """Make all of them again, to the bit; nothing where they are there. Collective; the state must be home."""
        if not self._homes:
            return
        self._buffers.restore()  # zeroed: parameters do not fill them
        for parameter, home in self._homes.items():
            parameter.data = home
        copy_main_parameters(self._optimization.optimizer, self._optimization.wrapped)
        self._homes = {}

    def release_aside(self) -> None:
        """Let the copies leave that are set aside; only while the weights are home."""
        if not self._homes:
            self._memory_aside.release()
