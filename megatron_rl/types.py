"""The data that crosses stage boundaries: frozen dataclasses, no behaviour beyond derived numbers.

A worked example used throughout: prompt ``P0 P1``, answer ``A0 E`` (``E`` is the end token)::

    token_ids           P0  P1  A0  E
    loss mask            0   0   1   1
    inference_logprobs   0   0  l2  l3      (token t's log-prob sits at index t)

Shapes: ``[T]`` packed tokens, ``[B]`` samples, ``[G]`` a group, ``[V]`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from megatron_rl.sampling import Constraints as Constraints
from megatron_rl.sampling import SamplingParams as SamplingParams
from megatron_rl.sampling import TokenScore as TokenScore

if TYPE_CHECKING:
    import torch

Split = Literal["train", "test"]
FinishReason = Literal["stop", "length", "stop_string", "error"]
"""``stop`` is an end token, or one that ends an answer like a stop string; ``error``: its grammar allows no token."""
Message = Mapping[str, Any]
"""One chat turn as in OpenAI's API, ``{"role": "user", "content": "..."}`` and perhaps tool calls; JSON values only."""
Prompt = str | tuple[Message, ...]
"""Plain text, or chat messages to be rendered with the tokenizer's chat template."""


@dataclass(frozen=True)
class Task:
    """One problem of an environment. ``id`` is unique and stable within its environment."""

    id: str
    prompt: Prompt
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the grader needs (a gold answer, a target); JSON values only."""


@dataclass(frozen=True)
class LaterTurn:
    """The environment's reply in a worked conversation, and the answer to it, without the end-of-text token."""

    messages: tuple[Message, ...]
    completion: str


@dataclass(frozen=True)
class Demonstration:
    """A worked solution of a task, for the supervised warm start."""

    task: Task
    completion: str
    """The text the model should answer, without the end-of-text token."""
    later: tuple[LaterTurn, ...] = ()
    """The rest of a conversation."""


@dataclass(frozen=True)
class Transcript:
    """The policy's completion of a task, as the grader sees it."""

    text: str
    """The decoded completion without the end-of-text token."""
    finish_reason: FinishReason
    num_tokens: int

    @property
    def ended(self) -> bool:
        """True when the model ended by itself instead of being cut at the length limit."""
        return self.finish_reason != "length"


@dataclass(frozen=True)
class Turn(Transcript):
    """One turn of the model in a conversation; ``text`` is this turn's alone."""

    number: int = 0
    """Counted from 0."""
    last: bool = False
    """True when the model gets no further turn, whatever the environment says."""
    tool_call_parser: str = ""
    """What reads tool calls in the text; empty where the environment has no tools, or no chat template shows them."""


@dataclass(frozen=True)
class Grade:
    """An environment's verdict on a sample; a grade that failed has a code and no reward."""

    reward: float | None
    """A finite number; None of a grade that failed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    status: str = ""
    """Why: ``correct | wrong | no_answer | unparsable | timeout``, or an author's own word."""
    extracted: str | None = None
    """The part of the completion that was taken as the answer."""
    correct: bool | None = field(default=None, kw_only=True)
    """Whether the answer is right. Left out, `environments.results.is_right` tells by status and reward, if it can."""
    code: str = field(default="", kw_only=True)
    """Where grading failed: ``timeout | environment_exception | invalid_reward | worker_died | server_unreachable``."""
    message: str = field(default="", kw_only=True)
    continuation: Continuation | None = field(default=None, kw_only=True)
    """Set when the conversation goes on; ``reward`` is then its worth if it cannot."""
    turn_reward: float = field(default=0.0, kw_only=True)
    """`Step.turn_reward` of the turn that was judged."""
    completion_rewards: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    """Of a harness: rewards of single answers by the ``id`` of their completion, added to ``reward``."""
    agent_rewards: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    """Of a harness with several agents: what each is trained with, by name. ``reward`` is then of evaluations alone."""

    @property
    def failed(self) -> bool:
        """True without a reward: the sample leaves baseline, loss and counts."""
        return self.reward is None


