#!/usr/bin/env python
"""How far gradients of aligned training are from those in float64, by layer and recipe, on a published model.

    python examples/fidelity/gradients.py --model SmolLM2-135M-Instruct.Q4_1.gguf [--text FILE] [--tokens 256]

The loss is GRPO's first update, -A log p, over parts of a text with advantages 1 and -1 in turn. Of each layer the
weights of its linears are one vector; an error is its distance to float64's, divided by the length of that one. Three
are printed: of the quantized forward pass with a plain backward pass, of both quantized, and what the second adds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.batch import Sample
from megatron_rl.checkpoint.hf.load import load_hf
from megatron_rl.cli.model import model_config
from megatron_rl.families import read_model
from megatron_rl.metrics.console import print_table
from megatron_rl.models.gpt import PolicyModel, build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.quantization.linears import QuantizedLinears, parallel_linears
from megatron_rl.registry import RECIPES
from megatron_rl.run.preflight.inputs import open_tokenizer
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 64
"""Tokens of a part."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as --load-hf")
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "concepts.md")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--recipes", nargs="+", default=[name for name in RECIPES.names() if name != "none"])
    options = parser.parse_args()
    config = model_config(options.model, [], 1, 1)
    groups = initialize(config.parallel, current_platform())
    tokenizer = open_tokenizer(config)
    policy = build_model(config, current_platform(), tokenizer.vocab_size)
    load_hf(read_model(options.model), policy, groups)
    batch = batch_of(tokenizer.encode(options.text.read_text())[: options.tokens])
    policy.gpt.double()
    exact = gradients_of(policy, groups, batch)
    policy.gpt.float()
    in_fp32 = gradients_of(policy, groups, batch)
    for name in options.recipes:
        through, both = (quantized(policy, groups, batch, name, backward) for backward in (False, True))
        rows = [
            (place, *(f"{error:.2%}" for error in errors))
            for place, *errors in errors_of(exact, in_fp32, through, both)
        ]
        print_table(sys.stdout, (name, "fp32", "forward quantized", "both", "added by the backward pass"), rows)
        sys.stdout.flush()
    shut_down()
    return 0


def batch_of(token_ids: list[int]) -> TokenBatch:
    """Parts of `LENGTH` tokens, whose first one is the prompt."""
    samples = []
    for number, start in enumerate(range(0, len(token_ids), LENGTH)):
        ids = torch.tensor(token_ids[start : start + LENGTH])
        nothing = torch.zeros(len(ids))
        samples.append(
            Sample(
                token_ids=ids, loss_mask=torch.arange(len(ids)) > 0, inference_logprobs=nothing,
                versions=torch.zeros_like(ids), reward=1.0 - 2 * (number % 2), sample_id=number,
            )
        )  # fmt: skip
    return collate(samples, "cpu")


def gradients_of(policy: PolicyModel, groups: ParallelGroups, batch: TokenBatch) -> list[torch.Tensor]:
    """Of each layer all weights of its linears, as one vector."""
    scorer = Scorer(policy, groups, 1.0)
    logprobs = scorer.select(scorer.forward(policy.gpt, batch), batch).current_logprobs
    advantages = batch.samples.reward[batch.packing.sequence_index]
    (-torch.where(batch.loss_mask.bool(), advantages * logprobs, 0.0)).mean().backward()
    layers: dict[str, list[torch.Tensor]] = {}
    for name, module in parallel_linears(policy.gpt).items():
        layers.setdefault(name.split(".")[1], []).append(module.weight.grad.flatten())
    found = [torch.cat(parts) for parts in layers.values()]
    policy.gpt.zero_grad()
    return found


def quantized(
    policy: PolicyModel, groups: ParallelGroups, batch: TokenBatch, recipe: str, backward: bool
) -> list[torch.Tensor]:
    """`gradients_of` aligned training."""
    with QuantizedLinears(policy.gpt, RECIPES.get(recipe), quantizes_gradients=backward).installed():
        return gradients_of(policy, groups, batch)


def errors_of(
    exact: list[torch.Tensor],
    in_fp32: list[torch.Tensor],
    through: list[torch.Tensor],
    both: list[torch.Tensor],
) -> Iterator[tuple[str, float, float, float, float]]:
    """Of each layer, and of all."""
    found = list(zip(exact, in_fp32, through, both, strict=True))
    found.append(tuple(torch.cat(vectors) for vectors in (exact, in_fp32, through, both)))
    for place, (right, fp32, forward, whole) in enumerate(found):
        size = right.norm()
        errors = [float((vector.double() - right).norm() / size) for vector in (fp32, forward, whole)]
        name = f"layer {place}" if place < len(exact) else "all layers"
        yield name, *errors, float((whole - forward).double().norm() / size)


if __name__ == "__main__":
    sys.exit(main())
