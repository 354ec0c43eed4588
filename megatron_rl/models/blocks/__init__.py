"""A file a block: the modules of a mixer or an MLP, and its step in rollouts. `families/blocks.py` has the rest of it.

megatron builds a module from a layer's specification, in which a block puts its own parts; then the module becomes the
block. So another kind of layer is one more file here, and one more entry there.
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
    """The base of a file's ``BLOCK``: it inherits from this and from megatron's module, without a constructor."""

    settings: type[TransformerConfig] = TransformerConfig
    """What megatron's module reads: a class that adds fields has them from the flags in `LayerOptions`."""
    expects: Mapping[str, Any] = {}
    """Settings of megatron, each with the one value that training and `decode` alike compute."""
    module: type[torch.nn.Module] | None = None
    """Of a mixer that is none of megatron's: what is built in place of its attention."""
    reader: str | None = None
    """The linear that takes the norm's output; None where there is more than one."""
    post_layernorm: torch.nn.Module | None
    """Of the output, where the layer's kind has such norms. Around `decode` the layer calls it."""

    @staticmethod
    def stock(config: TransformerConfig) -> dict[str, Any]:
        """Return the arguments of megatron's own specification of a layer that has this block."""
        del config
        return {}

    @staticmethod
    def place(submodules: Any, config: TransformerConfig) -> None:
        """Put our modules in the place of megatron's, into the specification of the block."""

    def prepare(self, kind: LayerKind) -> None:
        """Take the place of megatron's module, which has been built, in a layer of that kind."""

    def forward(self, *given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run megatron's, and the norm of its output: as a hook it would keep decode steps out of CUDA graphs."""
        output, bias = super().forward(*given, **named)
        return (output, bias) if self.post_layernorm is None else (self.post_layernorm(output), None)

    def decode(self, normed: LinearInput, plan: RolloutPlan) -> Pending:
        """Map ``[T, hidden]`` to ``[T, hidden]``, and a bias that is left to the caller; without gradients."""
        raise NotImplementedError

    def join(self, token: torch.Tensor, plan: RolloutPlan) -> None:
        """Take part in a `decode` of the ranks that share this block with a ``token`` [1, hidden] that nobody reads.

        A block that no ranks share has nothing to do.
        """

    def told(self, plan: Any) -> contextlib.AbstractContextManager[None]:
        """Enter a block in which forward passes of an MLP are of the ``plan`` of a batch, or of None."""
        del plan
        return contextlib.nullcontext()


def cut_by_heads(tensors: dict[str, Any], prefix: str, offsets: tuple[Any, ...]) -> dict[str, Any]:
    """Describe ``tensors`` for ``dist_checkpointing``: tensor-parallel ranks have a share of the rows each."""
    return make_sharded_tensors_for_checkpoint(tensors, prefix, dict.fromkeys(tensors, 0), offsets)


def weight_of(norm: torch.nn.Module) -> torch.nn.Parameter:
    """Return a norm's weight for a kernel; hooks, as those of `--overlap-param-gather`, wait until it has arrived."""
    for hook in norm._forward_pre_hooks.values():
        hook(norm, ())
    return norm.weight


BLOCKS: Registry[type[Block]] = Registry("block of a layer", "megatron_rl.models.blocks", "BLOCK")
