"""Tiny models with quantised copies of their linears, and rollouts on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.inference.engine import Engine
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.platform.device import storages_of
from megatron_rl.quantization.audit import LayerAudit
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.registry import RECIPES
from megatron_rl.types import Completion, Request
from tests.support.generation import drain, ragged_requests, randomise_vectors
from tests.support.scoring import packed
from tests.support.tiny import tiny_config, tiny_policy

QUANTIZING = tuple(name for name in RECIPES.names() if name != "none")
"""Every recipe that changes a number."""
INT4 = f"{Path(__file__).parents[2]}/examples/fidelity/int4.py:RECIPE"
"""Rounds the weights only."""
LINEARS = tuple(
    f"layers.{layer}.{name}"
    for layer in (0, 1)
    for name in ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
)
"""Those of the tiny model."""


def quantizable_policy(**changes: object) -> PolicyModel:
    """A tiny model whose biases and norm weights are not 0 and 1."""
    policy = tiny_policy(tiny_config(**changes))
    randomise_vectors(policy)
    return policy


def linears_of(
    policy: PolicyModel, recipe: str = "int8", skip: Sequence[str] = (), *, quantizes_gradients: bool = False
) -> QuantizedLinears:
    """The quantised copies of a tiny model."""
    return QuantizedLinears(policy.gpt, RECIPES.get(recipe), skip, quantizes_gradients=quantizes_gradients)


def rollout_quantization(
    policy: PolicyModel, recipe: str, audits: list[Sequence[LayerAudit]] | None = None, skip: Sequence[str] = ()
) -> RolloutQuantization:
    """As a run has it; the tables of its audits go to ``audits``."""
    report = (lambda _: None) if audits is None else audits.append
    return RolloutQuantization(policy.gpt, recipe, skip, report)


def held_bytes(linears: QuantizedLinears) -> int:
    """On the device now, with what only CPUs need."""
    tensors = (tensor for layer in linears.layers for tensor in layer.weight.tensors)
    return sum(storage.nbytes() for storage in storages_of(tensors))


def short_requests(count: int = 6, **sampling: object) -> list[Request]:
    """Two samples of up to 16 tokens for each of some prompts."""
    return ragged_requests(count, num_samples=2, **{"max_new_tokens": 16} | sampling)


def complete(
    policy: PolicyModel, engine: Engine, quantization: RolloutQuantization, requests: Sequence[Request]
) -> list[tuple[Completion, ...]]:
    """A rollout phase, calibrated by the requests themselves where the recipe wants it."""

    def run() -> list[tuple[Completion, ...]]:
        engine.begin(seed=1, policy_version=0)
        for wanted in requests:
            engine.submit(wanted)
        return drain(engine, requests)

    with rollout_mode(policy), calibrated_rollout(quantization, run):
        return run()


@contextlib.contextmanager
def calibrated_rollout(quantization: RolloutQuantization, generate: Callable[[], object]) -> Iterator[None]:
    """`RolloutQuantization.rollout`, after ``generate`` where the recipe calibrates and has not yet."""
    if quantization.wants_calibration:
        with quantization.calibrating():
            generate()
    with quantization.rollout():
        yield


def roll_out(
    policy: PolicyModel, engine: Engine, quantization: RolloutQuantization, requests: Sequence[Request]
) -> TokenBatch:
    """The rollout's samples as one micro-batch."""
    return packed(requests, complete(policy, engine, quantization, requests))


@torch.no_grad()
def disturb(policy: PolicyModel, by: float) -> None:
    """Change the weights of all the decoder's linears by ``by`` times their spread."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in policy.named_parameters():
        if name.startswith("decoder.layers.") and parameter.dim() == 2:
            parameter.add_(by * parameter.std() * torch.randn(parameter.shape, generator=generator))
