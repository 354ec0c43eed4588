"""Numbers about a step's rollouts, over all rollout replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from megatron_rl.errors import EnvironmentFault
from megatron_rl.inference.engine import EngineStatistics
from megatron_rl.platform.collectives import gather_json, gather_vectors
from megatron_rl.types import Completion, Rollout, RolloutGroup

_MOST_RANKS_SHOWN = 32
"""With more replicas a step's row would consist of their idle shares: the mean alone is kept."""


def rollout_metrics(groups: Sequence[RolloutGroup], rollout_group: dist.ProcessGroup) -> dict[str, float]:
    """Return lengths and endings under verl's names, and the mean of every metric the graders report.

    Lengths, turns and endings are of whole samples, all their sequences together.
    """
    local = torch.tensor([_row(group, rollout) for group in groups for rollout in group.rollouts], dtype=torch.float64)
    table = torch.cat(gather_vectors(local.view(-1), rollout_group)).view(-1, 8)
    if not table.numel():
        return {}
    prompt, response, tokens, cut, turns, sequences, logprobs, repeated = table.unbind(1)
    return {
        "prompt_length/mean": prompt.mean().item(),
        "response_length/mean": response.mean().item(),
        "response_length/max": response.max().item(),
        "response_length/min": response.min().item(),
        "response_length/clip_ratio": cut.mean().item(),
        "response_length/repeated_share": repeated.mean().item(),
        "rollout/logprob_mean": logprobs.sum().item() / max(response.sum().item(), 1.0),
        "rollout/turns_mean": turns.mean().item(),
        "rollout/sequences_mean": sequences.mean().item(),
        "perf/total_num_tokens": tokens.sum().item(),
        "perf/generated_tokens": response.sum().item(),
        **_grader_means(groups, rollout_group),
    }


def _row(group: RolloutGroup, rollout: Rollout) -> tuple[float, ...]:
    """Of a sample: tokens of its prompt, written, of all its sequences with their prompts; cut; turns; sequences; the
    sum of the log-probs; the share of 4-grams that are repeats.
    """
    prompts = [len(sequence.prompt_ids) for sequence in group.sequences(rollout)]
    completions = rollout.completions
    turns = sum(completion.num_turns for completion in completions)
    logprobs = sum(sum(completion.inference_logprobs) for completion in completions)
    tokens, repeated = sum(prompts) + rollout.num_tokens, _repeated_share(completions)
    return prompts[0], rollout.num_written, tokens, rollout.truncated, turns, len(prompts), logprobs, repeated


def _repeated_share(completions: Sequence[Completion]) -> float:
    """Return the share of 4-grams that the same turn has before. Tool calls of several turns may be alike."""
    total = distinct = 0
    for completion in completions:
        edges = [0, *chain(*completion.environment_spans), len(completion.token_ids)]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            ids = completion.token_ids[start:end]
            grams = list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
            total, distinct = total + len(grams), distinct + len(set(grams))
    return 1 - distinct / total if total else 0.0


def lengths_and_seconds(
    answered: Mapping[int, RolloutGroup], seconds: float, num_groups: int, rollout_group: dist.ProcessGroup
) -> tuple[list[float], list[float]]:
    """Return the mean tokens of a sample of each of the step's groups, and each replica's seconds of generation.

    ``answered`` are this replica's groups by number, ``seconds`` its own.

    One sum over the replicas: every number is of one of them, which the others add 0 to.
    """
    numbers = torch.zeros(num_groups + rollout_group.size(), dtype=torch.float64)
    for number, group in answered.items():
        lengths = [rollout.num_tokens for rollout in group.rollouts]
        numbers[number] = sum(lengths) / len(lengths)
    numbers[num_groups + rollout_group.rank()] = seconds
    if rollout_group.size() > 1:
        dist.all_reduce(numbers, group=rollout_group)
    return numbers[:num_groups].tolist(), numbers[num_groups:].tolist()


def idle_metrics(seconds: Sequence[float]) -> dict[str, float]:
    """Return the share of the slowest replica's time that each one did not generate in, and their mean.

    Empty on one rank, which waits for nobody.
    """
    slowest = max(seconds)
    if len(seconds) == 1 or slowest <= 0:
        return {}
    shares = [1 - own / slowest for own in seconds]
    name = "perf/rollout_idle_share"
    by_rank = {f"{name}/rank_{rank}": share for rank, share in enumerate(shares)}
    return {name: sum(shares) / len(shares), **(by_rank if len(shares) <= _MOST_RANKS_SHOWN else {})}


def engine_metrics(statistics: EngineStatistics, rollout_group: dist.ProcessGroup) -> dict[str, float]:
    """Sum what the engines did over all rollout replicas."""
    sums = torch.tensor(list(vars(statistics).values()), dtype=torch.float64)
    dist.all_reduce(sums, group=rollout_group)
    total = EngineStatistics(*sums.tolist())
    return {
        "engine/prefill_tokens": total.prefill_tokens,
        "engine/reused_share": total.reused_tokens / max(total.prefill_tokens + total.reused_tokens, 1.0),
        "engine/preemptions": total.preemptions,
        "engine/recomputed_tokens": total.recomputed_tokens,
        "engine/useful_rows_share": (total.generated_tokens - total.completions) / max(total.decode_rows, 1.0),
    }


