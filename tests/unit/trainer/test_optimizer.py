"""What an update does to the weights, against the formulas written out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.objective import MicroLoss
from megatron_rl.checkpoint.optimizer_state import separate_step_counters
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import update
from tests.support.samples import gradients_of, random_samples, tiny_optimization

RATE, BETA1, BETA2, EPSILON, DECAY = 1e-2, 0.8, 0.9, 1e-3, 0.1
ADAM = {
    "lr": RATE, "lr_decay_style": "constant", "adam_beta1": BETA1, "adam_beta2": BETA2,
    "adam_eps": EPSILON, "weight_decay": DECAY,
}  # fmt: skip


def train(groups: ParallelGroups, optimization: Optimization, seed: int) -> dict[str, torch.Tensor]:
    """One update on random samples; its gradients."""
    scorer = Scorer(optimization.policy, groups, 1.0)

    def loss(logits: torch.Tensor, batch: TokenBatch) -> MicroLoss:
        logprobs = scorer.select(logits, batch).current_logprobs
        return -(logprobs * batch.loss_mask).sum(), batch.loss_mask.sum(), {}

    outcome, _ = update(optimization, [collate(random_samples(3, seed), "cpu")], scorer.forward, loss)
    assert outcome.applied
    return gradients_of(optimization)


@pytest.mark.parametrize("changes", [{}, {"use_distributed_optimizer": True}, {"bf16": True}])
def test_two_updates_of_adam(one_rank: ParallelGroups, changes: dict[str, bool]) -> None:
    """m and v are running means, divided by 1 - beta^t; decay acts on matrices alone, and on the weights directly."""
    optimization = tiny_optimization(**ADAM, **changes)
    named = dict(optimization.policy.gpt.named_parameters())
    weights = {name: parameter.detach().float().clone() for name, parameter in named.items()}
    means = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    squares = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for count in (1, 2):
        for name, gradient in train(one_rank, optimization, seed=count).items():
            means[name] = BETA1 * means[name] + (1 - BETA1) * gradient
            squares[name] = BETA2 * squares[name] + (1 - BETA2) * gradient.square()
            mean, square = means[name] / (1 - BETA1**count), squares[name] / (1 - BETA2**count)
            decay = DECAY if weights[name].dim() > 1 else 0.0
            weights[name] -= RATE * (mean / (square.sqrt() + EPSILON) + decay * weights[name])
        for name, parameter in named.items():
            tolerance = {"rtol": 1e-2, "atol": 1e-3} if changes.get("bf16") else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(parameter.detach().float(), weights[name], **tolerance, msg=name)


def test_bf16_keeps_what_is_too_small_for_bf16(one_rank: ParallelGroups) -> None:
    """Updates of 1e-4 of a weight round away in bf16; the fp32 masters add them up."""
    optimization = tiny_optimization(bf16=True, lr=2e-4, lr_decay_style="constant", weight_decay=0.0, train_iters=60)
    weight = optimization.policy.gpt.output_layer.weight
    before = weight.detach().clone()
    train(one_rank, optimization, seed=1)
    after_one = (weight != before).float().mean()
    for _ in range(30):
        train(one_rank, optimization, seed=1)
    assert (weight != before).float().mean() > 2 * after_one


def test_the_fused_kernel_is_used(one_rank: ParallelGroups) -> None:
    groups = tiny_optimization(**ADAM).optimizer.chained_optimizers[0].optimizer.param_groups
    assert [group["fused"] for group in groups] == [True] * len(groups)


def test_a_loaded_step_counter_lies_where_the_fused_kernel_counts() -> None:
    """megatron loads one counter, on the host, for all; "meta" stands for another device."""
    parameters = [torch.nn.Parameter(torch.zeros(2, device=device)) for device in ("cpu", "cpu", "meta")]
    counter = torch.tensor(7.0)
    state = {parameter: {"step": counter} for parameter in parameters}
    part = SimpleNamespace(optimizer=SimpleNamespace(state=state))
    separate_step_counters(SimpleNamespace(optimizer=SimpleNamespace(chained_optimizers=[part])))
    first, second, third = (state[parameter]["step"] for parameter in parameters)
    assert third.device.type == "meta"
    assert first.add_(1) == 8 and second == 7 and counter == 7


def main_gradients(optimization: Optimization) -> list[torch.Tensor]:
    """Of the parameters that the optimizer changes."""
    return [p.grad for part in optimization.optimizer.chained_optimizers for p in part.get_parameters()]


def test_the_norm_of_the_gradients_is_read_by_the_host_once(one_rank: ParallelGroups) -> None:
    """megatron's own stand-in for the kernels of Transformer Engine reads one norm a parameter."""
    optimization = tiny_optimization(**ADAM)
    train(one_rank, optimization, seed=1)
    expected = torch.cat([gradient.flatten().double() for gradient in main_gradients(optimization)]).norm()
    reads = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            reads.extend([function] if "_local_scalar_dense" in str(function) else [])
            return function(*args, **kwargs or {})

    with Reads():
        norm = optimization.optimizer.get_grad_norm()
    assert len(reads) == 1
    assert norm == pytest.approx(expected.item(), rel=1e-6)
