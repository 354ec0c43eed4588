"""What differs between the versions of megatron-core that this runs on: 0.16 (Python 3.11) to 0.19 (Python 3.12).

One function a difference; `tests/unit/platform/test_megatron_versions.py` pins each to the version at hand, so that one
that is no longer needed, or no longer enough, is seen.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.utils import GlobalMemoryBuffer

VERSION = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
"""(0, 16), ..."""


def submodules_of(builder: Any) -> Any:
    """Of a `ModuleSpec`, or from 0.17 on of the partial that stands in its place."""
    return builder.keywords["submodules"] if isinstance(builder, functools.partial) else builder.submodules


def last_logits_only() -> dict[str, Any]:
    """Arguments of `BaseInferenceContext`: from 0.17 on they come in an object."""
    if VERSION < (0, 17):
        return {"materialize_only_last_token_logits": True}
    from megatron.core.inference.config import InferenceConfig

    return {"inference_config": InferenceConfig(materialize_only_last_token_logits=True)}


@contextlib.contextmanager
def inference_flag() -> Iterator[None]:
    """Inside, `GPTModel` takes its way for inference, as a flag of the process says from 0.18 on; then as it was.

    Before, an inference context and evaluation mode said so.
    """
    if VERSION < (0, 18):
        yield
        return
    from megatron.core.inference.utils import InferenceMode

    was_active = InferenceMode.is_active()
    InferenceMode.set_active()
    try:
        yield
    finally:
        if not was_active:
            InferenceMode.unset_active()


def asynchronous_writer() -> dict[str, str]:
    """Arguments of ``dist_checkpointing.save``: from 0.17 on its default writer is another package's."""
    from megatron.core import dist_checkpointing

    known = inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}


def shard_writer() -> str:
    """Name of the method of `FileSystemWriterAsync` that writes a rank's tensors: processes, from 0.17 on threads."""
    return "write_preloaded_data_multiproc" if VERSION < (0, 17) else "write_preloaded_data_multithread"


def common_writer() -> tuple[Any, str] | None:
    """Owner and name of what writes ``common.pt``; None from 0.19 on, where that is one more shard."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common

    if VERSION < (0, 17):
        return common.TorchCommonSaveStrategy, "save_common"
    return (serialization, "save_common") if VERSION < (0, 19) else None


def raising(write: Callable[..., Any]) -> Callable[..., Any]:
    """``FileSystemWriterAsync.write_preloaded_data``, raising what it would return.

    From 0.17 on its caller tells of an error's type and no more, so "No space left on device" would be lost.
    """

    def written(*given: Any, **named: Any) -> Any:
        result = write(*given, **named)
        if result is not None and isinstance(result[1], Exception):
            raise result[1]
        return result

    return written


class _TrainableMemoryBuffer(GlobalMemoryBuffer):
    def get_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.inference_mode(False):
            return super().get_tensor(*args, **kwargs)


def use_trainable_memory_buffer() -> None:
    """Make megatron's scratch buffer safe to be first asked for inside ``inference_mode``.

    Stock, a buffer made during a rollout is an inference tensor, and the next training step fails with "Inference
    tensors cannot be saved for backward".
    """
    parallel_state._GLOBAL_MEMORY_BUFFER = _TrainableMemoryBuffer()


def remake_parameters(optimizer: Any, wrapped: Any) -> None:
    """Write the main parameters into the model's and gather them, as an update ends; collective.

    megatron-core has no public call for the first half.
    """
    for part in optimizer.chained_optimizers:
        part._copy_main_params_to_model_params()
    wrapped.start_param_sync(force_sync=True)
