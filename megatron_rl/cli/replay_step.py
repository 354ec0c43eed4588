"""What `megatron-rl replay` recomputes: the steps since a checkpoint, and one sample's part in the last of them."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.batch import token_weights, trusted_mask
from megatron_rl.algorithms.objective import MicroLoss, PolicyObjective
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.trainer.optimizer import Optimization, UpdateOutcome
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import Updates, run_schedule
from megatron_rl.types import RolloutGroup

if TYPE_CHECKING:
    from megatron_rl.run.rl import RLRun
    from megatron_rl.trainer.update import TrainOutcome


@dataclass(frozen=True)
class TokenInLoss:
    """A token of the sample as its first update saw it; log-probs in nats, all numbers fp32."""

    token: int
    sample: int
    """Number of its sample in the group."""
    sequence: int
    """Number of its sequence in the sample."""
    inference: float
    """Log-prob of the engine that drew it."""
    old: float
    """Log-prob of the trainer before the step's first update."""
    ratio: float
    """exp(current - old) in that update."""
    correction: float
    """Weight of `--rl-correction`."""
    advantage: float
    slope: float
    """Derivative of the update's loss, its denominator included, by the token's log-prob: 0 where it is clipped."""
    gradient: float = 0.0
    """Norm of the gradient of the same loss, entropy term included, by the hidden state that the output layer turned
    into this token's distribution: how hard the token pulls at the layers below. Deeper in the model attention has
    mixed the tokens, and no part of a gradient is one token's."""


@dataclass
class Replayed:
    """The results of the chosen samples."""

    groups: Sequence[RolloutGroup] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the whole step."""
    update: int | None = None
    """The first update that has one of them; None where none of them is in the loss."""
    denominator: int = 0
    """Of that update's loss."""
    tokens: list[TokenInLoss] = field(default_factory=list)
    norms: dict[str, float] = field(default_factory=dict)
    """Norm of their gradient in that update by part of the model, before clipping; ``all`` of the whole."""


def replay(
    run: RLRun, step: int, samples: frozenset[int], take_step: Callable[[RLRun, int], TrainOutcome | None]
) -> Replayed | None:
    """Train up to ``step``, which is taken with ``samples`` watched; their numbers are those in the step.

    ``take_step`` takes and counts a step. Returns None when the run was asked to stop.
    """
    found = Replayed()
    while run.progress.step < step:
        number = run.progress.step + 1
        if number == step:
            scorer = WatchedScorer(run.trainer.scorer, run.trainer.objective, samples, found)
            run.trainer = replace(run.trainer, scorer=scorer)
            run.reporter = _Records(run.reporter, found)
        outcome = take_step(run, number)
        if outcome is None:
            return None
        found.metrics = outcome.metrics
    size = run.config.algorithm.grpo_group_size
    found.tokens = sorted(
        (replace(one, sample=one.sample % size) for one in found.tokens), key=lambda one: (one.sample, one.sequence)
    )
    return found


class _Records:
    """A reporter that also keeps the step's groups."""

    def __init__(self, reporter: Any, found: Replayed) -> None:
        self._reporter, self._found = reporter, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reporter, name)

    def records(self, step: int, groups: Sequence[RolloutGroup], *rest: Any) -> None:
        self._found.groups = tuple(groups)


