"""Differences between megatron-core 0.16 (Python 3.11) and 0.19 (Python 3.12), and replacements of its parts.

One function per topic; `tests/unit/platform/test_megatron_versions.py` checks each against the installed version, to
find those that are no longer needed or no longer enough.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import GlobalMemoryBuffer

from megatron_rl.families import Stages

VERSION = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
"""(0, 16), ..."""


def submodules_of(builder: Any) -> Any:
    """Return the submodules of a `ModuleSpec`, or from 0.17 on of the partial that replaces it."""
    return builder.keywords["submodules"] if isinstance(builder, functools.partial) else builder.submodules


def enable_latent_attention() -> None:
    """Allow latent attention without Transformer Engine in 0.16, where a class that it needs is a mock."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(vars(multi_latent_attention).get("TELinear", object), type):
        multi_latent_attention.HAVE_TE = False


def last_logits_only() -> dict[str, Any]:
    """Return the arguments of `BaseInferenceContext`; from 0.17 on they are in an object."""
    if VERSION < (0, 17):
        return {"materialize_only_last_token_logits": True}
    from megatron.core.inference.config import InferenceConfig

    return {"inference_config": InferenceConfig(materialize_only_last_token_logits=True)}


@contextlib.contextmanager
def inference_flag() -> Iterator[None]:
    """Make `GPTModel` run in inference mode inside the context, which from 0.18 on needs a flag."""
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


@functools.cache
def reduce_in_rank_order() -> None:
    """Make tensor-parallel reductions add in rank order, in fp32, rounded once; megatron leaves the order to NCCL.

    NCCL's order, and where it rounds to bf16, depend on the message size, i.e. the number of tokens.
    """
    from megatron.core.tensor_parallel import mappings

    uneven = mappings._reduce_scatter_along_first_dim

    def scattered(whole: torch.Tensor, group: dist.ProcessGroup, sizes: Any = None, *args: Any) -> torch.Tensor:
        if sizes is not None or group.size() == 1:
            return uneven(whole, group, sizes, *args)
        parts = torch.empty_like(whole, memory_format=torch.contiguous_format)
        dist.all_to_all_single(parts, whole.contiguous(), group=group)
        return functools.reduce(torch.add, (part.float() for part in parts.chunk(group.size()))).to(whole.dtype)

    def reduced(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if group.size() == 1:
            return own
        part = scattered(torch.nn.functional.pad(own.flatten(), (0, -own.numel() % group.size())), group)
        whole = part.new_empty(len(part) * group.size())
        dist.all_gather_into_tensor(whole, part, group=group)
        return whole[: own.numel()].view(own.shape)

    mappings._reduce, mappings._reduce_scatter_along_first_dim = reduced, scattered


def asynchronous_writer() -> dict[str, str]:
    """Return the arguments of ``dist_checkpointing.save`` for megatron's writer, no longer the default from 0.17 on."""
    from megatron.core import dist_checkpointing

    known = inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}


