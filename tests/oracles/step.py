"""Whole RL steps from their recorded rollouts: log-probs, advantages, loss, gradient norm and the weights after them.

Read are the records and the model that the first step began with. Every sequence goes through the model alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.oracles.algorithm import Settings, advantages, correction, denominator, kl, policy_loss, token_weight
from tests.oracles.models import distributions, read_model, vocabulary_of
from tests.oracles.optimizer import Optimizer


@dataclass(frozen=True)
class Record:
    """One record, as far as it matters here."""

    group: int | None
    prompt: list[int]
    answer: list[int]
    written: list[int]
    """Positions in ``answer`` of the tokens that the model wrote."""
    engine: Tensor
    """Recorded log-probs of the written tokens, [L] fp64."""
    reward: float | None
    advantage: float | None
    update: int | None
    greedy: bool
    """Of an evaluation; the others are drawn."""


@dataclass(frozen=True)
class Scores:
    """Of the written tokens of a sequence, [L] fp64."""

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class StepResult:
    """What one step should have come to."""

    logprobs: list[Tensor]
    """Of each record's written tokens under the step's first weights, tempered, over the whole vocabulary."""
    advantages: list[float]
    in_loss: list[bool]
    metrics: dict[str, float]
    """Under the product's names."""


def read_records(path: Path) -> list[Record]:
    """All records of a step or an evaluation, if `--rl-log-rollouts` was its number of groups or above."""
    return [_record(json.loads(line)) for line in path.read_text().splitlines()]


def _record(row: dict[str, Any]) -> Record:
    read = {i for start, end in row["environment_spans"] for i in range(start, end)}
    written = [i for i in range(len(row["token_ids"])) if i not in read]
    engine = torch.tensor(row["inference_logprobs"], dtype=torch.float64)[written]
    reward = row["reward"] if row["status"] == "ok" else None
    training = (row.get("advantage"), row.get("update"), row.get("greedy", False))  # an evaluation has no update
    return Record(row.get("group"), row["prompt_ids"], row["token_ids"], written, engine, reward, *training)


def score(model: torch.nn.Module, record: Record, vocabulary: int, temperature: float) -> Scores:
    """Log-probs of the written tokens and the entropy of the distributions they come from."""
    rows = distributions(model, record.prompt + record.answer, vocabulary, temperature)
    rows = rows[len(record.prompt) - 1 :][record.written]
    drawn = torch.tensor([record.answer[i] for i in record.written])
    return Scores(rows.gather(1, drawn[:, None])[:, 0], -(rows.exp() * rows).sum(1))


def recompute(
    directory: Path, steps: list[list[Record]], settings: Settings
) -> tuple[list[StepResult], torch.nn.Module]:
    """What each step that drew its records should have come to, and the model after all of them.

    The first one began with the model in ``directory``, which is the reference of the KL penalty in all of them.
    """
    run = _Run(read_model(directory), read_model(directory), vocabulary_of(directory), settings)
    return [run.step(records) for records in steps], run.model


class _Run:
    """The model, the reference and the optimizer, which keep their state from step to step."""

    def __init__(
        self, model: torch.nn.Module, reference: torch.nn.Module, vocabulary: int, settings: Settings
    ) -> None:
        self.model = model
        self._reference = reference
        self._vocabulary = vocabulary
        self._settings = settings
        self._optimizer = Optimizer(list(model.parameters()), settings)

    def step(self, records: list[Record]) -> StepResult:
        """All updates on one rollout; "old" is the policy before the first of them."""
        settings = self._settings
        with torch.no_grad():
            old = [self._score(self.model, record).logprobs for record in records]
            reference = [self._score(self._reference, record).logprobs for record in records]
        expected, in_loss = _advantages(records, settings)
        updates: defaultdict[int, list[int]] = defaultdict(list)
        for index, record in enumerate(records):
            if record.update is not None:
                updates[record.update].append(index)
        sums, norms = _Sums(settings), []
        for number in sorted(updates) * settings.grpo_iterations:
            total = torch.zeros([], dtype=torch.float64)
            for i in updates[number]:
                fixed = Fixed(records[i].engine, old[i], reference[i], expected[i])
                total = total + sums.add(self._score(self.model, records[i]), fixed)
            below = denominator(settings, [len(records[i].written) for i in updates[number]])
            (total / below).backward()
            sums.denominator += below
            norms.append(self._optimizer.step())
        metrics = sums.metrics() | {"actor/grad_norm": sum(norms) / max(len(norms), 1), "actor/lr": settings.lr}
        return StepResult(old, expected, in_loss, metrics)

    def _score(self, model: torch.nn.Module, record: Record) -> Scores:
        return score(model, record, self._vocabulary, self._settings.rl_temperature)


