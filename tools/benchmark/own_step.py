"""Our GRPO step as a contender of the step benchmark, one step a call."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.algorithms.interfaces import AdvantageConfig
from megatron_rl.build_engine import build_engine
from megatron_rl.config import RLConfig
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models import PolicyModel, rollout_mode
from megatron_rl.parallel import ParallelGroups
from megatron_rl.registry import ADVANTAGES
from megatron_rl.rollout import RequestFactory, Rollouter
from megatron_rl.rollout.prompt_source import Draw
from megatron_rl.rollout.statistics import rollout_metrics
from megatron_rl.signals import StopRequest
from megatron_rl.trainer import Optimization, PolicyTrainer
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.samples import SampleBuilder, reward_metrics
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import GradeResult, SamplingParams, SourcedTask, Task, Transcript
from tools.benchmark.step_task import Judge, QuickstartTask, Weights
from tools.benchmark.update import loss_settings


class OurStep:
    """What `loop.rl_step` does, with the grader called in process instead of over REST."""

    def __init__(self, policy: PolicyModel, config: RLConfig, groups: ParallelGroups, task: QuickstartTask) -> None:
        self.judge = Judge(task.environment)
        self._policy, self._config, self._groups, self._task = policy, config, groups, task
        self._weights = Weights(list(policy.gpt.parameters()))
        self._optimization = Optimization(policy, config)
        engine = build_engine(config, policy, task.tokenizer, groups)
        self._rollouter = Rollouter(engine, task.tokenizer, groups, self._grade, StopRequest())
        sampling = SamplingParams(temperature=1.0, max_new_tokens=config.rollout.rl_max_new_tokens)
        self._factory = RequestFactory(sampling, config.rollout.inference_max_seq_length)
        algorithm = config.algorithm
        self._samples = SampleBuilder(
            ADVANTAGES.module(algorithm.rl_advantage),
            AdvantageConfig(),
            algorithm.rl_keep_zero_variance_groups,
            groups,
        )
        self._batches = BatchBuilder(config.training.rl_sequence_packing_bin_size, 1, policy.device, groups)
        scorer = Scorer(policy, groups.tensor_group, temperature=1.0)
        self._trainer = PolicyTrainer(
            self._optimization, scorer, loss_settings(config), 1, None, groups.data_group, PhaseTimer()
        )
        self._step = 0
        self.metrics: dict[str, float] = {}

    def __call__(self) -> None:
        """One step from the weights it was built with."""
        self._weights.restore()
        seed = self._step
        tokenizer, config = self._task.tokenizer, self._config
        draws = [
            Draw(SourcedTask("arithmetic", task), tuple(tokenizer.encode_prompt(task.prompt)))
            for task in self._task.of_step(self._step)
        ]
        size = config.algorithm.grpo_group_size
        requests = [self._factory.request(draw, size, index) for index, draw in enumerate(draws)]
        with rollout_mode(self._policy, self._optimization.wrapped):
            rollouts = self._rollouter.run(requests, seed, self._step)
        samples = self._samples.build(rollouts.groups, [request.index for request in requests])
        updates = self._batches.updates(samples.samples, config.training.global_batch_size, seed)
        outcome = self._trainer.step(updates)
        self.metrics = rollout_metrics(rollouts.groups, self._groups.data_group)
        self.metrics |= reward_metrics(samples) | outcome.metrics
        self._step += 1

    async def _grade(self, environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[GradeResult]:
        del environment
        return [
            GradeResult("ok", self.judge(task, said.text, said.num_tokens, said.ended)) for task, said in items
        ]

    def close(self) -> None:
        """Stop the event loop."""
        self._rollouter.close()
