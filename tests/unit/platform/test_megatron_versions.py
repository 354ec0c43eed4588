"""What `megatron_rl.platform.megatron` says of the version of megatron-core at hand is so."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import GlobalMemoryBuffer

import megatron_rl.platform  # noqa: F401  (prepares megatron-core)
from megatron_rl.checkpoint import optimizer_state, tensors
from megatron_rl.errors import CheckpointError
from megatron_rl.platform import megatron
from megatron_rl.platform.device import storages_of
from megatron_rl.trainer import optimizer
from tests.support.checkpoints import contents
from tests.support.samples import all_equal, tiny_optimization, weights_of
from tests.support.tiny import SHAPES

_DESCRIPTION = ("tensor_model_parallel", "partition_dim", "partition_stride")


def test_the_mlp_of_a_layer_has_submodules() -> None:
    mlp = get_gpt_layer_local_spec().submodules.mlp
    assert isinstance(mlp, functools.partial) == (megatron.VERSION >= (0, 17))
    assert megatron.submodules_of(mlp).linear_fc1 is not None


def test_latent_attention_is_built_without_transformer_engine() -> None:
    megatron.enable_latent_attention()
    assert isinstance(multi_latent_attention.TELinear, type) or not multi_latent_attention.HAVE_TE


@pytest.mark.parametrize("how", ["in place", "gathered", "megatron's own"])
def test_state_after_a_padded_bucket_is_saved_whole(
    one_rank: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """In fp32 the main parameters of a checkpoint are its weights; of several replicas they are gathered."""
    small = functools.partial(optimizer.DistributedDataParallelConfig, bucket_size=1_000)
    monkeypatch.setattr(optimizer, "DistributedDataParallelConfig", small)
    overlap = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    optimization = tiny_optimization(**SHAPES["odd widths"], **overlap)
    buffer = optimization.wrapped[0].buffers[0]
    assert len(buffer.buckets) > 3
    assert buffer.numel > buffer.numel_unpadded
    if how == "megatron's own":
        monkeypatch.setattr(tensors, "parameters_in_place", lambda _: contextlib.nullcontext())
    if how == "gathered":
        state_of = optimizer_state.replica_state
        gather = functools.partial(state_of, is_alone=False)
        monkeypatch.setattr(optimizer_state, "replica_state", lambda part, _, **options: gather(part, **options))
    optimizer_state.make_room(optimization)
    tensors.save_tensors(tmp_path, optimization.policy, optimization)
    saved = contents(tmp_path)
    name = "embedding.word_embeddings.weight"
    is_whole = torch.equal(saved[f"optimizer.state.param.{name}"], saved[name])
    assert is_whole == (how != "megatron's own")


def test_a_save_of_one_replica_writes_its_tensors_from_where_they_lie(one_rank: object, tmp_path: Path) -> None:
    optimization = tiny_optimization(**SHAPES["odd widths"], use_distributed_optimizer=True)
    optimizer_state.make_room(optimization)
    (part,) = optimization.optimizer.chained_optimizers
    moments = [values[key] for values in part.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    own = [(one.data_ptr(), one.nbytes()) for one in storages_of([*optimization.policy.parameters(), *moments])]
    with megatron.watched_writers(contextlib.nullcontext):
        request = tensors.save_tensors(tmp_path, optimization.policy, optimization, in_background=True)
    written = [tensor for *_, (_, items) in request.async_fn_args[1] for _, tensor in items]
    assert sum(tensor.nbytes for tensor in written) == 4 * sum(one.nbytes for one in optimization.policy.parameters())
    for tensor in written:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "torch.save writes whole storages"
        assert any(start <= tensor.data_ptr() < start + size for start, size in own), "a copy"


def test_a_context_of_last_logits() -> None:
    class Context(BaseInferenceContext):
        def is_static_batching(self) -> bool:
            return False

    context = Context(**megatron.last_logits_only())
    assert (context if megatron.VERSION < (0, 17) else context.config).materialize_only_last_token_logits


@pytest.mark.skipif(megatron.VERSION < (0, 18), reason="the flag came with 0.18")
@pytest.mark.parametrize("before", [False, True])
def test_the_flag_of_inference_is_as_it_was_also_after_an_error(before: bool) -> None:
    from megatron.core.inference.utils import InferenceMode

    (InferenceMode.set_active if before else InferenceMode.unset_active)()
    try:
        with pytest.raises(KeyError), megatron.inference_flag():
            assert InferenceMode.is_active()
            raise KeyError
        assert InferenceMode.is_active() == before
    finally:
        InferenceMode.unset_active()


def test_what_a_save_replaces_is_there() -> None:
    assert callable(vars(FileSystemWriterAsync)[megatron.shard_writer()].__func__)
    other = "write_preloaded_data_multithread" if megatron.VERSION < (0, 17) else "write_preloaded_data_multiproc"
    assert not hasattr(FileSystemWriterAsync, other), "a save would write with what is not watched"
    common = megatron.common_writer()
    assert common is None or callable(vars(common[0])[common[1]])
    assert common is not None or not hasattr(serialization, "save_common")


def test_a_save_is_watched_while_it_is_asked_for() -> None:
    def writers() -> list[object]:
        names = ("write_preloaded_data", megatron.shard_writer(), "finish")
        return [*(vars(FileSystemWriterAsync)[name] for name in names), serialization.save_config]

    before, parts = writers(), []

    @contextlib.contextmanager
    def part() -> Iterator[None]:
        with contextlib.suppress(OSError):
            parts.append("entered")
            yield

    with pytest.raises(KeyError), megatron.watched_writers(part):
        assert all(now is not then for now, then in zip(writers(), before, strict=True))
        serialization.save_config(CheckpointingConfig("torch_dist", 1), "/nowhere")
        raise KeyError
    assert parts == ["entered"]
    assert writers() == before


def test_a_save_of_a_process_that_uses_cuda_forks_nothing(
    one_rank: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forked() -> int:
        raise AssertionError("a child of this process would lack its pinned memory")

    monkeypatch.setattr(megatron, "must_write_in_process", lambda: megatron.VERSION < (0, 17))
    monkeypatch.setattr(os, "fork", forked)
    saved, other = tiny_optimization(seed=1), tiny_optimization(seed=2)
    with megatron.watched_writers(contextlib.nullcontext):
        tensors.save_tensors(tmp_path, saved.policy, None)
    tensors.load(tmp_path, other.policy)
    assert all_equal(weights_of(other.policy), weights_of(saved.policy))


@pytest.mark.parametrize("offered", [True, False])
def test_a_distributed_optimizer_lacks_the_step_counters_of_torchs_adam(
    one_rank: object, tmp_path: Path, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimization = tiny_optimization(bf16=True, use_distributed_optimizer=True)
    optimizer_state.make_room(optimization)
    tensors.save_tensors(tmp_path, optimization.policy, optimization)
    if not offered:
        monkeypatch.setattr(optimizer_state, "offer_step_counters", contextlib.nullcontext)
    with contextlib.nullcontext() if offered else pytest.raises(CheckpointError, match="KeyError: 'step'"):
        tensors.load(tmp_path, optimization.policy, optimization)


@pytest.mark.parametrize("mended", [True, False])
def test_a_state_with_other_rates_is_loaded(one_rank: object, mended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, other = (tiny_optimization(lr=rate, min_lr=rate / 10) for rate in (1e-2, 1e-4))
    for optimization in (saved, other):
        optimizer_state.make_room(optimization)
    if not mended:
        monkeypatch.setattr(optimizer_state, "match_groups_by_content", contextlib.nullcontext)
    by_rates = "max_lr" in megatron_optimizer.param_group_identifier_keys
    assert by_rates == (megatron.VERSION >= (0, 17))
    with pytest.raises(ValueError, match="parameter group") if by_rates and not mended else contextlib.nullcontext():
        optimizer_state.load_state(other, saved.optimizer.state_dict())
        assert {group["max_lr"] for part in other.optimizer.chained_optimizers for group in part.param_groups} == {1e-4}


def test_a_save_is_megatrons_own() -> None:
    assert megatron.asynchronous_writer() == ({} if megatron.VERSION < (0, 17) else {"async_strategy": "mcore"})


def test_a_write_that_returns_its_error_raises_it() -> None:
    full = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        megatron.raise_write_error(lambda: (0, full))()
    assert megatron.raise_write_error(lambda: (0, ["written"]))() == (0, ["written"])
    assert megatron.raise_write_error(lambda: None)() is None


def test_a_scratch_buffer_made_in_a_rollout_can_be_trained_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_in_a_rollout(buffer: GlobalMemoryBuffer) -> torch.Tensor:
        with torch.inference_mode():
            return buffer.get_tensor((2,), torch.float32, "test")

    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", None)
    assert made_in_a_rollout(GlobalMemoryBuffer()).is_inference(), "megatron's own would do"
    megatron.use_trainable_memory_buffer()
    assert not made_in_a_rollout(parallel_state.get_global_memory_buffer()).is_inference()


def test_main_parameters_make_the_models_again(one_rank: object) -> None:
    """What an update ends with, in two calls: the main parameters, and the gather."""
    optimization = tiny_optimization(bf16=True, use_distributed_optimizer=True)
    weights = weights_of(optimization.policy)
    for buffer in optimization.wrapped[0].buffers:
        buffer.param_data.fill_(float("nan"))
    megatron.copy_main_parameters(optimization.optimizer, optimization.wrapped)
    assert all_equal(weights, weights_of(optimization.policy))



def test_weights_left_as_they_are_are_described_all_the_same(one_rank: object) -> None:
    """Without these attributes every rank would count a weight of tensor parallelism as its own."""

    def described() -> list[tuple[object, ...]]:
        layer = layers.ColumnParallelLinear(4, 6, config=settings, init_method=init_method, bias=True)
        other = layers.RowParallelLinear(
            6, 4, config=settings, init_method=init_method, bias=False, input_is_parallel=True, skip_bias_add=True
        )
        weights = (layer.weight, layer.bias, other.weight)
        return [tuple(getattr(each, name) for name in _DESCRIPTION) for each in weights]

    drawn: list[torch.Tensor] = []
    init_method = drawn.append
    settings = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True)
    with megatron.skip_weight_init():
        found = described()
    assert not drawn
    assert found == described() == [(True, 0, 1), (True, 0, 1), (True, 1, 1)]
    assert [tuple(each.shape) for each in drawn] == [(6, 4), (4, 6)]
