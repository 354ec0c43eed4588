"""Start the environment server and read tasks from it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_rl.config import RLConfig
from megatron_rl.environments.client import EnvironmentClient, ServedEnvironment
from megatron_rl.environments.process import EnvironmentCounters, EnvironmentServerProcess
from megatron_rl.errors import EnvironmentFault
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout import ConversationSettings, TaskPool
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Demonstration, SourcedTask


@dataclass(frozen=True)
class EnvironmentAccess:
    """The environments of the run, over REST."""

    served: tuple[ServedEnvironment, ...]
    client: EnvironmentClient
    counters: EnvironmentCounters

    def training_pools(self) -> list[TaskPool]:
        """Training tasks of every environment that may be trained on."""
        return [
            TaskPool(spec.name, self.client.fetch_tasks(spec.name, "train"), spec.weight)
            for spec in self.served
            if not spec.evaluation_only
        ]

    def demonstrations(self) -> list[Demonstration]:
        """Demonstrations of all training environments, one environment after the other."""
        return [
            demonstration
            for spec in self.served
            if not spec.evaluation_only
            for demonstration in self.client.fetch_demonstrations(spec.name, "train")
        ]

    def conversations(self, max_sequence_length: int) -> ConversationSettings:
        """How often the model may speak in each environment, and who answers."""
        max_turns = {spec.name: spec.max_turns for spec in self.served}
        return ConversationSettings(self.client.step, max_turns, max_sequence_length)

    def held_out_tasks(self, count: int, tokenizer: Tokenizer, max_prompt_tokens: int) -> list[SourcedTask]:
        """The first ``count`` held-out tasks of every environment whose prompts fit."""
        tasks: list[SourcedTask] = []
        for spec in self.served:
            fitting: list[SourcedTask] = []
            for task in self.client.fetch_tasks(spec.name, "test"):
                prompt_ids = tuple(tokenizer.encode_prompt(task.prompt))
                if 0 < len(prompt_ids) <= max_prompt_tokens:
                    fitting.append(SourcedTask(spec.name, task, prompt_ids=prompt_ids))
                if len(fitting) == count:
                    break
            if not fitting:
                raise EnvironmentFault(
                    f"environment {spec.name!r} has no held-out task that fits in {max_prompt_tokens} tokens; "
                    "leave out --eval-interval or raise --inference-max-seq-length"
                )
            tasks += fitting
        return tasks


@contextlib.contextmanager
def open_environments(
    config: RLConfig, groups: ParallelGroups, directory: RunDirectory
) -> Iterator[EnvironmentAccess]:
    """The server of this node, started by its first rank and stopped at the end; collective."""
    path = config.environment.langrl_env_config
    folder = directory.logs / f"environments_{socket.gethostname()}"
    server = None
    if groups.local_rank == 0:
        server = EnvironmentServerProcess(
            path,
            folder,
            port=config.environment.rl_environment_port,
            start_timeout=config.environment.rl_environment_load_timeout,
        )
    with contextlib.ExitStack() as stack:
        problem = ""
        if server is not None:
            stack.callback(server.stop)
            try:
                server.start()
            except EnvironmentFault as error:
                problem = str(error)
        dist.barrier()
        if problem:
            raise EnvironmentFault(problem)
        client = EnvironmentClient(
            _address_file(folder),
            timeout=config.environment.rl_grade_timeout_seconds,
            list_timeout=config.environment.rl_environment_load_timeout,
        )
        counters = EnvironmentCounters(client, server)
        yield EnvironmentAccess(client.environments(), client, counters)


def _address_file(folder: Path) -> Path:
    return folder.resolve() / "environment_server.json"
