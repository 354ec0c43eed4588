"""Which weights a run started from: where they lay, and a fingerprint of them.

Every checkpoint of a run carries this on, for the reference policy of its KL term is those very weights. A later start
reads them again from where they lay, or from where they lie now, and compares the fingerprint.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

from megatron_rl.checkpoint.torch_files import own_name
from megatron_rl.errors import CheckpointError
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups

_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Bytes of a number -> what its bits are added up as."""
_OVER_THE_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Origin:
    """The weights a run started from."""

    kind: Literal["checkpoint", "hugging_face", "drawn"]
    """``drawn``: random ones, made when the model was built."""
    given: str = ""
    """The directory that a flag named, absolute."""
    path: str = ""
    """What is read: ``given``, or once it was read the checkpoint in it that was the newest then."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Number format -> fingerprint; empty before they are read."""

    @classmethod
    def at(cls, kind: Literal["checkpoint", "hugging_face"], directory: str) -> Origin:
        """What a flag names, not yet read."""
        return cls(kind, os.path.abspath(directory), os.path.abspath(directory))

    def state(self) -> dict[str, Any]:
        """As `RunState` keeps it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Origin | None:
        """What `state` gave; None for that of a version that did not record it.

        Raises:
            CheckpointError: it is something else.
        """
        if not state:
            return None
        known = {entry.name for entry in dataclasses.fields(cls)}
        try:
            return cls(**{name: value for name, value in state.items() if name in known})
        except TypeError as error:
            raise CheckpointError(f"a checkpoint's record of what its run started from is damaged ({error})") from error

    def is_of(self, weights: Mapping[str, str]) -> bool:
        """Whether ``weights`` are these, in every number format that both know."""
        both = self.weights.keys() & weights.keys()
        return bool(both) and all(self.weights[name] == weights[name] for name in both)


def fingerprints(policy: PolicyModel, groups: ParallelGroups) -> dict[str, str]:
    """Fingerprints of the model's weights by number format; collective in a model copy.

    A run in bf16 knows that of bf16 alone, one in fp32 both: so the two can be compared.
    """
    formats = {policy.dtype, torch.bfloat16}
    return {
        str(dtype).removeprefix("torch."): f"{weights_fingerprint(policy, groups, dtype):016x}"
        for dtype in sorted(formats, key=str)
    }


def weights_fingerprint(policy: PolicyModel, groups: ParallelGroups, dtype: torch.dtype | None = None) -> int:
    """A sum of all weights' bit patterns, modulo 2^64: another update gives another number.

    The same however the weights are sharded, the vocabulary is padded and the norms are called. Collective in a model
    copy. Reads the device once.

    Args:
        dtype: numbers are rounded to it first; None takes them as they are.
    """
    total = torch.zeros([], dtype=torch.int64, device=policy.device)
    for given, parameter in policy.gpt.named_parameters():
        if param_is_not_tensor_parallel_duplicate(parameter):
            name, values = own_name(given), parameter.detach()
            if name in _OVER_THE_VOCABULARY:
                values = values[: max(0, policy.vocab_size - groups.tensor_rank * len(values))]
            values = values.to(dtype or values.dtype)
            bits = values.view(_WHOLE_NUMBERS[values.element_size()])
            total += (zlib.crc32(name.encode()) | 1) * bits.sum(dtype=torch.int64)
    total = total.cpu()
    dist.all_reduce(total, group=groups.model_group)
    return int(total) % 2**64
