"""One set of answers, scored by the trainer's forward pass: whole, from a layer on, with its activations described."""

from __future__ import annotations

import contextlib
import itertools
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
from megatron_rl.models.attention.kv_format import rounded_attention
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.copies import LinearKind, weight_of
from megatron_rl.quantization.linears import parallel_linears
from megatron_rl.registry import RECIPES
from megatron_rl.trainer.packing import collate, skipped_tokens
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import Completion, Request, SamplingParams, SourcedTask, Task

CHECK_PROMPTS, CHECK_TOKENS = 2, 16
"""Answers that the engine draws in each format, to be compared with the trainer's own quantized forward pass."""
ROWS = 96
"""Answer tokens whose logits exist at once."""


@dataclass(frozen=True)
class Scores:
    """What one forward pass says about the N answer tokens of some batches."""

    logprobs: torch.Tensor
    """[N] fp32, of the tokens."""
    top: torch.Tensor
    """[N] int64, the likeliest tokens."""
    whole: torch.Tensor | None = None
    """[N, V] fp32: the log-probs of the vocabulary, where they were asked for."""


@dataclass(frozen=True)
class Study:
    """A model, and how to score batches with it."""

    policy: PolicyModel
    groups: ParallelGroups

    @torch.no_grad()
    def scores(self, batches: Sequence[TokenBatch], whole: bool = False) -> Scores:
        """Run the trainer's forward pass; logits are computed for answer tokens alone."""
        scorer, gpt = Scorer(self.policy, self.groups, 1.0, fused=True), self.policy.gpt
        tied = gpt.share_embeddings_and_output_weights
        head = (gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight)[: self.policy.vocab_size]
        found: list[tuple[torch.Tensor, ...]] = []
        for batch in batches:
            hidden = scorer.forward(gpt, batch)
            if batch.packing.share is not None:
                hidden = batch.packing.share.whole(hidden, self.groups.context_group)
            hidden, targets = hidden[:-1][batch.in_loss[1:]], batch.samples.token_ids[1:][batch.in_loss[1:]]
            for rows, ids in zip(hidden.split(ROWS), targets.split(ROWS), strict=True):
                logprobs = (rows @ head.t()).float().log_softmax(-1)
                own = logprobs.gather(1, ids[:, None])[:, 0], logprobs.argmax(-1)
                found.append((*own, logprobs) if whole else own)
        return Scores(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def compared(exact: Scores, scores: Scores) -> dict[str, float]:
    """Compare ``scores`` with those of fp32, by which the tokens were drawn: the KL is that of fp32 to the format."""
    gap = (exact.logprobs - scores.logprobs).abs()
    k3 = kl_per_token("k3", exact.logprobs, scores.logprobs, torch.ones_like(gap))
    figures = {
        "tokens": len(gap), "gap": float(gap.mean()), "p95": float(gap.quantile(0.95)), "largest": float(gap.max()),
        "k3": float(k3.mean()), "top1": float((exact.top == scores.top).float().mean()),
    }  # fmt: skip
    if exact.whole is not None and scores.whole is not None:
        each = (exact.whole.exp() * (exact.whole - scores.whole)).sum(-1)
        figures |= {"kl": float(each.mean()), "kl_error": float(each.std() / len(each) ** 0.5)}
    return figures


def requests_of(prompts: Sequence[Sequence[int]], samples: int, tokens: int) -> list[Request]:
    """Ask for ``samples`` answers to each prompt at temperature 1."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=tokens)
    return [
        Request(SourcedTask("questions", Task(str(index), "")), tuple(ids), samples, sampling, index)
        for index, ids in enumerate(prompts)
    ]


def answered(study: Study, engine: Engine, requests: Sequence[Request], version: int) -> list[tuple[Completion, ...]]:
    """Draw the answers, with the linears as they are installed."""
    found = {}
    with rollout_mode(study.policy):
        engine.begin(1, version)
        for request in requests:
            engine.submit(request)
        while engine.has_unfinished:
            found |= {request.index: completions for request, completions in engine.step()}
    return [found[request.index] for request in requests]


def batch_of(prompt: Sequence[int], answers: Sequence[Sequence[int]], device: torch.device) -> TokenBatch:
    """Pack the answers to one prompt, which is computed once."""
    samples = []
    for number, answer in enumerate(sorted(map(list, answers))):
        ids = torch.tensor([*prompt, *answer])
        mask = torch.arange(len(ids)) >= len(prompt)
        nothing = torch.zeros(len(ids))
        samples.append(
            Sample(
                token_ids=ids, loss_mask=mask, inference_logprobs=nothing, versions=torch.zeros_like(ids),
                sample_id=number,
            )
        )  # fmt: skip
    skipped = skipped_tokens(samples)
    batch = collate(samples, device, 1, skipped)
    return replace(
        batch, packing=replace(batch.packing, share=SharedPrompts.of(batch.packing.lengths, skipped, device))
    )


def engine_gap(
    study: Study, engine: Engine, prompts: Sequence[Sequence[int]], version: int, rounds_cache: bool = False
) -> float:
    """Mean |engine - trainer| of a few answers that the engine draws, both as they are installed."""
    completions = answered(study, engine, requests_of(prompts[:CHECK_PROMPTS], 1, CHECK_TOKENS), version)
    batches = [
        batch_of(prompt, [one.token_ids], study.policy.device)
        for prompt, (one,) in zip(prompts, completions, strict=False)
    ]
    rounding = rounded_attention(study.policy.layers, engine.kv_format) if rounds_cache else contextlib.nullcontext()
    with rounding:
        scores = study.scores(batches)
    drawn = torch.tensor([number for (one,) in completions for number in one.inference_logprobs])
    return float((scores.logprobs - drawn).abs().mean())


@torch.no_grad()
def activations(study: Study, batches: Sequence[TokenBatch], recipes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Describe the inputs of each linear, and the error of its product in each format, in one fp32 pass.

    ``error``: by token the distance to the plain product, divided by the length of that one; median and largest.
    """
    modules, inputs = parallel_linears(study.policy.gpt), {}

    def note(name: str, module: torch.nn.Module, args: Any, _: Any) -> None:
        x = LinearKind.of(module).normed(module, args[0]).detach().flatten(0, -2).float()
        inputs.setdefault(name, []).append(_described(x, weight_of(module), recipes))

    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_hook(partial(note, name)).remove)
        study.scores(batches)
    places = [_places(batch) for batch in batches]
    return {name: _merged(parts, places) for name, parts in inputs.items()}


