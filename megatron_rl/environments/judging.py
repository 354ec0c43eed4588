"""Rewards from a model: a judge is asked for a verdict, whose number becomes the reward.

It is any OpenAI-compatible URL, or the model of the run.

    judge = Judge(JudgeSettings(url="https://host/v1", model="large", key_variable="JUDGE_KEY"))
    judge.verdict(question, answer, reference)        # a reward from 0 to 1, or JudgeError

What does not come to a verdict raises, so the sample is masked; it never becomes a reward of 0.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from megatron_rl.environments.base import fits, suggestion
from megatron_rl.environments.wire import read_key
from megatron_rl.errors import one_line, shorten
from megatron_rl.json_text import loads

if TYPE_CHECKING:
    import openai

POLICY, RANKING = "policy", "ranking"
SESSION = re.compile(r"/sessions/[^/]+(/agents/[^/]+)?/v1/?$")
FIELDS = re.compile(r"\{(question|answer|reference)\}")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
PROMPT = """\
You grade answers. Question:
{question}

Reference answer:
{reference}

Answer to grade:
{answer}

Say how good the answer is as a whole number from 0 (wrong) to 10 (as good as the reference). Say only the number."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two tries: doubled from the one to the other, unless the server's Retry-After says how long."""
PASSING = (408, 409, 429)
"""Statuses, besides those from 500, that the same request may not get again."""


class JudgeError(Exception):
    """There is no verdict; the message says why, without the key."""


