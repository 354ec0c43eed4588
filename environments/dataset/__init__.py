"""Any data set, described in the environment list: where its rows are, what asks for an answer, what rewards one."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_rl.environments.data import DatasetEnvironment, Problem, Row, RowError, Source, held_out, read_rows
from megatron_rl.environments.data.layouts import CHAT, CODE, MATH, WRITTEN, Layout
from megatron_rl.environments.grading import needs_sandbox, reward_range, stated_deadline
from megatron_rl.environments.grading.unit_tests import check_tests
from megatron_rl.environments.rewards import reward_of, weighted
from megatron_rl.errors import ConfigError
from megatron_rl.types import Demonstration, Grade, LaterTurn, Message, Prompt, Split, Task, Transcript

FILES = (".json", ".jsonl", ".csv", ".parquet", ".gz")
"""Endings of a path that is no name on the hub, also where there is no such file."""
COLUMN = re.compile(r"\\[a-zA-Z]+(?:\{[^{}]*\})+|\{([\w.]+)\}")
"""A column in a template, ``{question}``; what TeX has in braces, ``\\boxed{x}``, is none."""
FORMS = ("%s", "\\boxed{%s}", "#### %s", "Answer: %s", "The answer is %s.", "<answer>%s</answer>")
"""How functions may want an answer written."""
LEARNT = (WRITTEN, CHAT)
TESTED = ("unit_tests", "unit_tests_share")
"""Graders whose right answer is tests."""
OTHERWISE = "; or name its columns: prompt, and answer or completion"

Conversation = tuple[tuple[Message, ...], str, tuple[LaterTurn, ...]]
"""The prompt, what a model should say to it, and what should come after."""


class Dataset(DatasetEnvironment):
    """Any data set, from a file or the Hugging Face hub, with a grader or a function of your own.

    ``path`` is a file, or a name on the hub with ``split`` and ``config``. ``prompt``, ``answer`` and ``completion``
    name columns (``a.b`` is a field of one); without them the published layouts are recognised. ``template`` makes the
    prompt out of columns in braces, ``system`` comes before it; ``chat: false`` makes it plain text. ``reward`` is a
    grader's name, or ``file.py:function``, which gets the completion and the row, or has TRL's signature
    ``(completions, **columns)``; ``rewards`` are several with their weights. What to learn from is a ``completion``,
    or a chat that ends with the assistant. The test split is ``test_path`` or ``test_split``, or one row in
    ``held_out``.
    """

    name = "dataset"
    skips_bad_rows = True

    def __init__(
        self,
        *,
        path: str = "",
        config: str = "",
        split: str = "train",
        test_path: str = "",
        test_split: str = "",
        held_out: int = 0,
        prompt: str = "",
        answer: str = "",
        completion: str = "",
        template: str = "",
        system: str = "",
        chat: bool = True,
        reward: str = "",
        rewards: Mapping[str, float] | None = None,
        **options: object,
    ) -> None:
        if rewards and (reward or set(rewards) & set(TESTED)):
            raise ValueError(f"rewards cannot be combined with reward or {' or '.join(TESTED)}; give one of them alone")
        references = list(rewards or [reward or "exact"])
        self.grader = references[0]
        self._function = reward_of(reward) if ":" in reward else None
        self.reward_range = reward_range(self.grader)
        if rewards:
            reward = self.grader
            self._function, self.reward_range = weighted(rewards)
        self._compares = any(":" not in each for each in references)
        self.needs_sandbox = any(map(needs_sandbox, references))
        self.grade_deadline = sum(stated_deadline(each) or 0 for each in references) or self.grade_deadline
        self._tests = self.grader in TESTED
        super().__init__(path=path, **options)
        if not path:
            raise ValueError("path is missing; give a file, or the name of a data set on the Hugging Face hub")
        if held_out < 0 or held_out == 1 or (held_out and (test_path or test_split)):
            raise ValueError(f"held_out is {held_out}; use 0, or at least 2 where there is no test_path or test_split")
        if self._function and options.get("format_reward"):
            raise ValueError("format_reward is for graders, and reward is a function; add it there")
        if system and not chat:
            raise ValueError("system is a message of a chat, and chat is false; write it into template")
        self.held_out = held_out
        self._reward, self._template, self._system, self._chat = reward, template, system, chat
        layouts = self._layouts(prompt, answer, completion)
        self._train = self._source(path, "path", split, config, layouts)
        self._test = None
        if test_path:
            self._test = self._source(test_path, "test_path", test_split or "test", config, layouts)
        elif test_split:
            if self._train.path:
                raise ValueError("test_split is of a data set with splits, and path is a file; use test_path")
            self._test = replace(self._train, split=test_split)

    def _layouts(self, prompt: str, answer: str, completion: str) -> tuple[Layout, ...]:
        names = tuple(dict.fromkeys(found[1] for found in COLUMN.finditer(self._template) if found[1]))
        if self._template and not names:
            raise ValueError("template names no column in braces, so every prompt would be the same; write {column}")
        if prompt or answer or completion or (names and not self._compares):
            if not (prompt or names):
                raise ValueError("answer or completion name a column, and nothing the prompt; give prompt or template")
            if self._reward and self._compares and not answer and not (completion and self.grader == "exact"):
                raise ValueError(f"reward {self._reward} compares with the right answer; give its column as answer")
            return (Layout(prompt or names[0], answer, completion, others=names),)
        if self._tests:
            return tuple(replace(layout, others=names) for layout in CODE)
        found = (*LEARNT, *MATH)  # of the latter the first row says that a reward is missing
        if self._reward:
            found = (*MATH, *LEARNT[: self.grader == "exact"])
            found = found if self._compares else (*MATH, *LEARNT, Layout("prompt"))
        return tuple(replace(layout, others=names) for layout in found)

    def _source(self, path: str, option: str, split: str, config: str, layouts: tuple[Layout, ...]) -> Source:
        """A file, or what ``datasets`` finds under a name: on the hub, or in a folder."""
        file = os.path.expanduser(path)
        is_file = os.path.exists(file) or file.lower().endswith(FILES)
        is_file &= not os.path.isdir(file)
        found = Source(path, split, layouts, config or None, path if is_file else "", option)
        return replace(found, all_columns=self._function is not None, otherwise=OTHERWISE)

    def problems(self, split: Split) -> Sequence[Problem]:
        """Those of the split's source, or of one source the part that is held out or not."""
        if self._test is not None:
            return self.load(self._test if split == "test" else self._train)
        rows = self.load(self._train)
        if self.evaluation_only:
            return rows
        return [row for row in rows if held_out(row.statement, self.held_out) == (split == "test")]

    def demonstrations(self, split: Split) -> Iterator[Demonstration]:
        """What there is to learn, in the order of the data set."""
        return (Demonstration(row.task, row.solution, row.later) for row in self.learnt(split))

    def learnt(self, split: Split) -> Iterator[Problem]:
        """All rows that have something to learn, also several of one prompt."""
        own = self._test is not None or self.evaluation_only
        source = self._test if self._test is not None and split == "test" else self._train
        for row in read_rows(source, self.numbered, lambda _: None):
            if row.solution and (own or held_out(row.statement, self.held_out) == (split == "test")):
                yield row

    def parse(self, row: Row) -> Problem:
        """The prompt, what is to be learnt, and what its reward wants to know."""
        messages, solution, later = _turns(self._messages(row))
        statement = "\n".join(message["content"] for message in messages if message["role"] != "system")
        prompt: Prompt = messages
        if not self._chat:
            if len(messages) > 1 or later:
                raise RowError(f"has a chat in {row.layout.problem}, which is no plain text; leave out chat: false")
            prompt = statement
        if self._function is not None:
            shown = {"gold": solution} if solution and not row.layout.answer else {}
            gold = row.answer() if self._compares and row.layout.answer else _gold(row)
            return Problem(statement, prompt, gold, {"row": row.as_json(), **shown}, solution, later)
        if self._tests:
            return Problem(statement, prompt, _tests(row), solution=solution, later=later)
        if row.layout.answer and self._reward:
            return Problem(statement, prompt, row.answer(), solution=solution, later=later)
        if not solution:
            what = "set reward: math, or file.py:function" if not self._reward else "name the column of the answer"
            raise ConfigError([f"dataset: rows with the columns {', '.join(row.values)} have nothing to learn; {what}"])
        # Not as the gold answer: of one prompt there may be several completions, and none contradicts another.
        return Problem(statement, prompt, "", {"gold": solution}, solution, later)

    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """The grader's verdict, or the function's."""
        if self._function is None:
            return super().grade(task, transcript)
        verdict = self._function(self.answer_in(transcript), task)
        if not self.overlong.buffer:
            return verdict
        return self.less_length(verdict if isinstance(verdict, Grade) else Grade(verdict), transcript)

    def gold_answer(self, task: Task) -> str | None:
        """The right answer as its grader wants it written. Of a function that does not say ``FORM`` in the first of the
        usual forms that it finds right."""
        if self._function is None or "gold" not in task.data or super().gold_answer(task):
            return super().gold_answer(task)
        written = [self.before_answer + form % task.data["gold"] for form in FORMS]
        return next((text for text in written if self.finds_right(task, text)), written[0])

    def _messages(self, row: Row) -> tuple[Message, ...]:
        """The whole chat of a row, with what is to be learnt at its end."""
        path, completion = row.layout.problem, row.layout.solution
        if self._template:
            messages = _from_user(COLUMN.sub(lambda found: _filled(found, row), self._template))
        elif isinstance(row.value(path), list):
            is_learnt = not completion and (path.endswith(CHAT.problem) or not self._reward)
            messages = row.messages(path) if is_learnt else row.asking(path)
        else:
            messages = _from_user(row.text(path))
        if self._system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self._system}, *messages)
        if not completion:
            return messages
        if isinstance(row.value(completion), list):
            return (*messages, *row.messages(completion))
        return (*messages, {"role": "assistant", "content": row.text(completion)})


