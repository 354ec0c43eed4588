"""Hardware access, and the adaptation of megatron-core to this machine.

Importing this package makes megatron-core importable and runnable (`prepare`), so our packages import it before
megatron.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Iterator

import torch

from megatron_rl.platform import cuda
from megatron_rl.platform.device import Platform, current_platform

__all__ = ["Platform", "current_platform", "prepare"]
_USELESS = {
    "megatron.core.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",
    # From 0.19 on, for every model: its successor's norms need Transformer Engine.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
}
"""Logger -> messages that the user cannot act on, which are suppressed."""


@functools.cache
def prepare() -> None:
    """Patch torch and megatron-core for this machine; later calls do nothing.

    With a GPU `cuda.install` configures attention kernels and memory; without one `cpu.install` redirects the
    ``torch.cuda`` calls that megatron-core hard-codes. `_close_gaps` applies to both.
    """
    # Idle OpenMP threads sleep: ranks that compete for cores are slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # "Apex is not installed", "TE is not installed", ...
        stack.enter_context(_hide_packages("wandb", "torch.utils.tensorboard"))
        if torch.cuda.is_available():
            cuda.install()
        else:
            from megatron_rl.platform import cpu

            cpu.install()
        import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401  (the rest of the warnings)

        _close_gaps()
    for logger, message in _USELESS.items():
        logging.getLogger(logger).addFilter(lambda record, useless=message: useless not in record.getMessage())


@contextlib.contextmanager
def _hide_packages(*names: str) -> Iterator[None]:
    """Make these packages unimportable inside the context, unless already imported.

    megatron-core imports optional metric writers that we do not use. wandb takes a second.
    """
    hidden = [name for name in names if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _close_gaps() -> None:
    """Fix places where megatron-core requires an optional package."""
    import megatron.core.transformer.attention as attention
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.utils import local_multi_tensor_l2_norm

    # Dynamic-batching attention asserts flash-attn; our SelfAttention supplies the kernel.
    attention.HAVE_FA3 = True
    # Its one use of einops there: "s b h d -> s b (h d)" on that kernel's output.
    if attention.rearrange is None:
        attention.rearrange = lambda heads, _pattern: heads.flatten(2)
    # Without Transformer Engine the router's linear raises NameError on this name.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Without Transformer Engine and Apex the host reads the norm of every parameter's gradient.
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm_on_device


def _norm_on_device(
    _chunk_size: int, _overflow: torch.Tensor, tensors: list[list[torch.Tensor]], _per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Compute Apex's ``multi_tensor_l2norm``: the norm of all tensors together, [1] fp32 on their device."""
    norms = torch._foreach_norm(tensors[0], 2, torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


prepare()
