"""The classes an environment derives from: tasks, a grader, a conversation or a harness, worked demonstrations.

An environment is one module with a class that has ``name``, ``tasks`` and ``grade`` (docs/environments.md has one). One
that answers the model, with a tool's result or a follow-up question, is a ``ConversationEnvironment``; one that calls
the model itself is a ``HarnessEnvironment``.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from megatron_rl.environments.agents import AnyClient, client_of
from megatron_rl.errors import MAX_LINE, ConfigError, one_line, shorten
from megatron_rl.types import Demonstration, Grade, Message, Split, Step, Task, Transcript, Turn

if TYPE_CHECKING:
    import openai

ATTEMPTS = 2000
"""Draws in a row without a new task before there are taken to be no more."""
LONGEST_NAME = 100
Rule = tuple[tuple[type, ...], Callable[[Any], bool], str]
"""The types and values that a setting may have, and how to say so."""
_SWITCH: Rule = (bool,), lambda _: True, "it must be true or false"


def whole_number(most: int) -> Rule:
    """Make the rule that a number is a whole one from 1 to ``most``."""
    return (int,), range(1, most + 1).__contains__, f"it must be a whole number from 1 to {most:,}"


def _seconds(most: float) -> Rule:
    return (int, float), lambda value: 0 < value <= most, f"give seconds, above 0 and up to {most:g}"


RULES: Mapping[str, Rule] = {
    "evaluation_only": _SWITCH, "in_process": _SWITCH, "needs_sandbox": _SWITCH, "max_turns": whole_number(1_000_000),
    "grade_deadline": _seconds(600), "run_deadline": _seconds(86_400),
}  # fmt: skip
"""Of a class's attributes; an entry of the list, which may say some of them in its place, has the same."""


class Environment(ABC):
    """Base of all environments; the subclass's docstring is its description.

    The keyword arguments of ``__init__`` are the options a user may set (``args`` in the YAML list); raise
    ``ValueError`` for values that make no sense. ``tasks`` runs in a server process, ``grade`` in worker
    processes that may be killed, each with an instance of its own: keep no state between two calls, and read
    data sets in ``tasks``, not in ``__init__``, which runs anew for every worker.
    """

    name: ClassVar[str]
    """How users select it: lower case, and the name of the module that holds it."""
    reward_range: ClassVar[tuple[float, float | None]] = (0.0, 1.0)
    """The reward of an empty answer and of a perfect one, which alone is right; None where there is no highest reward:
    evaluations then have a mean reward and no pass@k."""
    evaluation_only: bool = False
    """True keeps it out of training: only the ``test`` split is read."""
    in_process: bool = False
    """True grades in the server itself, without a worker: for a ``grade`` that is cheap and cannot hang."""
    grade_deadline: float = 5.0
    """Seconds that one grade or step may take before its worker is killed."""
    needs_sandbox: bool = False
    """True where it runs what a model wrote (`environments.sandbox`): refused on a machine that cannot do so safely."""
    max_turns: int = 1
    """How often the model may speak; above 1, ``step`` is asked and not ``grade``."""
    tools: Sequence[Mapping[str, Any]] = ()
    """What the model may call: schemas as in OpenAI's API, which the chat template shows it in every chat."""
    variables: Sequence[str] = ()
    """Environment variables that its worker processes need, such as the one with an API key: they get few others."""

    @abstractmethod
    def tasks(self, split: Split) -> Iterable[Task]:
        """Yield the tasks of ``train`` or of the held-out ``test``, in the same order on every call."""

    @abstractmethod
    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """Return the reward of ``transcript``; a function of the arguments alone."""

    def step(self, task: Task, state: Any, turn: Turn) -> Step:
        """Return the answer to one turn of the model; a function of the arguments alone.

        ``state`` is None in the first turn and then what the step before returned.
        """
        return Step(done=True, reward=self.grade(task, turn))

    def demonstrations(self, split: Split) -> Iterable[Demonstration]:
        """Yield worked solutions for the supervised warm start; none unless the environment has some.

        They are consumed in the order given, once each: the order is the curriculum. They may turn imperfect
        on purpose, but the first ones are expected to deserve the maximum reward.
        """
        return ()

    def gold_answer(self, task: Task) -> str | None:
        """Return a completion that deserves the maximum reward, or None; only the environment's self-test asks."""
        return None

    def gold_turns(self, task: Task) -> Sequence[str] | None:
        """Return the model's turns in a conversation that earns the maximum reward; only the self-test asks."""
        answer = self.gold_answer(task)
        return None if answer is None else [answer]

    @classmethod
    def description(cls) -> str:
        """Return the first line of the docstring."""
        return inspect.getdoc(cls).partition("\n")[0] if cls.__doc__ else ""

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """Return the options ``__init__`` declares, those of parents included where it passes ``**options`` on."""
        found: dict[str, inspect.Parameter] = {}
        for parent in cls.__mro__[:-1]:  # the last is `object`
            if "__init__" not in vars(parent):
                continue
            parameters = list(inspect.signature(parent.__init__).parameters.values())[1:]
            for parameter in parameters:
                if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                    found.setdefault(parameter.name, parameter)
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                break
        return found

    @classmethod
    def option_problems(cls, given: Mapping[str, Any]) -> list[str]:
        """List what is wrong with the names and types of the options ``given``, one line each."""
        declared = cls.options()
        problems = []
        for name, value in given.items():
            if name not in declared:
                problems.append(f"{cls.name} has no option {shorten(name)}{suggestion(name, declared)}")
            elif not fits(value, declared[name].default):
                wanted = type(declared[name].default).__name__
                problems.append(f"option {name!r} of {cls.name} is {shorten(value)}; it must be of type {wanted}")
        missing = [name for name, p in declared.items() if p.default is p.empty and name not in given]
        problems += [f"{cls.name} needs the option {name!r}" for name in missing]
        return problems

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Self:
        """Return an instance with the options ``given``; every way this can fail is a ``ConfigError``."""
        problems = cls.option_problems(given)
        if problems:
            raise ConfigError(problems)
        try:
            made = cls(**given)
        except (Exception, SystemExit) as error:
            reason = one_line(f"{type(error).__name__}: {error}")
            raise ConfigError([f"{cls.name} cannot be set up with its options: {reason}"]) from error
        for name, (types, is_right, wanted) in RULES.items():
            value = getattr(made, name, types[0](1))  # only harnesses have all
            if not (type(value) in types and is_right(value)):
                problems.append(f"{cls.name} has {name} {shorten(value)}; {wanted}")
        if problems:
            raise ConfigError(problems)
        return made