Item = tuple[Task, Transcript] | tuple[Task, Any, Turn]
"""What an environment judges: a finished sample, or a task, the conversation's state and the model's turn."""


@dataclass(frozen=True)
class HarnessRun:
    """One sample for a harness to run: its task, and where to call the model."""

    task: Task
    sample: int
    """Its number in the group."""
    base_url: str
    """Of the sample's own session: ``http://127.0.0.1:PORT/sessions/ID/v1``."""
    api_key: str = field(repr=False)
    model: str = "policy"


@dataclass(frozen=True)
class Step:
    """An environment's answer to one turn of the model."""

    messages: tuple[Message, ...] = ()
    """What the model reads next; not empty unless ``done``."""
    state: Any = None
    """Comes back with the next turn: JSON values only."""
    done: bool = False
    """True ends the conversation with ``reward``, which is then not None."""
    reward: float | Grade | None = None
    """What the conversation is worth if no room is left after this turn. None is the environment's lowest reward."""
    turn_reward: float = 0.0
    """Reward of this turn alone. The sample's reward is ``reward`` at the end and those of all turns together."""


@dataclass(frozen=True)
class Continuation:
    """The messages that the model reads next in a conversation, and the state that its next turn is judged with."""

    messages: tuple[Message, ...]
    state: Any = None


@dataclass(frozen=True)
class SourcedTask:
    """A task as it was drawn from its environment."""

    environment: str
    task: Task
    epoch: int = 0
    """How often this task was drawn before; keeps the samples of a repeated task different."""
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Place:
    """The samples of a group that a request is for, and its call of the model; by default all, and the first."""

    first_sample: int = 0
    """Number of the first of the samples: a later turn is asked for sample by sample."""
    turn: int = 0
    """The model's turns before this one; a conversation that waits goes before those that have not begun."""
    call: int | None = None
    """The call of the endpoint that waits for it; None of what the rollout itself asks for."""
    branch: int = 0
    """Of the sample's calls with the very same prompt each has another, and so random numbers of its own."""


@dataclass(frozen=True)
class Hints:
    """Hints to an engine about a request. No token depends on them."""

    expected_tokens: int | None = None
    """How many tokens a sample will probably have; None is as many as it may. Changes the order of work."""
    goes_on: bool = False
    """Whether later turns are likely: what a sample leaves in the KV cache is then worth keeping."""
    streams: bool = False
    """Whether somebody reads the tokens as they come: the first ones are then shown at once."""
    wants_routing: bool = False
    """Completions are to have `Completion.routing`, which an engine for `--rl-router-replay` can give."""
    top_logprobs: int = 0
    """How many of the likeliest tokens `Completion.scores` are to have, at every token drawn."""
    scores_prompt: bool = False
    """Completions are to have `Completion.prompt_scores`: the prompt is computed from its beginning."""


@dataclass(frozen=True)
class Talk:
    """What is known of one sample of a conversation or of a harness that waits for the next step."""

    state: Any = None
    earned: tuple[float, ...] = ()
    """Rewards of its turns so far."""
    calls: Mapping[str, Completion] | None = None
    """Of a harness: the answers to its calls by `Trace.key`, perhaps begun. It is started again and calls again."""
    ended: Rollout | None = None
    """A sample that has ended, while others of its group have not."""


@dataclass(frozen=True)
class Request:
    """One prompt and the number of samples wanted for it; they share one prefill."""

    source: SourcedTask
    """With the place, and a prompt that is not the task's own, it fixes the random numbers of the samples."""
    prompt_ids: tuple[int, ...]
    num_samples: int
    sampling: SamplingParams
    index: int = 0
    """Position in the caller's list; comes back with the result."""
    place: Place = Place()
    hints: Hints = Hints()
    so_far: tuple[Completion, ...] = ()
    """Of a request that `Engine.interrupt` gave back: one each, from which they go on."""
    talks: tuple[Talk, ...] = ()
    """One a sample of a harness, or of a conversation behind its first turn: ``so_far`` ends with the turn begun."""

    @property
    def is_generated(self) -> bool:
        """True when all its samples are finished."""
        return bool(self.so_far) and all(s.finish_reason is not None for s in self.so_far)