def _described(x: torch.Tensor, weight: torch.Tensor, recipes: Sequence[str]) -> dict[str, Any]:
    largest, channel = x.abs().max(-1)
    plain, found = x @ weight.float().t(), {"largest": largest, "channel": channel}
    for name in recipes:
        recipe = RECIPES.get(name)
        product = recipe.matmul(x, recipe.quantize(weight))
        found[name] = (product - plain).norm(dim=-1) / plain.norm(dim=-1).clamp_min(1e-30)
    return found


def _places(batch: TokenBatch) -> torch.Tensor:
    """[cells]: the position in its sequence of each token that is computed."""
    positions, share = batch.packing.position_ids, batch.packing.share
    return positions if share is None else positions[share.local]


def _merged(parts: Sequence[Mapping[str, torch.Tensor]], places: Sequence[torch.Tensor]) -> dict[str, Any]:
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    largest, positions = whole.pop("largest"), torch.cat(list(places))
    channels, where = whole.pop("channel"), int(largest.argmax())
    found = {
        "largest": float(largest[where]), "median": float(largest.median()), "channel": int(channels[where]),
        "position": int(positions[where]), "largest_later": float(largest[positions > 0].max()),
    }  # fmt: skip
    for name, errors in whole.items():
        found[f"error_{name}"], found[f"worst_{name}"] = float(errors.median()), float(errors.max())
    return found


@torch.no_grad()
def recorded(study: Study, batches: Sequence[TokenBatch]) -> tuple[Scores, list[list[torch.Tensor]]]:
    """Score the batches in fp32, and return what each layer reads, by layer and batch."""
    seen: list[list[torch.Tensor]] = [[] for _ in study.policy.layers]

    def note(index: int, _: torch.nn.Module, args: Any, named: dict[str, Any]) -> None:
        seen[index].append((args[0] if args else named["hidden_states"]).detach().clone())

    with contextlib.ExitStack() as hooks:
        for index, layer in enumerate(study.policy.layers):
            hook = layer.register_forward_pre_hook(partial(note, index), with_kwargs=True)
            hooks.callback(hook.remove)
        return study.scores(batches, whole=True), seen


@contextlib.contextmanager
def beginning_at(layers: Sequence[torch.nn.Module], index: int, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Enter a block in which forward passes leave out the layers before ``index``, which reads ``inputs`` in turn."""
    following = itertools.cycle(inputs)

    def first(*_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return next(following).clone(), None

    def others(hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    try:
        for number, layer in enumerate(layers[:index]):
            layer.forward = others if number else first
        yield
    finally:
        for layer in layers[:index]:
            del layer.forward