def _gold(row: Row) -> str:
    """The right answer to show, of whatever type it is: the function gets the row, so nothing need be in order."""
    with contextlib.suppress(RowError):
        return row.answer()
    try:
        value = row.value(row.layout.answer)
    except RowError:
        return ""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)


def _from_user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _filled(found: re.Match[str], row: Row) -> str:
    """The column of a pair of braces; what TeX has in them stays."""
    if found[1] is None:
        return found[0]
    value = row.value(found[1])
    if value in ("", None) and found[1] != row.layout.problem:
        return ""  # as APPS's starter_code in most rows
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return "\n".join(value)
    return row.text(found[1])


def _tests(row: Row) -> str:
    gold = row.tests()
    try:
        check_tests(gold)
    except ValueError as error:
        raise RowError(f"has {row.layout.answer} that {error}") from error
    return gold


def _turns(messages: tuple[Message, ...]) -> Conversation:
    """A chat that ends with the assistant, cut at what it says; of another one all is the prompt."""
    if messages[-1]["role"] != "assistant":
        return messages, "", ()
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if said[0] == 0 or any(now - before < 2 for before, now in pairwise(said)):
        raise RowError("has a chat in which the assistant speaks first, or twice in a row")
    later = [LaterTurn(messages[before + 1 : now], messages[now]["content"]) for before, now in pairwise(said)]
    return messages[: said[0]], messages[said[0]]["content"], tuple(later)
