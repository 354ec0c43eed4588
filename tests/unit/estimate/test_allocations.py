"""The estimate against what real models, optimizers, caches and quantised copies allocate."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import megatron_rl.run.memory.estimate_parts
from megatron_rl.algorithms import logprobs
from megatron_rl.algorithms.objective import MicroLoss
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.models.attention.selection import requirements_of
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.registry import RECIPES
from megatron_rl.run.memory.estimate import Estimate, estimate
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.policy import ReferencePolicy
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import update
from tests.support.generation import rollout_engine
from tests.support.samples import make_sample, random_samples
from tests.support.tiny import LATENT, SHAPES, VOCABULARY, tiny_config, tiny_policy

PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "bf16 gradients": {"bf16": True, "grad_reduce_in_bf16": True},
    "distributed": {"use_distributed_optimizer": True},
    "distributed bf16": {"bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "distributed bf16 gradients": {"bf16": True, "use_distributed_optimizer": True, "grad_reduce_in_bf16": True},
    "fp8 and bf16 moments": {
        "bf16": True, "use_distributed_optimizer": True, "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16",
    },
    "sgd": {"optimizer": "sgd", "lr": 1e-3},
    "sgd without momentum": {"optimizer": "sgd", "sgd_momentum": 0},
}  # fmt: skip


def estimated(config: RLConfig) -> Estimate:
    return estimate(config, 1, VOCABULARY)


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind the tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def alive() -> list[torch.Tensor]:
    """All tensors of the process."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


# -- parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_weights(one_rank: ParallelGroups, changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    policy = tiny_policy(config)
    result = estimated(config)
    assert (result.sizes.parameters, result.sizes.parameters_per_rank) == (policy.num_parameters, policy.num_parameters)
    assert result.sizes.padded_vocab_size == policy.padded_vocab_size
    assert result.weights.update == held(policy.gpt.parameters())


# -- gradients and optimizer -------------------------------------------------------------------


def after_an_update(config: RLConfig, groups: ParallelGroups) -> Optimization:
    optimization = Optimization(tiny_policy(config), config)
    scorer = Scorer(optimization.policy, groups, 1.0)

    def loss(logits: torch.Tensor, batch) -> MicroLoss:
        return -scorer.select(logits, batch).current_logprobs.sum(), batch.loss_mask.sum(), {}

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
    buffers = optimization.wrapped[0].buffers
    assert result.weights.update == held(parameters)
    assert result.gradients.update == sum(buffer.grad_data.nbytes for buffer in buffers)
    known = {t.untyped_storage().data_ptr() for t in (*parameters, *(buffer.grad_data for buffer in buffers))}
    own = [t for t in optimizer_tensors(optimization) if t.untyped_storage().data_ptr() not in known]
    assert result.optimizer.update == sum({t.data_ptr(): t.nbytes for t in own}.values())