class ConversationEnvironment(Environment):
    """An environment of several turns: it has ``step`` in place of ``grade``.

    ::

        max_turns = 4

        def step(self, task, state, turn):
            if "?" in turn.text:
                return Step(messages=({"role": "user", "content": "Yes."},), state={"asked": 1})
            return Step(done=True, reward=float(turn.text == task.data["gold"]))

    A conversation ends with ``done``, after ``max_turns``, or when its tokens fill ``--inference-max-seq-length``;
    it is then worth the ``reward`` of its last step.
    """

    max_turns = 8

    @abstractmethod
    def step(self, task: Task, state: Any, turn: Turn) -> Step:
        """See ``Environment.step``."""

    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """Grade a conversation of this one turn."""
        turn = Turn(transcript.text, transcript.finish_reason, transcript.num_tokens, number=0, last=True)
        reward = self.step(task, None, turn).reward
        return self.reward_range[0] if reward is None else reward


class GroupEnvironment(Environment):
    """An environment that grades all answers to a task together: it has ``grade_group`` in place of ``grade``.

    ::

        def grade_group(self, task, transcripts):
            counts = Counter(each.text for each in transcripts)
            return [1.0 / counts[each.text] for each in transcripts]

    ``grade_deadline`` is then of a whole group. A ``HarnessEnvironment`` may be one, too: it is given all
    that was said in each sample, and its rewards are added to those of ``run``, of each agent if there are several.
    """

    @abstractmethod
    def grade_group(self, task: Task, transcripts: Sequence[Transcript]) -> Sequence[float | Grade]:
        """Return a reward for each answer, in their order; a function of the arguments alone.

        What is raised here masks the whole group, and so does running out of time.
        """

    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """Grade a group of this one answer."""
        return self.grade_group(task, (transcript,))[0]

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Self:
        """See ``Environment.from_options``; a ``ConfigError`` too for what is not graded by group."""
        made = super().from_options(given)
        if made.max_turns != 1 or cls.step is not Environment.step:
            why = "whose answers have one turn and are graded together; leave out step and max_turns"
            raise ConfigError([f"{cls.name} is a GroupEnvironment, {why}"])
        return made


