"""Make megatron-core importable and runnable on this machine, once per process."""

from __future__ import annotations

import functools
import logging
import os
import warnings

import torch


class _DropMessages(logging.Filter):
    """Silences messages that are true on a CPU but useless to the user."""

    def __init__(self, *parts: str) -> None:
        super().__init__()
        self._parts = parts

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(part in record.getMessage() for part in self._parts)


@functools.cache
def prepare() -> None:
    """Patch torch and megatron-core where this machine needs it; later calls do nothing.

    With a GPU only the gaps of megatron-core are closed (see `_close_gaps`); without one
    `cpu.install` makes the ``torch.cuda`` calls it hard-codes harmless.
    """
    # One thread a rank unless the user says otherwise: ranks that fight for cores are slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Apex is not installed", "TE is not installed", ...
        if torch.cuda.is_available():
            import megatron.core
        else:
            from megatron_rl.platform import cpu

            cpu.install()
        import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401  (the rest of the warnings)

        _close_gaps()
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        _DropMessages("CPU RNG state changed within GPU RNG context")
    )


def _close_gaps() -> None:
    """Places where megatron-core 0.16.1 needs a package it should not need."""
    import megatron.core.transformer.attention as attention
    from megatron.core.transformer.moe import moe_utils

    # Dynamic-batching attention asserts flash-attn; our SelfAttention supplies the kernel.
    attention.HAVE_FA3 = True
    # Its one use of einops there: "s b h d -> s b (h d)" on that kernel's output.
    if attention.rearrange is None:
        attention.rearrange = lambda heads, _pattern: heads.flatten(2)
    # Without Transformer Engine the router's linear raises NameError on this name.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