@dataclass(frozen=True)
class JudgeSettings:
    """Whom to ask and how; the fields are the keys of the option ``judge``."""

    url: str = POLICY
    """Up to and with ``/v1``; ``policy`` is the model that is trained, as it is now."""
    model: str = POLICY
    prompt: str = PROMPT
    """With ``{answer}``, of a ranking ``{answers}``, and perhaps ``{question}`` and ``{reference}``; other braces
    stay."""
    verdict: str = "number"
    """How it is read: ``number`` (the last one said), ``json:KEY``, or a regular expression with a group. ``ranking``:
    the judge sees all answers of a group at once and scores each (`ranking.Ranking`)."""
    lowest: float = 0.0
    highest: float = 10.0
    """Verdicts from ``lowest`` to ``highest`` become rewards from 0 to 1; any other is a failure."""
    key_variable: str = ""
    """Name of the environment variable that has the API key."""
    temperature: float = 0.0
    max_tokens: int = 16
    """Of a ranking for each answer."""
    deadline: float = 60.0
    """Seconds for one verdict: all attempts and the pauses between them. For the model of the run only the harness's
    ``run_deadline`` counts: its calls wait until the rollout comes to them."""
    attempts: int = 6

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ValueError(f"judge: {problem}")
        if not self.ranks:
            reader_of(self.verdict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Read the settings from an environment's option; ``ValueError`` names what is wrong with it."""
        known = {each.name: each.default for each in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"judge has no key {shorten(name)}{suggestion(name, known)}")
            if not fits(value, known[name]):
                raise ValueError(f"judge: {name} is {shorten(value)}; it must be of type {type(known[name]).__name__}")
        return cls(**given)

    def _problems(self) -> Iterator[str]:
        if not self.is_own and not self.url.startswith(("http://", "https://")):
            yield f"url is {shorten(self.url)}; give http(s)://HOST/v1 (of `megatron-rl serve`, or another), or policy"
        for name in ("model", "key_variable", "deadline"):
            if self.is_own and getattr(self, name) != getattr(type(self), name):
                yield f"{name} is for judges at a URL, and url is {self.url}: leave it out"
        if self.key_variable and not os.environ.get(self.key_variable):
            yield f"the environment variable {self.key_variable}, which should have the API key, is not set"
        yield from self._prompt_problems()
        if not -math.inf < self.lowest < self.highest < math.inf:
            yield f"lowest is {self.lowest:g} and highest {self.highest:g}; the first must be the smaller"
        if not (0 < self.deadline < math.inf and 0 <= self.temperature < math.inf):
            yield f"deadline is {self.deadline:g} and temperature {self.temperature:g}; use above 0, and at least 0"
        for name in ("attempts", "max_tokens"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"

    def _prompt_problems(self) -> Iterator[str]:
        shown = "{answers}" if self.ranks else "{answer}"
        if shown not in self.prompt and not (self.ranks and self.prompt == PROMPT):
            yield f"prompt does not show the {shown}; write it in, and perhaps {{question}} and {{reference}}"
        if self.ranks and self.is_own:
            yield "verdict ranking needs a judge at a URL; give url: http(s)://HOST/v1, e.g. of `megatron-rl serve`"

    @property
    def is_own(self) -> bool:
        """Return whether the model of the run judges."""
        return self.url == POLICY

    @property
    def ranks(self) -> bool:
        """Return whether the answers of a group are judged together."""
        return self.verdict == RANKING


class Judge:
    def __init__(self, settings: JudgeSettings, policy: openai.OpenAI | None = None) -> None:
        """``policy`` is the client of a harness, for a model of the run: its session is left out, so that nobody trains
        on what the judge says."""
        self._settings, self._read = settings, None if settings.ranks else reader_of(settings.verdict)
        self._url, self._key = settings.url, os.environ.get(settings.key_variable, "")
        if settings.is_own:
            if policy is None:
                raise ValueError("judge: url is policy, which only a harness knows; give a URL")
            self._url, self._key = SESSION.sub("/v1", str(policy.base_url)), policy.api_key
        self._url = self._url.rstrip("/") + "/chat/completions"

    def verdict(self, question: str, answer: str, reference: str = "") -> float:
        """Ask the judge and return the reward, from 0 to 1.

        Raises:
            JudgeError: the judge cannot be reached, refuses, takes too long, or says nothing that can be read.
        """
        shown = {"question": question, "answer": answer, "reference": reference}
        said = self.ask(FIELDS.sub(lambda found: shown[found[1]], self._settings.prompt), self._settings.max_tokens)
        try:
            value = self._read(said)
        except (ValueError, LookupError, TypeError, ArithmeticError):
            raise JudgeError(f"the judge's answer has no verdict to read: {shorten(said)}") from None
        return self.reward(value)

    def reward(self, value: float) -> float:
        """Return the reward of a verdict, from 0 to 1; ``JudgeError`` for one out of range."""
        lowest, highest = self._settings.lowest, self._settings.highest
        if not lowest <= value <= highest:  # NaN is not, either
            raise JudgeError(f"the judge's verdict is {value:g}, outside {lowest:g} to {highest:g}")
        return (value - lowest) / (highest - lowest)

    def ask(self, prompt: str, max_tokens: int) -> str:
        """Return the judge's answer, after as many tries as the settings allow, or raise ``JudgeError``."""
        import httpx  # of openai; only processes that ask pay for it

        settings, headers = self._settings, {"Authorization": f"Bearer {self._key}"} if self._key else {}
        body = {"model": POLICY if settings.is_own else settings.model, "temperature": settings.temperature}
        body |= {"max_tokens": max_tokens, "messages": [{"role": "user", "content": prompt}]}
        ends = math.inf if settings.is_own else time.monotonic() + settings.deadline
        with httpx.Client(headers=headers, trust_env=not settings.is_own) as client:  # no proxy knows loopback
            for attempt in range(1, settings.attempts + 1):
                wait = min(FIRST_PAUSE * 2 ** min(attempt - 1, 10), LONGEST_PAUSE)
                left = None if settings.is_own else max(ends - time.monotonic(), 0.001)
                try:
                    answer = client.post(self._url, json=body, timeout=left)
                    if answer.is_success:
                        return _content(answer.text)
                    problem = self._without_key(f"status {answer.status_code}: {answer.text}")
                    if answer.status_code < 500 and answer.status_code not in PASSING:
                        raise JudgeError(f"the judge refused with {problem}")
                    wait = _asked_to_wait(answer.headers.get("retry-after"), wait)
                except (httpx.HTTPError, ValueError) as error:  # no connection, none in time, no answer of a model
                    problem = self._without_key(f"{type(error).__name__}: {error}")
                if time.monotonic() + wait >= ends:
                    break
                time.sleep(wait)
        most = "" if settings.is_own else f", {settings.deadline:g} s at most"
        raise JudgeError(f"no verdict in {attempt} tries{most}; the last: {problem}")

    def _without_key(self, text: str) -> str:
        """One line for the log, whatever the server quoted."""
        return one_line(text.replace(self._key, "[key]") if self._key else text, 300)


def reader_of(verdict: str) -> Callable[[str], float]:
    """Return the function that reads a judge's answer; it raises if there is no verdict.

    Raises:
        ValueError: ``verdict`` is none of the three kinds.
    """
    if verdict == "number":
        return lambda said: float(NUMBER.findall(said)[-1])
    kind, _, key = verdict.partition(":")
    if kind == "json" and key:
        return lambda said: float(loads(said[said.index("{") : said.rindex("}") + 1])[key])
    try:
        pattern = re.compile(verdict)
    except re.error as error:
        raise ValueError(f"judge: verdict {shorten(verdict)} is no regular expression ({error})") from None
    if not pattern.groups:
        advice = "use number, json:KEY, or a regular expression with a group"
        raise ValueError(f"judge: verdict is {shorten(verdict)}; {advice}")
    return lambda said: float(pattern.search(said)[1])


def _content(body: str) -> str:
    """What the model says; ``WireError`` for a body that is no chat completion."""
    choice = next(iter(read_key(loads(body), "choices", list)), None)
    return read_key(read_key(choice, "message", Mapping, "choices[0]"), "content", (str, type(None)), "message") or ""


def _asked_to_wait(retry_after: str | None, otherwise: float) -> float:
    """Seconds; a Retry-After that is a date is not read."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return otherwise
    return seconds if 0 <= seconds < math.inf else otherwise