def staleness_metrics(
    groups: Sequence[RolloutGroup], policy_version: int, replicas: dist.ProcessGroup
) -> dict[str, float]:
    """Measure how many of the tokens written are of older weights, and by how many steps; over all replicas."""
    ages = [
        (policy_version - version, size)
        for group in groups for rollout in group.rollouts for completion in rollout.completions
        for version, size in _written(completion)
    ]  # fmt: skip
    local = torch.tensor([
        sum(size for _, size in ages),
        sum(size for age, size in ages if age > 0),
        sum(age * size for age, size in ages),
        max((age for age, size in ages if size), default=0),
    ])
    tokens, stale, total, largest = torch.stack(gather_vectors(local, replicas)).unbind(1)
    return {
        "rollout/stale_token_share": float(stale.sum() / tokens.sum().clamp_min(1)),
        "rollout/token_lag_mean": float(total.sum() / stale.sum().clamp_min(1)),
        "rollout/token_lag_max": float(largest.max()),
    }


def _written(completion: Completion) -> Iterator[tuple[int, int]]:
    """Yield the weight version of each part of a completion, and how many tokens of it the model wrote."""
    end = 0
    for version, size in completion.stretches:
        start, end = end, end + size
        read = (min(end, stop) - max(start, begin) for begin, stop in completion.environment_spans)
        yield version, size - sum(tokens for tokens in read if tokens > 0)


@dataclass(frozen=True)
class Failures:
    """Grades of a step that failed, over all rollout replicas."""

    counts: dict[str, int]
    """By error code."""
    example: str
    """The message of one of them: of a server that died, the end of its log."""

    def __str__(self) -> str:
        return ", ".join(f"{code} {count}" for code, count in self.counts.items())

    @property
    def last_words(self) -> str:
        """The example, to end an error message with; empty without one."""
        return f"; one of them: {self.example}" if self.example else ""


def failures_of(groups: Sequence[RolloutGroup], rollout_group: dist.ProcessGroup) -> Failures:
    """Count the failed grades; collective. Only the leader of a model copy has a message, the longest says most."""
    grades = [r.grade for g in groups for r in g.rollouts if r.grade.failed]
    counts = _summed(Counter(grade.code for grade in grades), rollout_group)
    longest = max((grade.message for grade in grades), key=len, default="")
    return Failures(dict(sorted(counts.items())), max(gather_json(longest, rollout_group), key=len))


def refuse_failures(failures: Failures, samples: int, largest_share: float) -> None:
    """Stop the run when too many grades failed.

    Raises:
        EnvironmentFault: more than ``largest_share`` of ``samples`` have no grade.
    """
    failed = sum(failures.counts.values())
    if failed <= largest_share * samples:
        return
    raise EnvironmentFault(
        f"{failed} of {samples} grades failed ({failures}), more than the {largest_share:.0%} allowed; "
        f"see logs/ of the run directory, or raise --rl-max-failed-share{failures.last_words}"
    )


def no_results(environments: Sequence[str], failures: Failures) -> EnvironmentFault:
    """Return the error of an evaluation in which ``environments`` have graded nothing."""
    names = ", ".join(map(repr, environments))
    return EnvironmentFault(
        f"the evaluation has no result on {names}: every grade failed ({failures}); see logs/ of the run directory"
        f"{failures.last_words}"
    )


def environment_metrics(events: Mapping[str, int], failures: Failures) -> dict[str, float]:
    """Sum what every rank counted at its environment server, and failed grades by error code.

    Collective over the whole job, not over one copy of the model: any rank may keep a server.
    """
    total = _summed(events, dist.group.WORLD)
    metrics = {f"environment/{name}": float(count) for name, count in sorted(total.items())}
    return metrics | {f"training/failed_grades/{code}": float(n) for code, n in failures.counts.items()}


def reward_by_environment(
    groups: Sequence[RolloutGroup], signal: Sequence[bool], rollout_group: dist.ProcessGroup
) -> dict[str, float]:
    """Return each environment's mean reward of graded samples, and share of groups with signal; collective.

    ``signal`` is of this replica's ``groups``, as the advantage has it.
    """
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for group, has_signal in zip(groups, signal, strict=True):
        graded = [rollout.grade.reward for rollout in group.rollouts if not rollout.grade.failed]
        mean, share = (f"reward/{group.source.environment}/{name}" for name in ("mean", "signal_share"))
        sums.update({mean: sum(graded), share: has_signal})
        counts.update({mean: len(graded), share: 1})
    return _means(sums, counts, rollout_group)


def _grader_means(groups: Sequence[RolloutGroup], rollout_group: dist.ProcessGroup) -> dict[str, float]:
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for group in groups:
        for rollout in group.rollouts:
            named = {f"grade/{group.source.environment}/{name}": v for name, v in rollout.grade.metrics.items()}
            sums.update(named)
            counts.update(named.keys())
    return _means(sums, counts, rollout_group)


def _means(sums: Mapping[str, float], counts: Mapping[str, int], group: dist.ProcessGroup) -> dict[str, float]:
    sums, counts = _summed(sums, group), _summed(counts, group)
    return {name: sums[name] / count for name, count in sorted(counts.items()) if count}


def _summed(counts: Mapping[str, float], group: dist.ProcessGroup) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in gather_json(dict(counts), group):
        total.update(part)
    return total