# -- rollouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bf16": True, "num_layers": 3},
        {"seq_length": 8},
        {"inference_max_batch_size": 5, "inference_max_seq_length": 40},
        {"inference_dynamic_batching_buffer_size_gb": 1e-4},
        {"rl_kv_cache_dtype": "fp8"},
        {"rl_kv_cache_dtype": "fp8", "inference_dynamic_batching_buffer_size_gb": 1e-4},
        {"rl_kv_cache_dtype": "bf16"},
    ],
)
def test_kv_cache(one_rank: ParallelGroups, changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    engine = rollout_engine(
        tiny_policy(config),
        max_batch_size=config.rollout.inference_max_batch_size,
        max_sequence_length=config.rollout.inference_max_seq_length,
        cache_budget_gb=config.rollout.inference_dynamic_batching_buffer_size_gb,
        kv_cache_dtype=requirements_of(config).cache_dtype,
    )
    result = estimated(config)
    assert result.sizes.cache_slots == engine.max_batch_size
    assert result.kv_cache.rollout == held([*engine.cache.keys, *engine.cache.values])


@pytest.mark.parametrize("recipe", [name for name in RECIPES.names() if name != "none"])
@pytest.mark.parametrize("skip", [(), ("first:1",), ("last:2", "*.linear_proj")])
def test_quantised_copies(one_rank: ParallelGroups, recipe: str, skip: tuple[str, ...]) -> None:
    shape = {"num_layers": 3, "ffn_hidden_size": 200}
    config = tiny_config(**shape, rl_rollout_quantization=recipe)
    config = replace(config, quantization=replace(config.quantization, rl_quantization_skip=skip))
    copies = QuantizedLinears(tiny_policy(config).gpt, RECIPES.get(recipe), skip)
    assert estimated(config).quantized.update == copies.stored_bytes > 0


FOUR_BITS = """
import torch
from megatron_rl.quantization.recipe import QuantizedWeight
from megatron_rl.quantization.recipes.int8 import Int8

class FourBits(Int8):
    name, bits, scale_bytes, tile = "four_bits", 4, 1, (1, 16)

    def allocate(self, shape, device):
        rows, columns = self.stored_shape(*shape)
        codes = torch.zeros(rows, columns // 2, dtype=torch.uint8, device=device)
        scales = torch.zeros(rows, columns // 16, dtype=torch.float8_e4m3fn, device=device)
        return QuantizedWeight(codes, scales, *shape)

RECIPE = FourBits()
"""


def test_a_recipe_of_four_bits_by_its_path(one_rank: ParallelGroups, tmp_path: Path) -> None:
    (tmp_path / "four_bits.py").write_text(FOUR_BITS)
    recipe = f"{tmp_path}/four_bits.py:RECIPE"
    config = tiny_config(num_layers=3, ffn_hidden_size=200, rl_rollout_quantization=recipe)
    copies = QuantizedLinears(tiny_policy(config).gpt, RECIPES.get(recipe))
    bytes_ = estimated(config).quantized.update
    assert bytes_ == copies.stored_bytes
    eight = replace(config, quantization=replace(config.quantization, rl_rollout_quantization="int8"))
    assert bytes_ < 0.6 * estimated(eight).quantized.update


def test_unquantised_rollouts_have_no_copies() -> None:
    assert estimated(tiny_config()).quantized.update == 0


def test_weights_that_are_codes_stay_in_rollouts() -> None:
    """Nothing else makes the rollouts' copies of them; in bytes they are those of bf16, being there for both passes."""
    flags = {
        "bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise", "transformer_impl": "transformer_engine",
        "use_distributed_optimizer": True, "rl_rollout_quantization": "fp8_block_pow2",
    }  # fmt: skip
    plain, codes = (estimate(tiny_config(**flags, fp8_param_gather=codes), 1, VOCABULARY) for codes in (False, True))
    assert plain.weights.rollout < codes.weights.rollout == codes.weights.update == plain.weights.update


def test_the_reference_is_two_copies_in_host_memory(one_rank: ParallelGroups) -> None:
    config = tiny_config(bf16=True, grpo_kl_beta=0.01)
    policy, before = tiny_policy(config), held(alive())
    reference = ReferencePolicy(policy)
    assert estimated(config).reference.host == 2 * (held(alive()) - before)
    with reference.swapped_in():
        assert estimated(config).reference.host == held(alive()) - before
    assert estimated(tiny_config()).reference.host == 0
    assert estimated(tiny_config()).training == estimated(tiny_config(grpo_kl_beta=0.01)).training


# -- activations -------------------------------------------------------------------------------

TOKENS = 512
LAYERS = 4
BIN = {
    "seq_length": TOKENS, "micro_batch_size": 1, "num_layers": LAYERS, "hidden_size": 128, "ffn_hidden_size": 320,
    "normalization": "LayerNorm",
}  # fmt: skip
"""Two sequences, the longer one too long for the CPU's explicit attention, and the norm that is one kernel on a CPU
too: it then keeps what a GPU keeps."""
LATENT_BIN = LATENT | {
    "q_lora_rank": 96, "kv_lora_rank": 64, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 48,
    "kv_channels": 48, "num_layers": LAYERS, "softmax_scale": False,
}  # fmt: skip
"""Values are as wide as keys: for others torch's kernel on a CPU keeps the scores, too."""
VARIANTS = {
    "gated": {},
    "gelu and qk norms": {"swiglu": False, "qk_layernorm": True},
    "attention recomputed": {"recompute_activations": True},
    "attention recomputed, qk norms": {"recompute_activations": True, "qk_layernorm": True},
    "latent": LATENT_BIN | {"q_lora_rank": False},
    "latent queries": LATENT_BIN,
    "latent, attention recomputed": LATENT_BIN | {"recompute_activations": True, "v_head_dim": 24},
    "MLP recomputed": {"recompute_granularity": "selective", "recompute_modules": "mlp"},
}


def kept_for_backward(config: RLConfig, groups: ParallelGroups) -> int:
    """Bytes that autograd holds after the forward pass of a full bin, parameters not among them."""
    policy, kept = tiny_policy(config), []
    # Not of one length: rows without padding are not copied for the product, which would keep less.
    batch = collate([make_sample([1] * length) for length in (TOKENS // 2 + 1, TOKENS // 2 - 1)], "cpu")
    parameters = {parameter.untyped_storage().data_ptr() for parameter in policy.gpt.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = Scorer(policy, groups, 1.0).forward(policy.gpt, batch)
        assert logits.requires_grad
        return held(tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in parameters)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_activations_of_a_bin(one_rank: ParallelGroups, changes: dict[str, object]) -> None:
    config = tiny_config(**BIN | changes)
    assert estimated(config).activations.update == pytest.approx(kept_for_backward(config, one_rank), rel=0.03)


@pytest.mark.parametrize(
    ("method", "count", "inputs", "alive"), [("uniform", 2, 2, 2), ("uniform", 4, 1, 4), ("block", 4, 4, 1)]
)
def test_activations_with_whole_layers_recomputed(
    one_rank: ParallelGroups, method: str, count: int, inputs: int, alive: int
) -> None:
    """The forward pass keeps the groups' inputs; of the ``alive`` layers of one group the backward pass has all."""
    border = 4 * TOKENS * 128
    plain = estimated(tiny_config(**BIN)).activations.update
    layer = (plain - 2 * border) // LAYERS
    config = tiny_config(
        **BIN, recompute_granularity="full", recompute_method=method, recompute_num_layers=count
    )
    kept = kept_for_backward(config, one_rank)
    assert kept == pytest.approx((inputs + 2) * border, rel=0.1)
    assert estimated(config).activations.update == (inputs + 2) * border + alive * layer


def test_only_some_layers_recomputed(one_rank: ParallelGroups) -> None:
    config = tiny_config(
        **BIN, recompute_granularity="full", recompute_method="block", recompute_num_layers=1
    )
    assert estimated(config).activations.update == pytest.approx(kept_for_backward(config, one_rank), rel=0.03)


@pytest.mark.parametrize(
    "changes", [{}, {"grpo_entropy_term_weight": 0.01}, {"hidden_size": 64}], ids=["plain", "entropy", "wide"]
)
@pytest.mark.parametrize("is_fused", [False, True], ids=["whole", "fused"])
def test_training_logits(
    one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch, is_fused: bool, changes: dict[str, object]
) -> None:
    """The most that output layer and log-probs allocate, forward and backward; a CPU has chunks in fp32 besides."""
    monkeypatch.setattr(megatron_rl.run.memory.estimate_parts, "PRODUCT_ELEMENTS", 2**17)
    monkeypatch.setattr(logprobs, "CPU_PRODUCT_ELEMENTS", 2**17)
    monkeypatch.setattr(logprobs, "CPU_CHUNK_ELEMENTS", 2**14)
    config = tiny_config(
        **{"hidden_size": 16} | changes, make_vocab_size_divisible_by=4096, seq_length=512, micro_batch_size=1,
        rl_fused_output_layer=is_fused,
    )  # fmt: skip
    tokens, entropy = 512, "differentiable" if "grpo_entropy_term_weight" in changes else "detached"
    hidden = torch.randn(tokens, config.model.hidden_size, requires_grad=True)
    weight = torch.randn(4096, config.model.hidden_size, requires_grad=True)
    ids, positions = torch.randint(4096, (tokens,)), torch.arange(tokens)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        output = hidden if is_fused else hidden @ weight.t()
        own = {"vocab_size": 4096, "weight": weight if is_fused else None}
        values, entropies = logprobs.selected_logprobs(output, ids, positions, **own, entropy=entropy, overwrite=True)
        del output
        (values.sum() + (entropies.sum() if entropies.requires_grad else 0)).backward()
    allocated = most = 0
    for event in profiled.profiler.kineto_results.events():
        allocated += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, allocated)
    chunks = (4 if entropy == "differentiable" else 2) * 4 * 2**14
    assert estimate(config, 1, 4096).training_logits.update + chunks == pytest.approx(most, rel=0.1)
