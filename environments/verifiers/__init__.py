"""An environment of the package ``verifiers`` as it is: its tasks, its harness, its rewards. One of its
``[env]`` blocks in the environment list::

- environment: verifiers
  name: gsm8k
  args:
    package: gsm8k-v1                       # a module (or file.py) with a Taskset, perhaps a Harness and an Env
    args: {difficulty: hard}                # settings of the taskset
    test_args: {split: test}                # what the held-out tasks have else; without it one task in 16 is held out
    env: {agent: {max_turns: 6}}            # the rest of its [env] block
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.environments.base import HarnessEnvironment, split_of
from megatron_rl.types import Grade, Message, Split, Task

if TYPE_CHECKING:
    import openai
    import verifiers.v1 as vf

KEY = "MEGATRON_RL_SESSION_API_KEY"
"""The variable that verifiers reads the key of the sample's session from. It hands no program a variable with API_KEY
in its name."""
BUILTIN_HARNESS = "null"
"""verifiers' plain chat loop with the taskset's tools; its own default, ``bash``, runs commands of the model here."""


class Verifiers(HarnessEnvironment):
    """An environment of the package verifiers, unchanged.

    The model that its agent calls is the policy. What its programs need runs on this machine unless ``env`` says
    another ``runtime``. A failed episode is masked, with verifiers' reason.
    """

    name = "verifiers"

    def __init__(
        self,
        *,
        package: str = "",
        args: Mapping[str, Any] | None = None,
        test_args: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        max_tasks: int = 100_000,
    ) -> None:
        """``max_tasks``: of a taskset; some have no end."""
        package = self._package = _importable(package)
        self._max_tasks = max_tasks
        settings = {"train": dict(args or {})}
        if test_args is not None:
            settings["test"] = settings["train"] | dict(test_args)
        self._envs = {split: _load(package, chosen, dict(env or {})) for split, chosen in settings.items()}

    @classmethod
    def preload(cls, options: Mapping[str, Any]) -> None:
        """verifiers and the package: 2.5 s of imports."""
        cls.from_options(options)

    def tasks(self, split: Split) -> Iterator[Task]:
        """The taskset's, named by their own id, else by a digest of their content."""
        env = self._envs.get(split, self._envs["train"])
        for task in env.taskset.take(self._max_tasks):
            name = task.data.id or task.key[:16]
            if len(self._envs) == 1 and split_of(name) != split:
                continue
            data = task.data.model_dump(mode="json", exclude_defaults=True)
            if type(task.data).model_validate(data) != task.data:
                why = f"task {name!r} of {self._package} does not survive JSON: {type(task.data).__name__}"
                raise ValueError(f"{why} must not exclude fields or hold what JSON has not")
            yield Task(name, _prompt(task), {"split": split, "task": data})

    async def run(self, task: Task, client: openai.AsyncOpenAI) -> Grade:
        """One episode."""
        import verifiers.v1 as vf

        from .runtime import use_this_interpreter

        use_this_interpreter()
        os.environ[KEY] = client.api_key
        endpoint = vf.EvalClientConfig(base_url=str(client.base_url), api_key_var=KEY)
        env = self._envs.get(task.data["split"], self._envs["train"])
        kind = type(env.taskset).task_type()
        theirs = kind(kind.data_type().model_validate(task.data["task"]), env.config.taskset.task)
        async with env.serving():
            (slot,) = env.slots(theirs)
            episode = await env.run_slot(slot, vf.ModelContext(model="policy", client=endpoint))
        return _grade(episode)


def _importable(package: str) -> str:
    """The name of a package; of ``file.py`` it is the module's, which is made importable."""
    if package.endswith(".py"):
        path = Path(os.path.realpath(package))
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        return path.stem
    return package


def _load(package: str, args: Mapping[str, Any], block: dict[str, Any]) -> vf.Env:
    """The environment of one ``[env]`` block; ``ValueError`` says in one line what is wrong with it."""
    if not package:
        raise ValueError("package names none; give one that exports a Taskset, such as package: gsm8k-v1")
    try:
        import verifiers.v1 as vf
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'megatron-rl[verifiers]'") from error
    import pydantic

    kind = vf.env_config_type(package, block.get("id", ""))
    defaults = {name: field.default for name, field in kind.model_fields.items()}
    seats = {name: default for name, default in defaults.items() if isinstance(default, vf.AgentConfig)}
    for name, default in seats.items():
        seat = block[name] = dict(block.get(name) or {})
        if "runtime" not in default.model_fields_set:
            seat.setdefault("runtime", {"type": "subprocess"})
        if default.harness is None and vf.default_harness_id(package) == "bash":
            seat.setdefault("harness", {"id": BUILTIN_HARNESS})
    try:
        env = vf.load_environment(kind.model_validate(block | {"taskset": {**args, "id": package}}))
    except pydantic.ValidationError as error:
        found = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))
        raise ValueError("; ".join(found)) from error
    trained = [name for name in seats if getattr(env.config, name).client is None]
    if len(trained) != 1:
        what = f"its agents {', '.join(trained)} would all be the policy" if trained else "no agent is the policy"
        raise ValueError(f"{what}; one is trained, so give each other one a client in env, as in vf.AgentConfig")
    return env


def _prompt(task: vf.Task) -> tuple[Message, ...]:
    """What the model is told first, for records and checks; the harness says it."""
    from verifiers.v1.types import content_text

    data = task.data
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, list):
        return (*system, *({"role": each.role, "content": content_text(each.content)} for each in data.prompt))
    return (*system, {"role": "user", "content": data.prompt or data.description or data.name or ""})


def _grade(episode: vf.Episode) -> Grade:
    """What the trace of the policy is worth; raises with verifiers' reason where it failed."""
    errors = [error for trace in episode.traces if not trace.ok for error in trace.errors[-1:]] + episode.errors[-1:]
    if not episode.ok:
        raise RuntimeError(f"{errors[0].type}: {errors[0].message}" if errors else "the episode failed, without a word")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) != 1:
        raise RuntimeError(f"the episode has {len(traces)} traces to train on; a sample has one")
    (trace,) = traces
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} was not computed: {trace.stop_condition}")
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    if len(trace.rewards) > 1:
        metrics |= {name: reward.score for name, reward in trace.rewards.items()}
    return Grade(trace.reward, metrics, trace.stop_condition or "")