class WatchedScorer:
    """A scorer that looks at the chosen samples just before their first update."""

    def __init__(self, scorer: Scorer, objective: PolicyObjective, samples: frozenset[int], found: Replayed) -> None:
        self._scorer, self._objective, self._samples, self._found = scorer, objective, samples, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def update(
        self, optimization: Optimization, updates: Updates, loss: Callable[..., MicroLoss]
    ) -> tuple[list[UpdateOutcome], dict[str, torch.Tensor]]:
        """Do as `Scorer.update`, in two parts, with the look between them."""
        first = next((n for n, part in enumerate(updates) if any(map(self._has_one, part))), None)
        if first is None:
            return self._scorer.update(optimization, updates, loss)
        outcomes, totals = self._scorer.update(optimization, updates[:first], loss)
        self.look(optimization, updates[first])
        self._found.update = first
        others, rest = self._scorer.update(optimization, updates[first:], loss)
        return [*outcomes, *others], {
            name: value if name not in totals
            else torch.maximum(totals[name], value) if name.endswith("_max") else totals[name] + value
            for name, value in rest.items()
        }  # fmt: skip

    def _has_one(self, batch: TokenBatch) -> bool:
        return not self._samples.isdisjoint(batch.samples.sample_id)

    def _chosen(self, batch: TokenBatch) -> torch.Tensor:
        """Mark the tokens of the chosen samples: [T] fp32."""
        own = [float(number in self._samples) for number in batch.samples.sample_id]
        own += [0.0] * (len(batch.packing.lengths) - len(own))  # dummy sequences
        return torch.tensor(own, device=batch.loss_mask.device)[batch.sequence_index] * batch.loss_mask

    def look(self, optimization: Optimization, batches: Sequence[TokenBatch]) -> None:
        """Compute the chosen samples' part in the update of ``batches``: numbers by token, gradients by layer."""
        found, objective, scorer = self._found, self._objective, self._scorer
        found.denominator = sum(int(_denominator(objective, batch)) for batch in batches)
        entropy = "differentiable" if objective.entropy_weight else "detached"
        watched = [replace(batch, loss_mask=self._chosen(batch)) for batch in batches if self._has_one(batch)]
        counted = [found.denominator, *[0] * (len(watched) - 1)]
        read_tokens: list[tuple[list[TokenInLoss], torch.Tensor]] = []  # with the places that predict them

        def read(output: torch.Tensor, batch: TokenBatch) -> MicroLoss:
            batch = scorer.select(output, batch, entropy)
            read_tokens.append((_tokens(objective, batch, found.denominator), batch.in_loss.nonzero()[:, 0] - 1))
            total, unused, sums = objective(batch)
            return total, torch.full_like(unused.int(), counted.pop(0)), sums

        optimization.zero_grad()
        with hidden_gradient_norms(optimization.policy.chunks[-1].output_layer) as norms:
            run_schedule(optimization.wrapped, watched, scorer.forward, read)
        for (tokens, at), norm in zip(read_tokens, norms, strict=True):
            pulls = (norm[at] / max(found.denominator, 1)).tolist()
            found.tokens += [replace(one, gradient=pull) for one, pull in zip(tokens, pulls, strict=True)]
        found.norms = gradient_norms(optimization.policy)


def _denominator(objective: PolicyObjective, batch: TokenBatch) -> torch.Tensor:
    known = batch.inference_logprobs, batch.old_logprobs, batch.ref_logprobs, batch.teacher_logprobs
    mask = trusted_mask(batch.loss_mask, *known)
    weighed = replace(batch, loss_mask=mask)
    return token_weights(objective.aggregation, weighed, objective.aggregation_constant)[1]


def _tokens(objective: PolicyObjective, batch: TokenBatch, denominator: int) -> list[TokenInLoss]:
    current = batch.current_logprobs.detach().requires_grad_()
    old = current.detach() if batch.old_logprobs is None else batch.old_logprobs
    batch = replace(batch, current_logprobs=current, old_logprobs=old, entropy=batch.entropy.detach())
    with torch.enable_grad():
        total, _, _ = objective(batch)
        (slope,) = torch.autograd.grad(total, current)
    trust, _ = objective.correction(batch)
    at = batch.in_loss.nonzero()[:, 0]
    places = batch.sequence_index[at].cpu()
    sample, sequence = torch.tensor(batch.samples.sample_id)[places], batch.samples.sequence[places]
    columns = (
        batch.samples.token_ids, batch.inference_logprobs, old, (current.detach() - old).exp(), trust,
        batch.advantages, slope / max(denominator, 1),
    )  # fmt: skip
    token, *numbers = (column[at].tolist() for column in columns)
    rows = zip(token, sample.tolist(), sequence.tolist(), *numbers, strict=True)
    return [TokenInLoss(*values) for values in rows]


@contextlib.contextmanager
def hidden_gradient_norms(output_layer: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets, of each backward pass, the norm of the gradient by the layer's input: [T] fp32.

    A position's hidden state has only the gradient of the token that follows it. The pass computes it anyway, so the
    norms cost no other pass and 4 bytes a token.
    """
    norms: list[torch.Tensor] = []

    def keep(gradient: torch.Tensor) -> None:
        norms.append(torch.linalg.vector_norm(gradient.float(), dim=-1).flatten())

    def watch(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        inputs[0].register_hook(keep)

    handle = output_layer.register_forward_pre_hook(watch)
    try:
        yield norms
    finally:
        handle.remove()


def gradient_norms(policy: PolicyModel) -> dict[str, float]:
    """Return the norm of the gradient by part: ``layer 0`` .. , ``embedding``, ..., and ``all``."""
    squares: defaultdict[str, float] = defaultdict(float)
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            continue
        words = name.split(".")
        layer = words.index("layers") + 1 if "layers" in words else None
        part = f"layer {words[layer]}" if layer is not None else words[-2].replace("_", " ")
        squares[part] += parameter.main_grad.double().square().sum().item()
    return {part: math.sqrt(value) for part, value in squares.items()} | {"all": math.sqrt(sum(squares.values()))}
