"""Number formats of parameters, gradients and training products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Formats of training; parameters are fp32 unless --bf16 is given."""

    bf16: bool = flag(False, common=True)
    """Parameters and activations in bfloat16, with fp32 master weights."""
    fp16: bool = flag(False)
    """Parameters in fp16: refused."""
    accumulate_allreduce_grads_in_fp32: bool = flag(
        True, off="--no-accumulate-allreduce-grads-in-fp32", off_aliases=("--grad-reduce-in-bf16",)
    )
    """Gradients accumulated and reduced in fp32, not in the parameters' format."""
    fp8_format: Literal["e4m3", "hybrid"] | None = flag(None)
    """With --fp8-recipe blockwise: the trainer's forward pass in fp8, on the rollouts' quantised weights. With
    --transformer-impl transformer_engine its layers' products, backward pass included."""
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] | None = flag(None)
    """How fp8 training scales its numbers: blockwise, in tiles of 128 x 128 with powers of two; tensorwise, one scale
    a tensor, on layers of transformer_engine only."""
