"""What differs between versions of megatron-core, 0.16 (Python 3.11) to 0.19 (Python 3.12), and what of it is replaced.

One function a matter; `tests/unit/platform/test_megatron_versions.py` pins each to the version at hand, so that one
that is no longer needed, or no longer enough, is seen.
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


def let_latent_attention_be_built() -> None:
    """Let latent attention be built without Transformer Engine 0.16, where a class it asks for is a mock."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(vars(multi_latent_attention).get("TELinear", object), type):
        multi_latent_attention.HAVE_TE = False


def last_logits_only() -> dict[str, Any]:
    """Return arguments of `BaseInferenceContext`: from 0.17 on they come in an object."""
    if VERSION < (0, 17):
        return {"materialize_only_last_token_logits": True}
    from megatron.core.inference.config import InferenceConfig

    return {"inference_config": InferenceConfig(materialize_only_last_token_logits=True)}


@contextlib.contextmanager
def inference_flag() -> Iterator[None]:
    """Enter a block in which `GPTModel` takes its way for inference, as a flag says from 0.18 on; then as before.

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


@functools.cache
def add_up_in_rank_order() -> None:
    """Let tensor-parallel ranks add up in their order, in fp32, rounded once; megatron has NCCL choose.

    NCCL's order, and where it rounds to bf16, depend on the message's size: on the number of tokens.
    """
    from megatron.core.tensor_parallel import mappings

    uneven = mappings._reduce_scatter_along_first_dim

    def scattered(whole: torch.Tensor, group: dist.ProcessGroup, sizes: Any = None, *given: Any) -> torch.Tensor:
        if sizes is not None or group.size() == 1:
            return uneven(whole, group, sizes, *given)
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
    """Return arguments of ``dist_checkpointing.save``: from 0.17 on its default writer is another package's."""
    from megatron.core import dist_checkpointing

    known = inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}


@contextlib.contextmanager
def watched_writers(part: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Enter a block in which each write of a save runs in a ``part()``, which may take note of its error and go on.

    megatron-core writes three files on rank 0 alone, between collectives, and every rank starts processes that write
    its tensors: an exception there would leave the other ranks waiting for ever.
    """
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync as Writer
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner as Planner

    def noting(write: Callable[..., None]) -> Callable[..., None]:
        def noted(*given: Any, **named: Any) -> None:
            with part():
                write(*given, **named)

        return noted

    write_shards, common = shard_writer(), common_writer()
    shards = write_here if must_write_here() else getattr(Writer, write_shards)
    replacements = [
        (Writer, "write_preloaded_data", staticmethod(raising(Writer.write_preloaded_data))),
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


def _save_common(*given: Any) -> None:
    """As megatron's, but an error says which: torch's own file writer tells of an ``enforce fail`` and no more."""
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

    state, directory = given[-2:]  # a method's in 0.16, then a function's
    if dist.get_rank() == 0:
        written = io.BytesIO()
        torch.save(state, written)
        (Path(directory) / COMMON_STATE_FNAME).write_bytes(written.getbuffer())


def shard_writer() -> str:
    """Name of the method of `FileSystemWriterAsync` that writes a rank's tensors: processes, from 0.17 on threads."""
    return "write_preloaded_data_multiproc" if VERSION < (0, 17) else "write_preloaded_data_multithread"


def must_write_here() -> bool:
    """Return whether megatron-core would fork a process that uses CUDA, for every save: see `checkpoint.saving`."""
    return VERSION < (0, 17) and torch.cuda.is_available()


def write_here(transforms: list[Any], use_msc: bool, rank: int, buckets: Sequence[Any], results: Any) -> None:
    """Write like ``write_preloaded_data_multiproc`` of 0.16, but one file after the other, and without processes."""
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
    """Return owner and name of what writes ``common.pt``; None from 0.19 on, where that is one more shard."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common

    if VERSION < (0, 17):
        return common.TorchCommonSaveStrategy, "save_common"
    return (serialization, "save_common") if VERSION < (0, 19) else None


def raising(write: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``FileSystemWriterAsync.write_preloaded_data``, raising what it would return.

    From 0.17 on its caller tells of an error's type and no more, so "No space left on device" would be lost.
    """

    def written(*given: Any, **named: Any) -> Any:
        result = write(*given, **named)
        if result is not None and isinstance(result[1], Exception):
            raise result[1]
        return result

    return written


def use_result_queue(make: Callable[[], Any]) -> None:
    """Let what the writers of a save hand back go through ``make()``, in place of a queue in a process of its own."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = make()


@contextlib.contextmanager
def step_counters_offered(part: Any) -> Iterator[None]:
    """Enter a block in which a `DistributedOptimizer` takes a state of torch's Adam, whose step is a tensor.

    megatron copies every key the optimizer has and raises KeyError: no ``step`` is in the file. It has just loaded the
    counter from the parameter groups, so that one is offered as the source.
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
def groups_known_by_what_they_are() -> Iterator[None]:
    """Enter a block in which parameter groups of a loaded state are found by what they hold, as in 0.16.

    A later megatron-core takes rates and decays as part of a group's name, so no run could go on with another ``--lr``.
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
    """Make megatron's scratch buffer safe to be first asked for inside ``inference_mode``.

    Stock, a buffer made during a rollout is an inference tensor, and the next training step fails with "Inference
    tensors cannot be saved for backward".
    """
    parallel_state._GLOBAL_MEMORY_BUFFER = _TrainableMemoryBuffer()


def remake_parameters(optimizer: Any, wrapped: Sequence[Any]) -> None:
    """Write the main parameters into the model's and gather them, as an update ends; collective.

    megatron-core has no public call for the first half.
    """
    for part in optimizer.chained_optimizers:
        part._copy_main_params_to_model_params()
    for chunk in wrapped:
        chunk.start_param_sync(force_sync=True)


def owned_numbers(optimizer: Any, parameter: torch.nn.Parameter) -> slice | None:
    """Return which numbers of a ``parameter`` this rank's part of a distributed optimizer updates; None: none."""
    for part in optimizer.chained_optimizers:
        if parameter in part.model_param_gbuf_map:
            found = part._get_model_param_range_map(parameter)["param"]
            return slice(found.start, found.end)
    return None


@contextlib.contextmanager
def weights_left_as_they_are() -> Iterator[None]:
    """Inside, layers that are made on the host leave their weights as the memory is.

    megatron makes each weight whole on every rank, converts and copies it, also where its initialisation draws nothing.
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
    """Return the `TransformerConfig` fields for pipeline stages: layers of each stage, and how they communicate."""
    interleaved = stages.chunks > 1
    return {
        "num_layers_in_first_pipeline_stage": stages.first,
        "num_layers_in_last_pipeline_stage": stages.last,
        "virtual_pipeline_model_parallel_size": stages.chunks if interleaved else None,
        "pipeline_dtype": dtype,
        # Interleaved on gloo it frees the buffer of a send that is still under way: wrong gradients, at random.
        "deallocate_pipeline_outputs": stages.count > 1 and (is_cuda or not interleaved),
        # Interleaved over two stages both neighbours are one rank, and sends in one batch are taken for each other.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }
