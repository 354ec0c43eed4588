"""The real Transformer Engine on one GPU. Run with: bash tests/run.sh tests/gpu/test_gpu_transformer_engine.py

What is around its layers is tested on CPUs with a fake one (tests/parity/test_transformer_engine.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.registry import RECIPES
from tests.gpu.test_gpu_engine import _generate, _trainer_logprobs
from tests.support.hugging_face import batch_of
from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy

pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed", exc_type=ImportError)
pytestmark = pytest.mark.gpu

ENGINE = {"transformer_impl": "transformer_engine"}
SIZES = {"hidden_size": 256, "ffn_hidden_size": 512}
"""Blockwise products want multiples of 128."""
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 256, "qk_layernorm": True}


def _batch(policy, lengths):
    from megatron_rl.trainer.packing import collate
    from tests.support.samples import make_sample

    ids = batch_of(VOCABULARY, lengths).samples.token_ids[: sum(lengths)].split(list(lengths))
    samples = [make_sample(part, 1, 0.0, 0.0) for part in ids]
    return collate(samples, policy.device)


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 5e-3), (True, 0.1)])
def test_the_same_weights_give_the_log_probs_of_local_layers(
    one_rank: ParallelGroups, tmp_path: Path, bf16: bool, tolerance: float
) -> None:
    from megatron_rl.checkpoint.saving import SaveAttempt
    from megatron_rl.checkpoint.tensors import load, save_tensors
    from megatron_rl.trainer.scoring import Scorer

    local, other = tiny_policy(tiny_config(bf16=bf16)), tiny_policy(tiny_config(bf16=bf16, **ENGINE), seed=2)
    with SaveAttempt(tmp_path, is_main=True).collective_part():  # as in a run, where nothing is forked
        save_tensors(tmp_path, local, None)
    load(tmp_path, other)
    batch = _batch(local, (40, 3, 17))
    ours, theirs = (Scorer(policy, one_rank, 1.0).logprobs([batch])[0] for policy in (local, other))
    assert (ours - theirs).abs().max() < tolerance


@pytest.mark.parametrize("bf16", [False, True])
def test_rollouts_agree_with_a_full_forward_pass(one_rank: ParallelGroups, bf16: bool) -> None:
    policy = tiny_policy(tiny_config(bf16=bf16, **ENGINE))
    gap = _trainer_logprobs(policy, _generate(policy, greedy=False), one_rank)
    assert gap.max() < (0.15 if bf16 else 5e-3)


def test_greedy_decoding_is_the_argmax_of_a_full_forward_pass(one_rank: ParallelGroups) -> None:
    from megatron_rl.trainer.scoring import Scorer

    policy = tiny_policy(tiny_config(**ENGINE))
    scorer = Scorer(policy, one_rank, 1.0)
    for request, completions in _generate(policy, greedy=True)[:3]:
        prompt, answer = len(request.prompt_ids), tuple(completions[0].token_ids)
        batch = _batch(policy, (prompt + len(answer),))
        batch.samples.token_ids.copy_(torch.tensor([*request.prompt_ids, *answer]))
        best = scorer.logprobs_and_top([batch])[0][1][prompt - 1 : -1]
        assert best.tolist() == list(answer)


@pytest.mark.parametrize("bf16", [False, True])
def test_experts_have_the_log_probs_and_gradients_of_local_layers(
    one_rank: ParallelGroups, tmp_path: Path, bf16: bool
) -> None:
    """Of most tokens: at a near tie another rounding is another expert."""
    from megatron_rl.checkpoint.saving import SaveAttempt
    from megatron_rl.checkpoint.tensors import load, save_tensors
    from megatron_rl.trainer.scoring import Scorer

    shape = {"bf16": bf16, **EXPERTS, **SIZES}
    local, other = tiny_policy(tiny_config(**shape)), tiny_policy(tiny_config(**shape, **ENGINE), seed=2)
    with SaveAttempt(tmp_path, is_main=True).collective_part():
        save_tensors(tmp_path, local, None)
    load(tmp_path, other)
    batch, found = _batch(local, (40, 3, 17)), []
    for policy in (local, other):
        scorer = Scorer(policy, one_rank, 1.0)
        logprobs = scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs
        logprobs.sum().backward()
        stacks = [layer.mlp.experts.linear_fc1.weight.grad for layer in policy.layers]
        found.append((logprobs.detach(), torch.stack(stacks).float()))
    (ours, our_gradient), (theirs, their_gradient) = found
    assert (ours - theirs).abs().median() < (0.05 if bf16 else 5e-3)
    cosine = torch.nn.functional.cosine_similarity(our_gradient.flatten(), their_gradient.flatten(), 0)
    assert cosine > (0.95 if bf16 else 0.99)


@pytest.mark.parametrize("fp8", [{}, {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}])
def test_rollouts_of_experts_agree_with_a_full_forward_pass(one_rank: ParallelGroups, fp8: dict[str, str]) -> None:
    policy = tiny_policy(tiny_config(bf16=True, **fp8, **ENGINE, **EXPERTS, **SIZES))
    gap = _trainer_logprobs(policy, _generate(policy, greedy=False), one_rank)
    assert gap.mean() < 0.05


@pytest.mark.parametrize("shape", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_an_fp8_update_is_finite_and_seen_by_the_next_pass(
    one_rank: ParallelGroups, recipe: str, shape: dict[str, object]
) -> None:
    """13 tokens: no multiple of what fp8 products want. A larger learning rate overshoots, in bf16 too."""
    from megatron_rl.trainer.optimizer import Optimization
    from megatron_rl.trainer.scoring import Scorer
    from megatron_rl.trainer.update import update

    config = tiny_config(bf16=True, fp8_format="e4m3", fp8_recipe=recipe, lr=1e-4, **ENGINE, **SIZES, **shape)
    policy = tiny_policy(config)
    optimization, scorer = Optimization(policy, config), Scorer(policy, one_rank, 1.0)
    batch = _batch(policy, (9, 4))
    before = scorer.logprobs([batch])[0]

    def loss(logits: torch.Tensor, batch):
        total = -scorer.select(logits, batch).current_logprobs.sum()
        return total, torch.tensor(batch.samples.token_ids.numel(), device=policy.device), {}

    for _ in range(3):
        outcome, _ = update(optimization, [batch], scorer.forward, loss)
        assert outcome.applied and outcome.grad_norm > 0
    after = scorer.logprobs([batch])[0]
    assert after.isfinite().all()
    assert after.sum() > before.sum(), "the loss went up, or the pass ran on the weights before the updates"


def test_fp8_rollouts_agree_with_the_fp8_trainer(one_rank: ParallelGroups) -> None:
    config = tiny_config(bf16=True, fp8_format="e4m3", fp8_recipe="blockwise", **ENGINE, **SIZES)
    policy = tiny_policy(config)
    gap = _trainer_logprobs(policy, _generate(policy, greedy=False), one_rank)
    assert gap.mean() < 0.05


@pytest.mark.parametrize(("name", "power_of_two"), [("fp8_block", False), ("fp8_block_pow2", True)])
def test_our_block_recipes_are_transformer_engines(name: str, power_of_two: bool) -> None:
    """Weights in tiles of 128 x 128, activations in segments of 128: the same numbers, but for a scale's last bit."""
    import transformer_engine_torch
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    def quantised(x: torch.Tensor, dimensions: int) -> torch.Tensor:
        quantizer = Float8BlockQuantizer(
            fp8_dtype=transformer_engine_torch.DType.kFloat8E4M3,
            rowwise=True,
            columnwise=False,
            amax_epsilon=0.0,
            force_pow_2_scales=power_of_two,
            block_scaling_dim=dimensions,
        )
        return quantizer(x).dequantize().float()

    generator = torch.Generator("cuda").manual_seed(1)
    weight, x = (torch.randn(rows, 512, device="cuda", generator=generator).bfloat16() for rows in (256, 64))
    recipe = RECIPES.get(name)
    q = recipe.quantize(weight)
    for ours, theirs in (
        (recipe.dequantize(q).bfloat16().float(), quantised(weight, 2)),
        (recipe.round_trip(x, q).float(), quantised(x, 1)),
    ):
        assert (ours - theirs).norm() < 2e-3 * theirs.norm()
        assert ((ours - theirs).abs() > 0.01 * theirs.abs()).float().mean() < 1e-3


def test_weights_that_are_codes(one_rank: ParallelGroups, tmp_path: Path) -> None:
    """At the start, after an update and after a resume: what `fp8_block_pow2` makes of main parameters in bf16."""
    from megatron_rl.checkpoint.manager import CheckpointManager
    from megatron_rl.checkpoint.run_state import RunState
    from megatron_rl.trainer.optimizer import Optimization

    flags = {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": True}
    config = tiny_config(**ENGINE, **SIZES, **flags, use_distributed_optimizer=True)
    policy, other = tiny_policy(config), tiny_policy(config, seed=2)
    first = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    optimizations = [Optimization(each, config) for each in (policy, other)]
    recipe, manager = RECIPES.get("fp8_block_pow2"), CheckpointManager(tmp_path, 0, one_rank)
    for number in range(2):
        for name, module in linears(policy).items():
            numbers = policy.fp8_weights.main_values(module.weight)
            assert number or torch.equal(numbers, first[name]), name
            copy = recipe.allocate(numbers.shape, numbers.device)
            recipe.encode(numbers, copy)
            assert torch.equal(recipe.dequantize(copy), module.weight.dequantize().float()), name
        optimizations[0].zero_grad()
        for parameter in policy.parameters():
            parameter.main_grad.normal_()
        optimizations[0].step()
    manager.save(RunState(step=2), policy, optimizations[0])
    manager.resume(manager.newest(), other, optimizations[1])
    for name, module in linears(other).items():
        assert torch.equal(module.weight.dequantize(), linears(policy)[name].weight.dequantize()), name


def linears(policy: PolicyModel) -> dict[str, torch.nn.Module]:
    """Those of the layers, by the names of their weights."""
    prefixed = ((f"decoder.layers.{layer.layer_number - 1}", layer) for layer in policy.layers)
    named = (pair for prefix, layer in prefixed for pair in layer.named_modules(prefix=prefix))
    return {f"{name}.weight": module for name, module in named if hasattr(module, "te_return_bias")}