class HarnessEnvironment(Environment):
    """An environment that calls the model itself: it has ``run`` in place of ``grade``.

    ::

        def run(self, task, client):
            messages = [{"role": "user", "content": task.prompt}]
            answer = client.chat.completions.create(model="policy", messages=messages)
            return float(answer.choices[0].message.content == task.data["gold"])

    Each sample runs in a process of its own, which ends with it, so an instance may keep what is alive: a sandbox,
    a browser. Its working directory, which is removed at the end, is the place for files.
    """

    run_deadline: float = 600.0
    """Seconds that one sample may take before its process is killed; it is then masked with the code ``timeout``."""

    @classmethod
    def preload(cls, options: Mapping[str, Any]) -> None:
        """Imports what every sample needs, once, in the process that theirs are forked from.

        It must leave no thread and no open connection behind: what is alive belongs into ``__init__`` or ``run``.
        """

    @abstractmethod
    def run(self, task: Task, client: openai.OpenAI) -> float | Grade:
        """Run one sample and return its reward; ``async def run`` is given an ``openai.AsyncOpenAI``.

        The client's base URL is the sample's own: every token the model says to it is trained on with this reward.
        What is raised here masks the sample.
        """

    def agent_client(self, client: AnyClient, name: str) -> AnyClient:
        """Return a client for the agent ``name`` of the sample; ``client`` itself is of the agent ``main``.

        Agents that called the model need a reward in `Grade.agent_rewards`, and are compared with the same agent in the
        other samples of the task. Clients of other libraries take its ``base_url``.
        """
        return client_of(client, name)

    def gold_turns(self, task: Task) -> Sequence[str | Message] | None:
        """Return what the model says to one call after the other in a sample with the highest reward, as text or as
        assistant messages with ``tool_calls``; only the self-test asks."""
        return super().gold_turns(task)

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Self:
        """See ``Environment.from_options``; a ``ConfigError`` too for what no harness can have."""
        made, problems = super().from_options(given), []
        if problem := lacks_openai():
            problems.append(f"{cls.name} is a harness, which {problem}")
        if made.max_turns != 1:
            why = "a harness calls the model as often as it likes"
            problems.append(f"{cls.name} has max_turns {shorten(made.max_turns)}, but {why}; leave it out")
        if made.in_process:
            problems.append(f"{cls.name} has in_process, but a sample of a harness has a process; leave it out")
        if problems:
            raise ConfigError(problems)
        return made

    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """Raise: never called, because ``run`` says what a sample is worth."""
        raise NotImplementedError(f"{self.name} is a harness: its samples are run, not graded")


def lacks_openai() -> str:
    """Return what to install where the extra ``agents`` is not, else nothing."""
    there = importlib.util.find_spec("openai") is not None
    return "" if there else "needs the openai package; pip install 'megatron-rl[agents]'"


def fits(value: object, default: object) -> bool:
    """Return whether ``value`` may stand where the declared ``default`` does; only plain scalars are compared."""
    if type(default) not in (bool, int, float, str):
        return True
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(default)


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return the tail of an error message about an unknown ``name``: the nearest known names, else all of them."""
    names = sorted(known)
    name = (name if isinstance(name, str) else shorten(name))[:LONGEST_NAME]
    lowered = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), list(lowered), n=3, cutoff=0.6)
    if near:
        return "; did you mean " + " or ".join(repr(lowered[match]) for match in near) + "?"
    return one_line("; known: " + ", ".join(names), MAX_LINE) if names else "; none exists"


def split_of(text: str, held_out: int = 16) -> Split:
    """Choose the split of a generated task, one in ``held_out`` a test: by a hash (FNV-1a) of its text, so that no
    text can be in both, whatever the options."""
    value = 2166136261
    for character in text:
        value = ((value ^ ord(character)) * 16777619) & 0xFFFFFFFF
    return "test" if (value >> 7) % held_out == 0 else "train"


def drawn_tasks(
    draw: Callable[[], Task], split: Split, count: int, few: str = "", repeats: bool = False
) -> Iterator[Task]:
    """Yield up to ``count`` tasks of a split, which ``split_of`` their id tells, as they are drawn; none twice, unless
    ``repeats``. Where no more are found it ends, or raises ``ValueError`` with the advice ``few``."""
    seen: set[str] = set()
    found = misses = 0
    while found < count and misses < ATTEMPTS:
        task = draw()
        misses += 1
        if split_of(task.id) == split and (repeats or task.id not in seen):
            misses, found = 0, found + 1
            seen.add(task.id)
            yield task
    if found < count and few:
        raise ValueError(f"found only {found} {split} tasks; {few} or ask for fewer")
