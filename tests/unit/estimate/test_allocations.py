"""The estimate against what real models, optimizers, caches and quantised copies allocate."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from megatron_rl.algorithms import logprobs
from megatron_rl.attention import sdpa
from megatron_rl.config import RLConfig
from megatron_rl.estimate import Estimate, estimate, memory
from megatron_rl.estimate.parameters import padded_vocabulary, parameter_sizes
from megatron_rl.models import PolicyModel
from megatron_rl.models.gpt import padded_vocabulary as vocabulary_of_a_model
from megatron_rl.packing.collate import collate
from megatron_rl.parallel import ParallelGroups
from megatron_rl.quantization import available_recipes, get_recipe
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.trainer import Optimization
from megatron_rl.trainer.accumulate import MicroLoss, update
from megatron_rl.trainer.reference import ReferencePolicy
from megatron_rl.trainer.scoring import Scorer
from tests.support.generation import rollout_engine
from tests.support.ranks import run_ranks
from tests.support.samples import make_sample, random_samples
from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy

SHAPES = {
    "grouped, gated, untied": {},
    "tied": {"untie_embeddings_and_output_weights": False},
    "as many groups as heads": {"group_query_attention": False, "num_query_groups": False},
    "all biases": {"disable_bias_linear": False},
    "no bias": {"add_qkv_bias": False},
    "qk norms": {"qk_layernorm": True, "num_layers": 3},
    "gelu": {"swiglu": False, "ffn_hidden_size": 40},
    "layer norms": {"normalization": "LayerNorm", "qk_layernorm": True},
    "wide heads": {"kv_channels": 12},
    "odd widths": {"hidden_size": 36, "ffn_hidden_size": 52, "make_vocab_size_divisible_by": 24},
}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "bf16 gradients": {"bf16": True, "grad_reduce_in_bf16": True},
    "distributed": {"use_distributed_optimizer": True},
    "distributed bf16": {"bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "distributed bf16 gradients": {"bf16": True, "use_distributed_optimizer": True, "grad_reduce_in_bf16": True},
    "sgd": {"optimizer": "sgd", "lr": 1e-3},
    "sgd without momentum": {"optimizer": "sgd", "sgd_momentum": 0},
}


def estimated(config: RLConfig) -> Estimate:
    return estimate(config, 1, VOCABULARY)


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind the tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def sizes_of(policy: PolicyModel) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in policy.gpt.named_parameters()}


# -- parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_every_parameter(one_rank: ParallelGroups, changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    policy = tiny_policy(config)
    assert parameter_sizes(config, policy.padded_vocab_size) == sizes_of(policy)
    result = estimated(config)
    assert (result.parameters, result.parameters_per_rank) == (policy.num_parameters, policy.num_parameters)
    assert result.padded_vocab_size == policy.padded_vocab_size
    assert result.weights == held(policy.gpt.parameters())


@pytest.mark.parametrize(("vocabulary", "divisible_by", "parts"), [(33, 8, 2), (151665, 128, 8), (1, 1, 1)])
def test_padding_is_the_models(vocabulary: int, divisible_by: int, parts: int) -> None:
    config = tiny_config(
        parts, tensor_model_parallel_size=parts, make_vocab_size_divisible_by=divisible_by,
        num_attention_heads=8, num_query_groups=8,
    )  # fmt: skip
    assert padded_vocabulary(config, vocabulary) == vocabulary_of_a_model(vocabulary, divisible_by, parts)


def one_of_two_ranks(changes: dict[str, object]) -> dict[str, int]:
    """Runs on each rank: its parameters."""
    from megatron_rl.parallel import initialize
    from megatron_rl.platform import current_platform

    config = tiny_config(2, tensor_model_parallel_size=2, **changes)
    initialize(config.parallel, current_platform())
    return sizes_of(tiny_policy(config))


def test_every_parameter_of_two_tensor_ranks() -> None:
    """With fewer groups than ranks each rank stores half a group, and caches all of it."""
    changes = {"num_query_groups": 1, "disable_bias_linear": False, "qk_layernorm": True}
    config = tiny_config(2, tensor_model_parallel_size=2, **changes)
    expected = parameter_sizes(config, padded_vocabulary(config, VOCABULARY))
    ranks = run_ranks("tests.unit.estimate.test_allocations:one_of_two_ranks", 2, changes=changes)
    assert ranks == [expected, expected]


# -- gradients and optimizer -------------------------------------------------------------------


def after_an_update(config: RLConfig, groups: ParallelGroups) -> Optimization:
    optimization = Optimization(tiny_policy(config), config)
    scorer = Scorer(optimization.policy, groups.tensor_group, 1.0)

    def loss(logits: torch.Tensor, batch) -> MicroLoss:
        return MicroLoss(-scorer.select(logits, batch).logprobs.sum(), batch.loss_mask.sum(), None)

    outcome, _ = update(optimization, [collate(random_samples(3), "cpu")], scorer.forward, loss)
    assert outcome.applied
    return optimization


def optimizer_tensors(optimization: Optimization) -> list[torch.Tensor]:
    """Moments, main parameters and their gradients; not the count of steps that each parameter has."""
    found = []
    for part in optimization.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            found += [value for name, value in state.items() if name != "step" and value is not None]
        for parameter in part.get_parameters():
            found += [parameter.detach(), parameter.grad]
    return found


@pytest.mark.parametrize("changes", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("shape", ["tied", "all biases", "odd widths"])
def test_weights_gradients_and_optimizer(one_rank: ParallelGroups, shape: str, changes: dict[str, object]) -> None:
    config = tiny_config(**SHAPES[shape], **changes)
    optimization = after_an_update(config, one_rank)
    result = estimated(config)
    parameters = list(optimization.policy.gpt.parameters())
    buffers = optimization.wrapped.buffers
    assert result.weights == held(parameters)
    assert result.gradients == sum(buffer.grad_data.nbytes for buffer in buffers)
    known = {t.untyped_storage().data_ptr() for t in (*parameters, *(buffer.grad_data for buffer in buffers))}
    own = [t for t in optimizer_tensors(optimization) if t.untyped_storage().data_ptr() not in known]
    assert result.optimizer == sum({t.data_ptr(): t.nbytes for t in own}.values())


# -- rollouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bf16": True, "num_layers": 3},
        {"seq_length": 8},
        {"inference_max_batch_size": 5, "inference_max_seq_length": 64},
        {"inference_dynamic_batching_buffer_size_gb": 1e-4},
    ],
)
def test_kv_cache(one_rank: ParallelGroups, changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    engine = rollout_engine(
        tiny_policy(config),
        max_batch_size=config.rollout.inference_max_batch_size,
        max_sequence_length=config.rollout.inference_max_seq_length,
        cache_budget_gb=config.rollout.inference_dynamic_batching_buffer_size_gb,
    )
    result = estimated(config)
    assert result.cache_slots == engine.num_slots
    assert result.kv_cache == held([*engine._cache.keys, *engine._cache.values])


@pytest.mark.parametrize("recipe", available_recipes())
def test_quantised_copies(one_rank: ParallelGroups, recipe: str) -> None:
    skip = ("first:1", "*.linear_proj")
    config = tiny_config(num_layers=3, ffn_hidden_size=200, rl_rollout_quantization=recipe)
    policy = tiny_policy(config)
    if recipe == "none":  # the run then builds no copies at all
        assert estimated(config).quantized == 0
        return
    everything = QuantizedLinears(policy.gpt, get_recipe(recipe))
    assert estimated(config).quantized == everything.stored_bytes
    config = tiny_config(
        num_layers=3, ffn_hidden_size=200, rl_rollout_quantization=recipe, rl_quantization_skip="first:1"
    )
    assert estimated(config).quantized == QuantizedLinears(policy.gpt, get_recipe(recipe), skip[:1], 3).stored_bytes


def test_the_reference_is_two_copies_in_host_memory(one_rank: ParallelGroups) -> None:
    config = tiny_config(bf16=True, grpo_kl_beta=0.01)
    reference = ReferencePolicy(tiny_policy(config))
    assert estimated(config).reference_on_host == 2 * held(reference._frozen)
    assert estimated(tiny_config()).reference_on_host == 0
    assert estimated(tiny_config()).training == estimated(tiny_config(grpo_kl_beta=0.01)).training


def test_numbers_written_twice_are_the_same() -> None:
    """The estimate runs without torch, so it has its own."""
    assert (memory.FEWEST_KEYS, memory.CHUNK_ELEMENTS) == (sdpa.FEWEST_KEYS, logprobs.CHUNK_ELEMENTS)


# -- activations -------------------------------------------------------------------------------

TOKENS = 512
RECOMPUTED = {
    "nothing": {},
    "nothing, gelu and qk norms": {"swiglu": False, "qk_layernorm": True},
    "attention": {"recompute_activations": True},
    "attention with qk norms": {"recompute_activations": True, "qk_layernorm": True},
    "layers in twos": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", RECOMPUTED.values(), ids=RECOMPUTED)
def test_activations_of_a_bin(one_rank: ParallelGroups, changes: dict[str, object]) -> None:
    """One sequence too long for the CPU's explicit attention, so that it runs the kernel a GPU runs."""
    config = tiny_config(
        seq_length=TOKENS, micro_batch_size=1, hidden_size=128, ffn_hidden_size=320, num_layers=4, **changes
    )
    policy = tiny_policy(config)
    batch = collate([make_sample([1] * TOKENS)], "cpu")
    kept: dict[int, int] = {}
    held_alive: list[torch.Tensor] = []
    parameters = {parameter.untyped_storage().data_ptr() for parameter in policy.gpt.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
            held_alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = Scorer(policy, one_rank.tensor_group, 1.0).forward(policy.gpt, batch)
    measured = sum(kept.values())
    result = estimated(config).activations
    if config.kernels.recompute_granularity == "full":
        one_group = 2 * (estimated(tiny_config(
            seq_length=TOKENS, micro_batch_size=1, hidden_size=128, ffn_hidden_size=320, num_layers=2
        )).activations - 2 * 4 * TOKENS * 128) / 2
        measured += one_group
    print(result, measured)
    del logits
    assert result == pytest.approx(measured, rel=0.1)
