"""Interfaces of losses, corrections, advantages and filters; how flags choose them and set their options.

``Loss`` in ``losses/clip.py`` is ``--rl-policy-loss clip``; a class in another file is named by its path, as in
``--rl-policy-loss mine.py:MyLoss``. Its fields are its options: ``--rl-policy-loss-args clamp_eps_lower=0.1``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from megatron_rl.algorithms.batch import Aggregation, Terms, TokenBatch
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.flags import Flag, flags_of
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import ConfigError, Problem, collecting, shorten
from megatron_rl.registry import ADVANTAGES, CORRECTIONS, FILTERS, LOSSES, Registry

Baseline = Literal["group", "batch", "critic", "teacher"]
"""What rewards are compared with: the group, all samples of the step, or a critic's values. With a teacher all samples
have an advantage.
"""
Function = Callable[[TokenBatch], Terms]

CLIPPED = "rollout_corr/rollout_is_clipped"
"""Name of the sum over tokens, [T] bool, that a correction capped or rejected."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A subclass's fields are its options. Raises ``ConfigError`` for values out of bounds."""

    def __post_init__(self) -> None:
        problems = []
        for flag in flags_of(type(self)):
            value = getattr(self, flag.name)
            # NaN passes every bound, because comparisons with it are false.
            refusal = "is not a number" if value != value else None if value is None else flag.refusal(value)
            problems += [] if refusal is None else [f"{flag.name} {refusal}"]
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, kw_only=True)
class Extension(Options):
    """Base of losses, corrections and advantages."""

    AGGREGATION: ClassVar[Aggregation] = "token-mean"
    """For losses: the default denominator. Must be a literal, like the other two: the file is not imported."""
    LEVEL: ClassVar[Literal["token", "sequence"]] = "token"
    """For corrections: whether tokens are weighted individually, or all tokens of a sequence alike."""
    BASELINE: ClassVar[Baseline] = "group"
    """For advantages: decides which groups are dropped as uninformative, and whether groups may have one sample."""
    BY_TURN: ClassVar[bool] = True
    """For advantages: whether they can use returns of turns instead of rewards (--rl-turn-discount)."""

    def __call__(self, batch: TokenBatch) -> Terms:
        """Compute the terms without waiting for the device.

        Loss: the minimised value at each token, 0 where masked, with the gradient of ``batch.current_logprobs``.
        Correction: the weight of each token, 0 where masked or rejected. Advantage: that of each token.
        """
        raise NotImplementedError

    @property
    def whitening_epsilon(self) -> float | None:
        """Epsilon added to the std if the trainer whitens this advantage."""
        return None

    def returns(self, batch: TokenBatch, advantages: Tensor) -> Tensor:
        """Return the critic's targets, [T], for an advantage with a critic."""
        return batch.values + advantages


@dataclass(frozen=True, kw_only=True)
class GroupFilter(Options):
    """Base of the filters of dynamic sampling."""

    OF: ClassVar[str] = "rewards"
    """Input: ``rewards``, or ``verdicts``, 1 for each right answer and 0 for others."""

    def __call__(self, rewards: Tensor) -> bool:
        """Return whether a group counts; ``rewards``: fp32 on the CPU, of its graded samples, possibly empty."""
        raise NotImplementedError


@dataclass(frozen=True)
class Composed:
    """Several corrections as one, ``token_tis+veto``: weights multiply; clipped tokens are the union."""

    parts: tuple[Function, ...]

    @property
    def LEVEL(self) -> str:
        """``sequence`` if any part is per sequence."""
        return "sequence" if any(level_of(part) == "sequence" for part in self.parts) else "token"

    def __call__(self, batch: TokenBatch) -> Terms:
        weights, sums, clipped = batch.in_loss.float(), {}, torch.zeros_like(batch.in_loss)
        for part in self.parts:
            more, own = part(batch)
            weights, sums, clipped = weights * more, sums | own, clipped | own.get(CLIPPED, False)
        return weights, sums | {CLIPPED: clipped}


def level_of(correction: Function) -> str:
    """Return ``token`` or ``sequence``."""
    return getattr(correction, "LEVEL", "token")


