"""One file per block, a mixer or an MLP: its modules and its rollout step. `families/blocks.py` has its sizes.

megatron builds a module from a layer specification, in which the block replaces submodules; then the module's class
becomes the block. A new kind of layer is one more file here and one more entry there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_rl.families import LayerKind
from megatron_rl.registry import Registry

if TYPE_CHECKING:
    from megatron_rl.models.rollout import RolloutPlan
    from megatron_rl.models.rollout_ops import LinearInput, Pending


class Block:
    """Base class of a file's ``BLOCK``, which also inherits from megatron's module and has no constructor."""

    settings: type[TransformerConfig] = TransformerConfig
    """Config class of megatron's module; its additional fields come from flags in `LayerOptions`."""
    expects: Mapping[str, Any] = {}
    """Megatron settings that must have these values, because `decode` implements no others."""
    module: type[torch.nn.Module] | None = None
    """Mixer module that replaces megatron's attention; None: megatron's is used."""
    reader: str | None = None
    """Name of the linear that takes the norm's output; None if there are several."""
    post_layernorm: torch.nn.Module | None
    """Norm of the output, if the kind has one. The layer applies it around `decode`."""

    @staticmethod
    def stock(config: TransformerConfig) -> dict[str, Any]:
        """Return the arguments of megatron's specification of a layer with this block."""
        del config
        return {}

    @staticmethod
    def replace_modules(submodules: Any, config: TransformerConfig) -> None:
        """Replace megatron's submodules in the specification of the block."""

    def prepare(self, kind: LayerKind) -> None:
        """Finish the built module for a layer of that kind."""

    def forward(self, *args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run megatron's module, then the output norm. Not as a hook: hooks prevent CUDA graphs."""
        output, bias = super().forward(*args, **named)
        return (output, bias) if self.post_layernorm is None else (self.post_layernorm(output), None)

    def decode(self, normed: LinearInput, plan: RolloutPlan) -> Pending:
        """Compute ``[T, hidden]`` -> ``[T, hidden]`` and a bias for the caller to add; without gradients."""
        raise NotImplementedError

    def run_dummy_pass(self, token: torch.Tensor, plan: RolloutPlan) -> None:
        """Feed a dummy ``token`` [1, hidden] so that the collectives of a `decode` on expert-parallel ranks match."""

    def using_plan(self, plan: Any) -> contextlib.AbstractContextManager[None]:
        """Make an MLP use the ``plan`` of a batch (or None) in forward passes, inside the context."""
        del plan
        return contextlib.nullcontext()


def cut_by_heads(tensors: dict[str, Any], prefix: str, offsets: tuple[Any, ...]) -> dict[str, Any]:
    """Describe ``tensors``, split over tensor-parallel ranks by rows, for ``dist_checkpointing``."""
    return make_sharded_tensors_for_checkpoint(tensors, prefix, dict.fromkeys(tensors, 0), offsets)


def weight_of(norm: torch.nn.Module) -> torch.nn.Parameter:
    """Return a norm's weight for a kernel, after hooks that wait for it (`--overlap-param-gather`)."""
    for hook in norm._forward_pre_hooks.values():
        hook(norm, ())
    return norm.weight


BLOCKS: Registry[type[Block]] = Registry("block of a layer", "megatron_rl.models.blocks", "BLOCK")