def _advantages(records: list[Record], settings: Settings) -> tuple[list[float], list[bool]]:
    """Advantage of each record, and whether it takes part: graded, and there is something to compare it with."""
    groups: defaultdict[int | None, list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        groups[record.group].append(index)
    found = advantages([[records[i].reward for i in group] for group in groups.values()], settings.rl_advantage)
    values, in_loss = [0.0] * len(records), [False] * len(records)
    everything = {record.reward for record in records} - {None}
    for group, own in zip(groups.values(), found, strict=True):
        graded = everything if settings.rl_advantage == "batch_norm" else {records[i].reward for i in group} - {None}
        keeps = len(graded) > 1 or settings.rl_keep_zero_variance_groups
        for i, value in zip(group, own, strict=True):
            values[i], in_loss[i] = value, keeps and records[i].reward is not None
    return values, in_loss


@dataclass(frozen=True)
class Fixed:
    """Of a sequence's written tokens, [L] each: what does not change during a step's updates."""

    engine: Tensor
    old: Tensor
    reference: Tensor
    advantage: float


class _Sums:
    """Numerators of the metrics over all updates, and what divides them."""

    def __init__(self, settings: Settings) -> None:
        self.denominator = 0
        self._settings = settings
        self._sum: defaultdict[str, float] = defaultdict(float)
        self._gaps: list[Tensor] = []
        self._weights: list[Tensor] = []

    def add(self, scores: Scores, fixed: Fixed) -> Tensor:
        """One sequence's part of the numerator of the loss."""
        s, current = self._settings, scores.logprobs
        weight = token_weight(s, len(current))
        loss = policy_loss(s, current, fixed.old, fixed.advantage)
        trust, touched = correction(s, fixed.old, fixed.engine)
        policy = (loss.value * trust).sum() * weight
        total = policy - s.grpo_entropy_term_weight * scores.entropy.sum() * weight
        if s.grpo_kl_beta:
            penalty = kl(s.rl_kl_estimator, current, fixed.reference).sum() * weight
            total = total + s.grpo_kl_beta * penalty
            self._sum["kl"] += float(penalty.detach())
        self._sum["policy"] += float(policy.detach())
        self._sum["entropy"] += float(scores.entropy.detach().sum())
        self._sum["moved"] += float((fixed.old - current.detach()).sum())
        self._sum["clipped"] += int(loss.clipped.sum())
        self._sum["dual"] += int(loss.dual_clipped.sum())
        self._sum["touched"] += int(touched.sum())
        self._gaps.append(fixed.old - fixed.engine)
        self._weights.append(trust)
        return total

    def metrics(self) -> dict[str, float]:
        """Under the names of docs/metrics.md."""
        gap, weight = torch.cat(self._gaps), torch.cat(self._weights)
        tokens = len(gap)
        return {
            "actor/pg_loss": self._sum["policy"] / self.denominator,
            "actor/kl_loss": self._sum["kl"] / self.denominator,
            "actor/entropy": self._sum["entropy"] / tokens,
            "actor/ppo_kl": self._sum["moved"] / tokens,
            "actor/pg_clipfrac": self._sum["clipped"] / tokens,
            "actor/pg_clipfrac_lower": self._sum["dual"] / tokens,
            "training/rollout_logprob_gap_mean": float(gap.abs().mean()),
            "training/rollout_logprob_gap_max": float(gap.abs().max()),
            "rollout_corr/log_ratio_mean": float(gap.mean()),
            "rollout_corr/log_ratio_std": float(gap.std(correction=0)),
            "rollout_corr/k3_kl": float((gap.exp() - 1 - gap).mean()),
            "rollout_corr/rollout_is_mean": float(weight.mean()),
            "rollout_corr/rollout_is_eff_sample_size": float(weight.sum() ** 2 / (tokens * weight.square().sum())),
            "rollout_corr/rollout_is_clipped": self._sum["touched"] / tokens,
        }
