"""Held-out evaluation: pass@k, greedy accuracy, reward and length for every environment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch

from megatron_rl.metrics.evaluation import pass_at_k
from megatron_rl.platform.collectives import gather_vectors
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.prompt_source import ExpectedLengths, RequestFactory
from megatron_rl.rollout.rollouter import Rollouter
from megatron_rl.trainer.packing import balance
from megatron_rl.types import Grade, Request, Rollout, RolloutGroup, SourcedTask


class _TaskScore(NamedTuple):
    """One task's outcome, which travels between ranks as float64 numbers; or columns of many of them."""

    number: int
    """Its place in the evaluator's list; outcomes are put in this order, whichever rank they are from."""
    mean_length: float
    """Tokens of a sample's completions, greedy or not, graded or not."""
    environment: int
    samples: int
    """Graded samples; failed grades are left out, not counted as wrong."""
    correct: int
    untold: int
    """Samples of which nobody can tell whether they are right."""
    best_reward: float
    best_is_right: int
    """Whether the sample with the highest reward is."""
    reward_sum: float
    tokens: int
    truncated: int
    greedy_graded: int
    greedy_correct: int
    answered: int
    """1 if the grader extracted an answer from any sample: what a majority is taken over."""
    vote_correct: int


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one evaluation."""

    metrics: dict[str, float]
    """Named ``val/<environment>/<measure>``. Rank 0's count: the ranks of a model copy that do not lead it do not know
    what was extracted."""
    groups: tuple[RolloutGroup, ...]
    """This rank's answers: for each task the sampled ones, then the greedy one."""
    ungraded: tuple[str, ...] = ()
    """Environments of which not a single sample was graded: there is no result."""