@contextlib.contextmanager
def watched_writers(part: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Run each write of a save inside a ``part()``, which may record its error and continue; inside the context.

    megatron-core writes three files only on rank 0, between collectives, and every rank starts processes that write its
    tensors: an exception there would leave the other ranks waiting for ever.
    """
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync as Writer
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner as Planner

    def noting(write: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any, **named: Any) -> None:
            with part():
                write(*args, **named)

        return noted

    write_shards, common = shard_writer(), common_writer()
    shards = write_in_process if must_write_in_process() else getattr(Writer, write_shards)
    replacements = [
        (Writer, "write_preloaded_data", staticmethod(raise_write_error(Writer.write_preloaded_data))),
        (Writer, write_shards, staticmethod(noting(shards))),
        (Writer, "finish", noting(Writer.finish)),
        (serialization, "save_config", noting(serialization.save_config)),
        (Planner, "transform_object", with_own_storage),
    ]
    if common is not None:
        replacements.append((*common, noting(_save_common)))
    with contextlib.ExitStack() as originals:
        for owner, name, replacement in replacements:
            originals.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, replacement)
        yield


def with_own_storage(planner: Any, item: Any, given: Any) -> Any:
    """Return a tensor of the host that is part of a larger one, as weights are, as if it had a storage of its own.

    megatron-core would clone all of these before it writes any: in fp32 twice the weights.
    """
    del planner, item
    if not (isinstance(given, torch.Tensor) and given.is_cpu and given.is_contiguous() and given.numel()):
        return given
    start = given.storage_offset() * given.itemsize
    storage = given.detach().untyped_storage()[start : start + given.nbytes]  # the same memory
    return torch.empty(0, dtype=given.dtype).set_(storage, 0, given.shape, given.stride())


def _save_common(*args: Any) -> None:
    """Like megatron's, but with the error's cause: torch's file writer reports only an ``enforce fail``."""
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

    state, directory = args[-2:]  # a method's in 0.16, then a function's
    if dist.get_rank() == 0:
        written = io.BytesIO()
        torch.save(state, written)
        (Path(directory) / COMMON_STATE_FNAME).write_bytes(written.getbuffer())


def shard_writer() -> str:
    """Return the `FileSystemWriterAsync` method that writes a rank's tensors: processes, from 0.17 on threads."""
    return "write_preloaded_data_multiproc" if VERSION < (0, 17) else "write_preloaded_data_multithread"


def must_write_in_process() -> bool:
    """Return whether megatron-core would fork a process that uses CUDA for every save: see `checkpoint.saving`."""
    return VERSION < (0, 17) and torch.cuda.is_available()


def write_in_process(transforms: list[Any], use_msc: bool, rank: int, buckets: Sequence[Any], results: Any) -> None:
    """Write like ``write_preloaded_data_multiproc`` of 0.16, but file by file in this process."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync as Writer

    del use_msc, rank
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        found, counted = queue.Queue(), queue.Queue()
        counted.put(number)
        Writer.write_preloaded_data(transforms, number, bucket, found, counted, use_fsync=True)
        _, written[number] = found.get()
        if isinstance(written[number], Exception):
            results.put(written[number])
            return
    results.put(written)


def common_writer() -> tuple[Any, str] | None:
    """Return owner and name of the function that writes ``common.pt``; None from 0.19 on, where it is a shard."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common

    if VERSION < (0, 17):
        return common.TorchCommonSaveStrategy, "save_common"
    return (serialization, "save_common") if VERSION < (0, 19) else None


def raise_write_error(write: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``FileSystemWriterAsync.write_preloaded_data`` raise the error that it would return.

    From 0.17 on its caller reports only the error's type: "No space left on device" would be lost.
    """

    def written(*args: Any, **named: Any) -> Any:
        result = write(*args, **named)
        if result is not None and isinstance(result[1], Exception):
            raise result[1]
        return result

    return written


def use_result_queue(make: Callable[[], Any]) -> None:
    """Use ``make()`` for the results of a save's writers, instead of a queue in a separate process."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = make()


@contextlib.contextmanager
def offer_step_counters(part: Any) -> Iterator[None]:
    """Let a `DistributedOptimizer` load the state of torch's Adam, whose step is a tensor; inside the context.

    megatron copies all keys of the optimizer and raises KeyError, because files have no ``step``. It has just loaded
    the counter from the parameter groups, so that is used as the source.
    """
    copy = part._set_main_param_and_optimizer_states

    def with_step(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, place = part.model_param_group_index_map[parameter]
        own = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
        copy(parameter, tensors | {"step": own["step"]} if "step" in own else tensors)

    part._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        del part._set_main_param_and_optimizer_states  # the class's method again


@contextlib.contextmanager
def match_groups_by_content() -> Iterator[None]:
    """Match parameter groups of a loaded state by their content, as in 0.16; inside the context.

    Later versions of megatron-core include rates and decays in a group's identity, so no run could resume with another
    ``--lr``.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    names = tuple(
        name for name in optimizer.param_group_identifier_keys if name.endswith("_mult") or name.startswith("is_")
    )
    with contextlib.ExitStack() as originals:
        for module in (optimizer, distrib_optimizer):
            originals.callback(setattr, module, "param_group_identifier_keys", module.param_group_identifier_keys)
            module.param_group_identifier_keys = names
        yield


class _TrainableMemoryBuffer(GlobalMemoryBuffer):
    def get_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.inference_mode(False):
            return super().get_tensor(*args, **kwargs)


def use_trainable_memory_buffer() -> None:
    """Make megatron's scratch buffer usable for training if first requested inside ``inference_mode``.

    Otherwise it is an inference tensor, and the next training step fails with "Inference tensors cannot be saved for
    backward".
    """
    parallel_state._GLOBAL_MEMORY_BUFFER = _TrainableMemoryBuffer()


def copy_main_parameters(optimizer: Any, wrapped: Sequence[Any]) -> None:
    """Write the main parameters into the model's and gather them, which megatron-core cannot do alone; collective."""
    for part in optimizer.chained_optimizers:
        part._copy_main_params_to_model_params()
    for chunk in wrapped:
        chunk.start_param_sync(force_sync=True)


def owned_slice(optimizer: Any, parameter: torch.nn.Parameter) -> slice | None:
    """Return the elements of ``parameter`` that this rank of a distributed optimizer updates, or None."""
    for part in optimizer.chained_optimizers:
        if parameter in part.model_param_gbuf_map:
            found = part._get_model_param_range_map(parameter)["param"]
            return slice(found.start, found.end)
    return None


@contextlib.contextmanager
def skip_weight_init() -> Iterator[None]:
    """Leave weights created on the host uninitialised, inside the context.

    megatron creates, converts and copies each whole weight on every rank, even if its initialisation draws nothing.
    """
    from megatron.core.tensor_parallel import layers

    def described(
        weight: torch.Tensor, _rows: int, _columns: int, _own: int, dimension: int, _init: Any, stride: int = 1,
        *, skip_set_tensor_parallel_attributes: bool = False, **_: Any,
    ) -> None:  # fmt: skip
        if not skip_set_tensor_parallel_attributes:
            layers.set_tensor_model_parallel_attributes(weight, True, dimension, stride)

    original = layers._initialize_affine_weight_cpu
    layers._initialize_affine_weight_cpu = described
    try:
        yield
    finally:
        layers._initialize_affine_weight_cpu = original


def pipeline_settings(stages: Stages, dtype: torch.dtype, is_cuda: bool) -> dict[str, Any]:
    """Return the `TransformerConfig` fields for pipeline stages: layers per stage, and communication."""
    interleaved = stages.chunks > 1
    return {
        "num_layers_in_first_pipeline_stage": stages.first,
        "num_layers_in_last_pipeline_stage": stages.last,
        "virtual_pipeline_model_parallel_size": stages.chunks if interleaved else None,
        "pipeline_dtype": dtype,
        # Interleaved on gloo it frees the buffer of an unfinished send: wrong gradients, at random.
        "deallocate_pipeline_outputs": stages.count > 1 and (is_cuda or not interleaved),
        # Interleaved over two stages both neighbours are one rank, and batched sends would be confused.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }
