"""One set of answers, scored by the trainer's forward pass: whole, from a layer on, with some linears quantized."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.batch import Sample
from megatron_rl.algorithms.context import SharedPrompts
from megatron_rl.algorithms.kl import kl_per_token
from megatron_rl.inference.engine import Engine
from megatron_rl.models.attention.kv_format import KVFormat
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.copies import LinearKind, QuantizedLinear, weight_of
from megatron_rl.quantization.formats import FP8, smoothing_factors
from megatron_rl.quantization.linears import parallel_linears
from megatron_rl.quantization.recipe import Recipe
from megatron_rl.registry import RECIPES
from megatron_rl.trainer.packing import collate, skipped_tokens
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import Completion, Request, SamplingParams, SourcedTask, Task

ROWS = 64
"""Answer tokens whose logits exist at once."""
Answer = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""Prompt, tokens, and the engine's log-probs of the tokens."""


@dataclass(frozen=True)
class Scores:
    """What one forward pass says about the N answer tokens of a batch."""

    logprobs: torch.Tensor
    """[N] fp32, of the tokens."""
    top: torch.Tensor
    """[N] int64, the likeliest tokens."""
    kl: torch.Tensor | None
    """[N]: the KL of the reference to this pass over the vocabulary; None where there was no reference."""
    whole: torch.Tensor | None
    """[N, V] fp32: the log-probs of the vocabulary, where they were asked for."""


@dataclass(frozen=True)
class Study:
    """A model, and how to score a batch with it."""

    policy: PolicyModel
    groups: ParallelGroups

    @torch.no_grad()
    def scores(self, batch: TokenBatch, reference: Scores | None = None, *, keeps: bool = False) -> Scores:
        """Run the trainer's forward pass; logits are computed for answer tokens alone."""
        gpt, share = self.policy.gpt, batch.packing.share
        tied = gpt.share_embeddings_and_output_weights
        head = (gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight)[: self.policy.vocab_size]
        hidden = Scorer(self.policy, self.groups, 1.0, fused=True).forward(gpt, batch)
        hidden = share.whole(hidden, self.groups.context_group)
        is_next = batch.in_loss[1:]
        hidden, targets = hidden[:-1][is_next], batch.samples.token_ids[1:][is_next]
        found: list[tuple[torch.Tensor, ...]] = []
        known = None if reference is None else reference.whole
        for start in range(0, len(targets), ROWS):
            rows = slice(start, start + ROWS)
            logprobs = (hidden[rows] @ head.t()).float().log_softmax(-1)
            own = [logprobs.gather(1, targets[rows, None])[:, 0], logprobs.argmax(-1)]
            own += [] if known is None else [(known[rows].exp() * (known[rows] - logprobs)).sum(-1)]
            found.append((*own, logprobs) if keeps else tuple(own))
        chosen, top, *others = (torch.cat(parts) for parts in zip(*found, strict=True))
        return Scores(chosen, top, others[0] if known is not None else None, others[-1] if keeps else None)


def compared(exact: Scores, scores: Scores) -> dict[str, float]:
    """Compare ``scores`` with those of fp32, by which the tokens were drawn: every KL is that of fp32 to the format."""
    gap = (exact.logprobs - scores.logprobs).abs()
    k3 = kl_per_token("k3", exact.logprobs, scores.logprobs, torch.ones_like(gap))
    figures = {
        "tokens": len(gap), "gap": float(gap.mean()), "p95": float(gap.quantile(0.95)), "largest": float(gap.max()),
        "k3": float(k3.mean()), "top1": float((exact.top == scores.top).float().mean()),
    }  # fmt: skip
    if scores.kl is not None:
        figures |= {"kl": float(scores.kl.mean()), "kl_error": float(scores.kl.std() / len(gap) ** 0.5)}
    return figures


def batch_of(answers: Sequence[Answer], device: torch.device) -> TokenBatch:
    """Pack the answers; those of one prompt stand together, and the prompt is computed once."""
    samples = []
    for number, (prompt, ids, logprobs) in enumerate(answers):
        whole = torch.tensor([*prompt, *ids])
        samples.append(
            Sample(
                token_ids=whole, loss_mask=torch.arange(len(whole)) >= len(prompt),
                inference_logprobs=torch.tensor([0.0] * len(prompt) + list(logprobs)),
                versions=torch.zeros_like(whole), sample_id=number,
            )
        )  # fmt: skip
    skipped = skipped_tokens(samples)
    batch = collate(samples, device, 1, skipped)
    share = SharedPrompts.of(batch.packing.lengths, skipped, device)
    return replace(batch, packing=replace(batch.packing, share=share))