def measure_of(counts: Callable[[Tensor], bool]) -> str:
    """Return whether a filter takes ``rewards`` or ``verdicts``."""
    return getattr(counts, "OF", GroupFilter.OF)


def advantage_of(config: RLConfig) -> Function:
    """Make the advantage of `--rl-advantage`; ``ConfigError`` lists all problems of its name and options."""
    return _chosen(config, "rl_advantage", ADVANTAGES, [config.algorithm.rl_advantage])[0]


def loss_of(config: RLConfig) -> Function:
    """Make the loss of `--rl-policy-loss`; raises like `advantage_of`."""
    return _chosen(config, "rl_policy_loss", LOSSES, [config.algorithm.rl_policy_loss])[0]


def correction_of(config: RLConfig) -> Function:
    """Make the correction of `--rl-correction`, composed if names are joined by +; raises like `advantage_of`."""
    parts = [part.strip() for part in config.algorithm.rl_correction.split("+")]
    if len({part.replace("-", "_") for part in parts}) < len(parts):
        text = "has a correction twice, which would square its weights; name each once"
        raise ConfigError([config.problem("rl_correction", text)])
    chosen = _chosen(config, "rl_correction", CORRECTIONS, parts)
    return chosen[0] if len(chosen) == 1 else Composed(tuple(chosen))


def filter_of(config: RLConfig) -> Callable[[Tensor], bool]:
    """Make the filter of `--rl-group-filter`; raises like `advantage_of`."""
    return _chosen(config, "rl_group_filter", FILTERS, [config.algorithm.rl_group_filter])[0]


def _chosen(config: RLConfig, field: str, registry: Registry[Any], names: Sequence[str]) -> list[Any]:
    """Make the named extensions with the options of ``--...-args``."""
    spelling, joined = f"--{field.replace('_', '-')}", "+".join(names)
    texts = dict(text.partition("=")[::2] for text in getattr(config.algorithm, f"{field}_args"))
    problems: list[Problem] = []
    found = []
    for name in names:
        with collecting(problems, spelling):
            extension = registry.get(name)
            base = GroupFilter if registry is FILTERS else Extension
            if not (issubclass(extension, base) if isinstance(extension, type) else callable(extension)):
                wanted = f"a function, or a subclass of megatron_rl.algorithms.{base.__name__}"
                raise ConfigError([f"{registry.what} {shorten(name)} is {shorten(extension)}; name {wanted}"])
            found.append((extension, _options(extension)))
    if problems:
        raise ConfigError(problems)
    known = {option for _, options in found for option in options}
    for option in (option for option in texts if option not in known):
        having = [name for name in registry.names() if option in _options(registry.get(name))]
        near = difflib.get_close_matches(option, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(known)) or 'none'}"
        ignored = f" and would ignore {own[option]}" if (own := _spellings_of(f"{field}_args")).get(option) else ""
        hint = f"use {' or '.join(having)}, or leave it out" if having else hint
        at = spelling if ignored else f"{spelling}-args"
        problems.append(Problem(at, f"{at}{'' if ignored else ':'} {joined} has no option '{option}'{ignored}; {hint}"))
    if problems:
        raise ConfigError(problems)
    return [_built(spelling, extension, options, texts) for extension, options in found]


def _spellings_of(field: str) -> dict[str, str]:
    """Return option -> flag of its own."""
    seconds = next(flag for flag in flags_of(AlgorithmConfig) if flag.name == field).seconds
    return {text.partition("=")[0]: each.spelling for each in seconds for text in each.sets(1.0).values()}


def _built(spelling: str, extension: Any, options: Mapping[str, Flag], texts: Mapping[str, str]) -> Any:
    if not isinstance(extension, type):
        return extension
    typed: dict[str, Any] = {}
    for name in (name for name in texts if name in options):
        try:
            typed[name] = options[name].convert(texts[name])
        except ValueError as error:
            raise ConfigError([Problem(f"{spelling}-args", f"{spelling}-args: {name} {error}")]) from error
    try:
        return extension(**typed)
    except ConfigError as error:
        raise ConfigError([problem.under(spelling) for problem in error.problems]) from error


def _options(extension: Any) -> dict[str, Flag]:
    """Return the options of a class by name; a function has none."""
    return {flag.name: flag for flag in flags_of(extension)} if isinstance(extension, type) else {}
