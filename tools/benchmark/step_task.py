"""The quickstart's task for the step benchmark: tokenizer, prompts, rewards and a policy that has started."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from megatron_rl_environments.arithmetic import Arithmetic

from megatron_rl.config import RLConfig
from megatron_rl.environments.base import Environment
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.trainer import Optimization, SupervisedTrainer
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.supervised import DemonstrationSource
from megatron_rl.types import Task, Transcript

MAKE_TOKENIZER = Path(__file__).resolve().parents[2] / "examples/quickstart/make_tokenizer.py"
DEMONSTRATIONS_PER_UPDATE = 32


@dataclass
class Judge:
    """The environment's own grader, called in process by both sides, and what it has seen of one of them."""

    environment: Environment
    rewards: list[float] = field(default_factory=list)
    """Of every completion graded so far."""
    lengths: list[int] = field(default_factory=list)
    """Their tokens, the end token included."""

    def __call__(self, task: Task, text: str, num_tokens: int, ended: bool) -> float:
        """The reward of one completion."""
        grade = self.environment.grade(task, Transcript(text, "stop" if ended else "length", num_tokens))
        self.rewards.append(grade.reward)
        self.lengths.append(num_tokens)
        return grade.reward

    def facts(self) -> dict[str, float]:
        """Means over everything graded so far."""
        count = max(len(self.rewards), 1)
        return {"reward": sum(self.rewards) / count, "tokens_per_completion": sum(self.lengths) / count}


@dataclass(frozen=True)
class QuickstartTask:
    """Prompts in a fixed order; step i of everybody takes the i-th ``prompts_per_step`` of them."""

    environment: Arithmetic
    tasks: tuple[Task, ...]
    tokenizer: Tokenizer
    tokenizer_directory: Path
    prompts_per_step: int

    @classmethod
    def build(cls, directory: Path, prompts_per_step: int, seed: int) -> QuickstartTask:
        """``directory`` receives the tokenizer. Whole steps only, so that an epoch ends with a step."""
        runpy.run_path(str(MAKE_TOKENIZER))["main"](directory)
        environment = Arithmetic(seed=seed)
        tasks = tuple(environment.tasks("train"))
        whole = len(tasks) // prompts_per_step * prompts_per_step
        return cls(environment, tasks[:whole], load_tokenizer(str(directory)), directory, prompts_per_step)

    def of_step(self, step: int) -> Sequence[Task]:
        """The tasks of step ``step``, counted from 0; after the last one the first come again."""
        first = step * self.prompts_per_step % len(self.tasks)
        return self.tasks[first : first + self.prompts_per_step]


def warm_start(
    policy: PolicyModel, config: RLConfig, groups: ParallelGroups, task: QuickstartTask, updates: int
) -> None:
    """The quickstart's supervised start, in place: without it no answer is right and no step has an update."""
    demonstrations = list(islice(task.environment.demonstrations("train"), updates * DEMONSTRATIONS_PER_UPDATE))
    if not demonstrations:
        return
    source = DemonstrationSource(demonstrations, task.tokenizer, config.training.seq_length)
    batches = BatchBuilder(config.training.rl_sequence_packing_bin_size, 1, policy.device, groups)
    scorer = Scorer(policy, groups.tensor_group, temperature=1.0)
    trainer = SupervisedTrainer(Optimization(policy, config), scorer, groups.data_group, PhaseTimer())
    for update in range(updates):
        trainer.step(batches.pack(source.draw(DEMONSTRATIONS_PER_UPDATE), seed=update))


class Weights:
    """A copy of parameters to go back to: every measured step starts from the same policy."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._start = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copy back, in place."""
        for parameter, start in zip(self._parameters, self._start, strict=True):
            parameter.copy_(start)