@contextlib.contextmanager
def quantized(
    study: Study, recipe: str, names: Sequence[str] | None = None,
    channel_amax: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Run the linears of ``names`` (default: all) quantized inside the block.

    A copy exists only while its linear runs: those of all linears would double the memory. ``channel_amax`` is for
    recipes that are calibrated.
    """
    modules, chosen = parallel_linears(study.policy.gpt), RECIPES.get(recipe)
    names = list(modules if names is None else names)
    for name in names:
        amax = None if channel_amax is None else channel_amax[name]
        modules[name].forward = partial(_forward, name, modules[name], chosen, amax)
    try:
        yield
    finally:
        for name in names:
            del modules[name].forward


def _forward(
    name: str, module: torch.nn.Module, recipe: Recipe, channel_amax: torch.Tensor | None, *args: Any, **named: Any
) -> Any:
    copy = QuantizedLinear(name, module, recipe)
    if copy.weight.smoothing is not None and channel_amax is not None:
        copy.weight.smoothing.copy_(smoothing_factors(channel_amax, module.weight.abs().amax(0).float()))
    recipe.encode(module.weight, copy.weight)
    return copy.forward(*args, **named)


class RoundingCache(KVFormat):
    """Rounds keys and values as an fp8 cache whose scales are set by the very batch that it rounds."""

    def __init__(self, policy: PolicyModel) -> None:
        super().__init__(len(policy.layers), policy.config.num_query_groups, policy.dtype, FP8, policy.device)

    def round_trip(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calibrate(layer, key, value)
        return super().round_trip(layer, key, value)


@torch.no_grad()
def engine_gap(study: Study, engine: Engine, prompt: Sequence[int], tokens: int) -> float:
    """Mean |engine - trainer| of an answer that the engine draws, both with the linears as they are installed."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=tokens)
    with rollout_mode(study.policy):
        engine.begin(seed=1, policy_version=0)
        engine.submit(Request(SourcedTask("study", Task("0", "")), tuple(prompt), 1, sampling, 0))
        drawn: list[Completion] = []
        while engine.has_unfinished:
            drawn += [completion for _, completions in engine.step() for completion in completions]
    batch = batch_of([(prompt, drawn[0].token_ids, drawn[0].inference_logprobs)], study.policy.device)
    return float((study.scores(batch).logprobs - batch.inference_logprobs[batch.in_loss]).abs().mean())


@torch.no_grad()
def described(study: Study, batch: TokenBatch, recipes: Sequence[str]) -> tuple[Scores, list[torch.Tensor], dict]:
    """Score a batch in fp32; return what each layer reads, too, and figures of the inputs of each linear.

    ``error_int8``: by token the distance of the quantized product to the plain one, divided by the length of the plain
    one; its median over tokens, and ``worst_int8`` the largest.
    """
    inputs: list[torch.Tensor] = []
    linears: dict[str, dict[str, Any]] = {}
    positions = batch.packing.position_ids[batch.packing.share.local]

    def note_layer(_: torch.nn.Module, args: Any, named: dict[str, Any]) -> None:
        inputs.append((args[0] if args else named["hidden_states"]).clone())

    def note_linear(name: str, module: torch.nn.Module, args: Any, _: Any) -> None:
        x = LinearKind.of(module).normed(module, args[0]).flatten(0, -2).float()
        linears[name] = _figures(x, weight_of(module), positions, recipes)

    with contextlib.ExitStack() as hooks:
        for layer in study.policy.layers:
            hooks.callback(layer.register_forward_pre_hook(note_layer, with_kwargs=True).remove)
        for name, module in parallel_linears(study.policy.gpt).items():
            hooks.callback(module.register_forward_hook(partial(note_linear, name)).remove)
        return study.scores(batch, keeps=True), inputs, linears


def _figures(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, recipes: Sequence[str]) -> dict[str, Any]:
    largest, channel = x.abs().max(-1)
    where, plain = int(largest.argmax()), x @ weight.float().t()
    found = {
        "largest": float(largest[where]), "median": float(largest.median()), "channel": int(channel[where]),
        "position": int(positions[where]), "largest_later": float(largest[positions > 0].max()),
    }  # fmt: skip
    for name in recipes:
        product = RECIPES.get(name).matmul(x, RECIPES.get(name).quantize(weight))
        errors = (product - plain).norm(dim=-1) / plain.norm(dim=-1).clamp_min(1e-30)
        found[f"error_{name}"], found[f"worst_{name}"] = float(errors.median()), float(errors.max())
    return found


@contextlib.contextmanager
def beginning_at(layers: Sequence[torch.nn.Module], index: int, inputs: torch.Tensor) -> Iterator[None]:
    """Enter a block in which forward passes leave out the layers before ``index``, which reads ``inputs``."""

    def hand_on(*_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return inputs.clone(), None

    try:
        for layer in layers[:index]:
            layer.forward = hand_on
        yield
    finally:
        for layer in layers[:index]:
            del layer.forward
