"""Start the environment server and read tasks from it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from megatron_rl.chat import unless_refused
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.process import EnvironmentCounters, EnvironmentServerProcess
from megatron_rl.environments.wire import ServedEnvironment
from megatron_rl.errors import EnvironmentFault
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.platform.collectives import gather_json
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.conversations import ConversationSettings, GroupGradeFunction
from megatron_rl.rollout.prompt_source import TaskPool
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Demonstration, SourcedTask


@dataclass(frozen=True)
class EnvironmentAccess:
    """The environments of the run, over REST."""

    served: tuple[ServedEnvironment, ...]
    client: EnvironmentClient
    counters: EnvironmentCounters

    @property
    def _trained_on(self) -> list[ServedEnvironment]:
        return [spec for spec in self.served if not spec.evaluation_only]

    @property
    def harnesses(self) -> frozenset[str]:
        """The names of those that call the model themselves."""
        return frozenset(spec.name for spec in self.served if spec.is_harness)

    def training_pools(self) -> list[TaskPool]:
        """Return training tasks of every environment that may be trained on."""
        return [
            TaskPool(spec.name, self.client.fetch_tasks(spec.name, "train"), spec.weight)
            for spec in self._trained_on
        ]

    def demonstrations(self) -> list[tuple[str, Demonstration]]:
        """Return demonstrations of all training environments with its name, one environment after the other."""
        return [
            (spec.name, demonstration)
            for spec in self._trained_on
            for demonstration in self.client.fetch_demonstrations(spec.name, "train")
        ]

    def conversations(self, max_sequence_length: int) -> ConversationSettings:
        """Return how many turns the model has in each environment, and which ones grade groups."""
        max_turns = {spec.name: spec.max_turns for spec in self.served}
        return ConversationSettings(max_turns, max_sequence_length, self.by_group)

    @property
    def by_group(self) -> dict[str, GroupGradeFunction]:
        """Graders of the environments that grade groups, by name."""
        return {
            spec.name: partial(self.client.grade_group, spec.name, spec.group_seconds)
            for spec in self.served
            if spec.group_seconds is not None
        }

    def held_out_tasks(self, count: int, tokenizer: Tokenizer, max_prompt_tokens: int) -> list[SourcedTask]:
        """Return the first ``count`` held-out tasks of each environment whose prompts fit, or as many as it says.

        Those that the chat template refuses are left out.

        An environment without any, which trains on all it has, is not evaluated.

        Raises:
            EnvironmentFault: an environment has none that fits.
        """
        tasks, refused = list[SourcedTask](), dict[str, str]()
        for spec in self.served:
            fitting: list[SourcedTask] = []
            found = self.client.fetch_tasks(spec.name, "test")
            for task in found:
                encode = partial(tokenizer.encode_prompt, task.prompt, spec.name)
                prompt_ids = tuple(unless_refused(encode, refused, spec.name) or ())
                if 0 < len(prompt_ids) <= max_prompt_tokens:
                    fitting.append(SourcedTask(spec.name, task, prompt_ids=prompt_ids))
                if len(fitting) == (spec.eval_prompts or count):
                    break
            if found and not fitting:
                raise EnvironmentFault(
                    f"environment {spec.name!r} has no held-out task that fits in {max_prompt_tokens} tokens; "
                    "leave out --eval-interval or raise --inference-max-seq-length" + refused.get(spec.name, "")
                )
            tasks += fitting
        return tasks


@contextlib.contextmanager
def open_environments(config: RLConfig, groups: ParallelGroups, directory: RunDirectory) -> Iterator[EnvironmentAccess]:
    """Run one server for each launcher (torchrun), started by its first rank and stopped at the end; collective."""
    settings = config.environment
    host = socket.gethostname()
    first = first_rank_beside(gather_json([host, groups.local_rank], dist.group.WORLD), groups.rank)
    # The host alone would not do: it may run two launchers of a job, and containers may have the same name.
    folder = directory.logs / f"environments_{host}_{first}"
    with contextlib.ExitStack() as stack:
        server, problem = None, ""
        if groups.rank == first:
            process = EnvironmentServerProcess(
                settings.langrl_env_config, folder, port=settings.rl_environment_port,
                start_timeout=settings.rl_environment_load_timeout, harness_processes=settings.rl_harness_processes,
            )  # fmt: skip
            try:
                server = stack.enter_context(process)
            except EnvironmentFault as error:
                problem = str(error)
        dist.barrier()
        if problem:
            raise EnvironmentFault(problem)
        client = EnvironmentClient(
            os.path.realpath(folder / "environment_server.json"),
            timeout=settings.rl_grade_timeout_seconds,
            list_timeout=settings.rl_environment_load_timeout,
        )
        yield EnvironmentAccess(client.environments(), client, EnvironmentCounters(client, server))


def first_rank_beside(ranks: Sequence[tuple[str, int]], rank: int) -> int:
    """Return the first rank of the launcher of ``rank``: the nearest one up to it on its host with local rank 0.

    ``ranks`` has host and local rank of all. Two launchers of two ranks each on one host count 0, 1, 0, 1.
    """
    beside = [index for index, (host, _) in enumerate(ranks) if host == ranks[rank][0]]
    return max((index for index in beside if index <= rank and ranks[index][1] == 0), default=beside[0])