@dataclass(frozen=True)
class Completion:
    """One sampled answer, with the end token if there was one; a conversation with what was read between turns."""

    token_ids: tuple[int, ...]
    inference_logprobs: tuple[float, ...]
    """fp32 log-prob of each token under the distribution it was drawn from; 0 where the model read."""
    finish_reason: FinishReason | None
    """None of a sample that goes on, in `Request.so_far`."""
    policy_version: int
    """How many steps had changed the policy that drew the tokens, except the ``older`` ones."""
    environment_spans: tuple[tuple[int, int], ...] = ()
    """``[start, end)`` of the tokens that the model read and did not write: not in the loss."""
    routing: torch.Tensor | None = field(default=None, compare=False)
    """[prompt and answer, layers of this rank, k] uint8 or int16, on the CPU: the experts of each token. Of the last
    token, which was never fed, the largest number of the dtype."""
    older: tuple[tuple[int, int], ...] = ()
    """``(version, end)`` of each stretch at the beginning that an older policy drew: with ((3, 2), (4, 7)) and
    ``policy_version`` 6, tokens 0 and 1 are of version 3, tokens 2 to 6 of version 4, and the others of version 6."""
    turn_rewards: tuple[float, ...] = ()
    """One for each turn, the last with what the environment gave at the end; empty where no turn had its own."""
    cached_tokens: int = field(default=0, compare=False)
    """Prompt tokens found in the KV cache; depends on what else was drawn."""
    scores: tuple[TokenScore, ...] = field(default=(), compare=False)
    """Of each token, where `Hints.top_logprobs` asks for them, from what it was drawn from."""
    prompt_scores: tuple[TokenScore, ...] = field(default=(), compare=False)
    """Of each prompt token but the first, from the model's own distribution, where `Hints.scores_prompt` asks."""

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """Policy version and number of tokens of each stretch."""
        ends = (*self.older, (self.policy_version, len(self.token_ids)))
        starts = (0, *(end for _, end in self.older))
        return tuple((version, end - start) for (version, end), start in zip(ends, starts, strict=True))

    @property
    def num_written(self) -> int:
        """Number of tokens the model wrote."""
        return len(self.token_ids) - sum(end - start for start, end in self.environment_spans)

    @property
    def num_turns(self) -> int:
        """Number of the model's turns."""
        return len(self.environment_spans) + 1


Completed = tuple[Request, tuple[Completion, ...]]
"""A request and its completions, ordered by sample."""


@dataclass(frozen=True)
class Branch:
    """A further sequence of a sample; what it shares with an earlier one is prompt, so no token is trained on twice."""

    prompt_ids: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True)
class Rollout:
    """One graded sample: a completion, and of a harness perhaps further ones."""

    completion: Completion
    text: str
    grade: Grade
    prompt_ids: tuple[int, ...] | None = None
    """The harness's own; None: the group's."""
    branches: tuple[Branch, ...] = ()
    agents: tuple[str, ...] = ()
    """The agent of each sequence, ascending; empty of a sample without agents."""

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Completions of all its sequences."""
        return (self.completion, *(branch.completion for branch in self.branches))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all completions, written or read between turns."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def num_written(self) -> int:
        """Number of tokens the model wrote in all its sequences."""
        return sum(completion.num_written for completion in self.completions)

    @property
    def truncated(self) -> bool:
        """True when a sequence was cut at its length limit."""
        return any(completion.finish_reason == "length" for completion in self.completions)


@dataclass(frozen=True)
class RolloutGroup:
    """The graded samples of one task: what an advantage is computed over."""

    source: SourcedTask
    prompt_ids: tuple[int, ...]
    rollouts: tuple[Rollout, ...]

    @property
    def is_graded(self) -> bool:
        """False while the grade of a sample has failed."""
        return not any(rollout.grade.failed for rollout in self.rollouts)

    def sequences(self, rollout: Rollout) -> tuple[Branch, ...]:
        """List the sequences of one of its samples, each with its prompt."""
        own = self.prompt_ids if rollout.prompt_ids is None else rollout.prompt_ids
        return (Branch(own, rollout.completion), *rollout.branches)