class Evaluator:
    """Evaluates on a fixed list of held-out tasks with fixed random numbers.

    The same draws at every evaluation: differences between two steps come from the policy.
    What is right is the grader's verdict, or else the highest reward (`environments.results.is_right`).
    """

    def __init__(
        self,
        rollouter: Rollouter,
        tasks: Sequence[SourcedTask],
        samples_per_prompt: Mapping[str, int],
        factory: RequestFactory,
        seed: int,
        groups: ParallelGroups,
    ) -> None:
        self.expected_lengths = ExpectedLengths()
        """Of these tasks; they are the same at every evaluation."""
        self._rollouter = rollouter
        self._environments = sorted({source.environment for source in tasks})
        self.tasks = tasks
        self._samples = samples_per_prompt
        self._factory = factory
        self._seed = seed
        self._groups = groups

    def evaluate(self, policy_version: int) -> EvaluationResult | None:
        """Return metrics and answers; None when the run was asked to stop. Collective over the whole job."""
        requests = self.requests(self._groups.rollout_rank, self._groups.rollout_size)
        result = self._rollouter.run(requests, self._seed, policy_version)
        if result is None:
            return None
        numbers = [request.index // 2 for request in requests[::2]]
        trios = zip(numbers, result.groups[::2], result.groups[1::2], strict=True)
        rows = [value for number, sampled, greedy in trios for value in self._score(number, sampled, greedy)]
        gathered = gather_vectors(torch.tensor(rows, dtype=torch.float64), self._groups.rollout_group)
        table = torch.cat(gathered).view(-1, len(_TaskScore._fields)).numpy()
        table = table[table[:, 0].argsort()]
        scores = _TaskScore(*table.T)
        self.expected_lengths.learn(zip(self.tasks, scores.mean_length.tolist(), strict=True))
        metrics: dict[str, float] = {}
        for index, name in enumerate(self._environments):
            metrics.update(self._summary(name, table[scores.environment == index]))
        ungraded = tuple(name for name in self._environments if f"val/{name}/reward" not in metrics)
        return EvaluationResult(metrics, result.groups, ungraded)

    def requests(self, rank: int, ranks: int) -> list[Request]:
        """Return a rollout replica's share by expected tokens; each task is sampled, then answered greedily."""
        pairs = [
            (
                self._factory.request(source, self._samples[source.environment], 2 * number),
                self._factory.request(source, 1, 2 * number + 1, greedy=True),
            )
            for number, source in enumerate(self.tasks)
        ]
        tokens = [sum(map(self.expected_lengths.tokens, pair)) for pair in pairs]
        dealt = zip(pairs, balance(tokens, ranks), strict=True)
        return [request for pair, owner in dealt if owner == rank for request in pair]

    def _score(self, number: int, sampled: RolloutGroup, greedy: RolloutGroup) -> _TaskScore:
        lengths = [r.num_tokens for r in (*sampled.rollouts, *greedy.rollouts)]
        graded = [r for r in sampled.rollouts if not r.grade.failed]
        greedy_graded = [r for r in greedy.rollouts if not r.grade.failed]
        best = max((r.grade for r in graded), key=lambda grade: grade.reward, default=Grade(-math.inf))
        return _TaskScore(
            number=number,
            mean_length=sum(lengths) / len(lengths),
            environment=self._environments.index(sampled.source.environment),
            samples=len(graded),
            correct=sum(bool(r.grade.correct) for r in graded),
            untold=sum(r.grade.correct is None for r in graded),
            best_reward=best.reward,
            best_is_right=bool(best.correct),
            reward_sum=sum(r.grade.reward for r in graded),
            tokens=sum(r.num_written for r in graded),
            truncated=sum(r.truncated for r in graded),
            greedy_graded=len(greedy_graded),
            greedy_correct=sum(bool(r.grade.correct) for r in greedy_graded),
            answered=any(r.grade.extracted is not None for r in graded),
            vote_correct=majority_is_correct(graded),
        )

    def _summary(self, name: str, table: numpy.ndarray) -> dict[str, float]:
        score = _TaskScore(*table.T)
        samples, asked = score.samples, self._samples[name]
        metrics = {"num_tasks": len(table), "failed_grades": asked * len(table) - samples.sum()}
        if rightness_is_known(score):
            metrics |= _shares_of_right(score, powers_of_two_up_to(asked))
        if total := samples.sum():
            metrics |= {
                "reward": score.reward_sum.sum() / total,
                "response_length": score.tokens.sum() / total,
                "truncated": score.truncated.sum() / total,
            }
        return {f"val/{name}/{measure}": float(value) for measure, value in metrics.items()}


def rightness_is_known(score: _TaskScore) -> bool:
    """Return whether pass@k is known. Rewards outside the environment's range say that it is not theirs, unless the
    highest of them is a right answer's all the same: then it is a punishment that nobody has declared."""
    return not score.untold.any() or bool(score.best_is_right[score.best_reward.argmax()])


def _shares_of_right(score: _TaskScore, ks: Sequence[int]) -> dict[str, float]:
    """Return pass@k, the share of right majorities and that of right greedy answers.

    Every k is of the same tasks, or pass@k could fall as k grows: of n < k graded samples a task has pass@n.
    """
    metrics: dict[str, float] = {}
    graded = score.samples > 0
    for k in (k for k in ks if (score.samples >= k).any()):
        enough, by_task = score.samples >= k, (score.correct > 0).astype(float)
        by_task[enough] = pass_at_k(score.samples[enough], score.correct[enough], k)
        metrics[f"pass@{k}"] = by_task[graded].mean()
        if k == 1 and graded.sum() > 1:
            metrics["pass@1_ci95"] = confidence(by_task[graded], score.samples.sum())
    if score.answered.any():  # else the environment extracts no answers; a task that nobody answered is not solved
        metrics["maj@k"] = score.vote_correct.sum() / (score.samples > 0).sum()
    if score.greedy_graded.any():
        metrics["greedy"] = score.greedy_correct.sum() / score.greedy_graded.sum()
    return metrics


def majority_is_correct(graded: Sequence[Rollout]) -> bool:
    """Return whether the answer that most samples gave is right; of equally frequent ones the first given counts.

    Samples without an answer do not vote. Answers are compared as the grader extracted them: two spellings of
    one number are two answers.
    """
    votes = Counter(rollout.grade.extracted for rollout in graded if rollout.grade.extracted is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return next(bool(r.grade.correct) for r in graded if r.grade.extracted == winner)


def confidence(by_task: numpy.ndarray, samples: float) -> float:
    """Return how far a mean over two or more tasks is from the far end of its 95 % interval: Wilson's (1927), which
    keeps a width where all tasks score alike.

    It is of a number of independent draws. Each task is one where its samples succeed and fail together, each of the
    ``samples`` where they do not; between these the spread over tasks decides.
    """
    mean, tasks = float(by_task.mean()), len(by_task)
    of_one_draw, of_mean = mean * (1 - mean), float(by_task.var(ddof=1)) / tasks
    # all right or all wrong: no spread says how many draws these were
    share = min(max(of_mean / of_one_draw, 1 / samples), 1 / tasks) if of_one_draw > 1e-12 else 1 / tasks
    squared = 1.96**2 * share
    half = (squared * of_one_draw + squared**2 / 4) ** 0.5
    return (half + squared * abs(0.5 - mean)) / (1 + squared)


def powers_of_two_up_to(count: int) -> list[int]:
    """Return 1, 2, 4, ... and ``count`` itself: the k of pass@k."""
    powers = [2**exponent for exponent in range(count.bit_length()) if 2**exponent <= count]
    return powers if powers[-1] == count else [*powers, count]
