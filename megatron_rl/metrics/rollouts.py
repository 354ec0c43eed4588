"""Rollout records: what the policy wrote and what it got for it, one JSON line a sequence.

For prompt ``P0 P1`` and answer ``A0 E``::

    {"step": 12, "environment": "arithmetic", "task_id": "7", "sample": 0, "branch": 0,
     "prompt": "<bos>2+2=", "prompt_ids": [P0, P1], "gold": "4",
     "completion": "4", "token_ids": [A0, E], "inference_logprobs": [l2, l3], "token_texts": ["4", "<eos>"],
     "reward": 1.0, "turn_rewards": [], "correct": true, "status": "ok", ..., "policy_version": 11}

The prompt is as the model saw it, special tokens included. ``correct`` is what evaluations count: the verdict, or else
whether the reward is the highest; null where nobody can tell, and where the grade failed.

Records of an evaluation have ``"greedy": true`` or ``false`` besides. Those of training say what became of the sample::

    {"group": 3, "advantage": 0.5, "update": 1, ...}

``update`` counts the optimizer updates of a pass over the rollout from 0; it and ``advantage`` are null for a sample
that is not in the loss. A sample of a harness may have several sequences: a row each, ``branch`` counting them from 0.
Rows above 0 say what their prompt shares with an earlier sequence, and what the model read behind it; ``completion``
has special tokens there::

    {"sample": 0, "branch": 1, "branch_of": 0, "shared_tokens": 7, "read": "<user>try again", ...}

Count samples by the rows of branch 0. With ``--rl-log-rollouts`` at least the step's groups, an update can be computed
again from the records alone. Rows of a harness with several agents have ``"agent": "planner", "agent_reward": 0.5``,
what that agent is trained with; ``reward`` is then the sample's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix
from pathlib import Path
from typing import Any

from megatron_rl.atomic import write_text_atomic
from megatron_rl.metrics.jsonl import to_plain
from megatron_rl.types import Branch, Rollout, RolloutGroup, Task

LEFT_OUT = ("routing", "cached_tokens", "scores", "prompt_scores")
"""Fields of completions: large, another number in each run, and those that only served answers have."""
MAX_CHARACTERS = 4_000
"""Of a prompt or answer, in TensorBoard and wandb."""
SHOWN_CHARACTERS = 300
"""On the screen: about three lines each."""
GRADE_FIELDS = ("correct", "reward", "code", "message", "metrics", "extracted")


def training_rows(
    step: int,
    groups: Sequence[RolloutGroup],
    numbers: Sequence[int],
    use: Mapping[tuple[int, int], Sequence[float]],
    limit: int,
    decode_raw: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """Make the rows of those of this rank's ``groups`` whose number in the step is below ``limit``; JSON values only.

    ``use`` has, by sample and sequence, the update and the mean advantage of all sequences that are in the loss.
    """
    kept = [(number, group) for number, group in zip(numbers, groups, strict=True) if number < limit]
    by_group = rows_by_group(step, [group for _, group in kept], decode_raw)
    for (number, group), rows in zip(kept, by_group, strict=True):
        for row in rows:
            # Every group of a step has as many samples: this is how the step numbers them.
            sample = number * len(group.rollouts) + row["sample"]
            update, advantage = use.get((sample, row["branch"]), (None, None))
            row |= {"group": number, "advantage": advantage, "update": update}
    return [row for rows in by_group for row in rows]


def rows_by_group(
    step: int, groups: Iterable[RolloutGroup], decode_raw: Callable[[Sequence[int]], str]
) -> list[list[dict[str, Any]]]:
    """Make a row for each sequence. ``decode_raw`` gives the text of ids with special tokens by name."""
    token_text = cache(lambda token: decode_raw((token,)))
    by_group = []
    for group in groups:
        prompt, gold = decode_raw(group.prompt_ids), gold_answer(group.source.task)
        rows = []
        for index, rollout in enumerate(group.rollouts):
            sequences = group.sequences(rollout)
            for number, (ids, completion) in enumerate((one.prompt_ids, one.completion) for one in sequences):
                rows.append(to_plain({
                    "step": step,
                    "environment": group.source.environment,
                    "task_id": group.source.task.id,
                    "sample": index,
                    "branch": number,
                    **_agent(rollout, number),
                    "prompt": prompt if ids == group.prompt_ids else decode_raw(ids),
                    "prompt_ids": ids,
                    **_shared_part(ids, sequences[:number], decode_raw),
                    "gold": gold,
                    "completion": decode_raw(completion.token_ids) if number else rollout.text,
                    **{name: value for name, value in vars(completion).items() if name not in LEFT_OUT},
                    "status": "error" if rollout.grade.failed else "ok",
                    "verdict": rollout.grade.status,
                    **{name: getattr(rollout.grade, name) for name in GRADE_FIELDS},
                    "token_texts": list(map(token_text, completion.token_ids)),
                }))
        by_group.append(rows)
    return by_group


def shared_prompt(ids: Sequence[int], earlier: Sequence[Branch]) -> tuple[int, int]:
    """Find the ``earlier`` sequence of a sample with most of the prompt ``ids``; its number, and how many tokens."""
    found = [len(commonprefix([ids, one.prompt_ids + one.completion.token_ids])) for one in earlier]
    return found.index(max(found)), max(found)


def _shared_part(
    ids: Sequence[int], earlier: Sequence[Branch], decode_raw: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    if not earlier:
        return {}
    number, shared = shared_prompt(ids, earlier)
    return {"branch_of": number, "shared_tokens": shared, "read": decode_raw(ids[shared:])}


def _agent(rollout: Rollout, number: int) -> dict[str, Any]:
    if not rollout.agents:
        return {}
    name = rollout.agents[number]
    return {"agent": name, "agent_reward": rollout.grade.agent_rewards.get(name)}


def gold_answer(task: Task) -> str | None:
    """Return the right answer, `gold` or else `answer` of the task's data."""
    gold = task.data.get("gold", task.data.get("answer"))
    return gold if gold is None or isinstance(gold, str) else json.dumps(gold)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON line per row, the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


@dataclass(frozen=True)
class TextSample:
    """One sample of a group; JSON values only, as it travels between ranks."""

    which: str
    """``worst`` or ``best``, of the groups of the step by their mean rewards."""
    number: int
    """Of the group in the step."""
    environment: str
    task_id: str
    prompt: str
    answer: str
    """With special tokens."""
    reward: float
    correct: bool | None
    gold: str | None
    group_mean: float
    group_size: int

    @property
    def heading(self) -> str:
        """Say what it is a sample of."""
        return f"{self.which} group | {self.environment} {shorten(self.task_id, 60, 0)}"

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Prompt, answer and reward in a few lines for the screen."""
        half = SHOWN_CHARACTERS // 2
        texts = (("prompt", self.prompt), ("answer", self.answer))
        return [*((name, shorten(text, half, half)) for name, text in texts), ("reward", self.verdict)]

    @property
    def verdict(self) -> str:
        """The reward in words."""
        gold = "" if self.gold is None else f"; right answer: {shorten(self.gold, 120, 0)}"
        mean = f"; mean of the group's {self.group_size}: {self.group_mean:.4g}"
        word = {True: ", correct", False: ", wrong", None: ""}[self.correct]
        return f"{self.reward:.4g}{word}{gold}{mean}"


def samples_of(
    groups: Sequence[RolloutGroup], numbers: Sequence[int], decode_raw: Callable[[Sequence[int]], str]
) -> list[TextSample]:
    """Show the lowest reward of the worst graded group and the highest of the best."""
    means: list[tuple[float, int, RolloutGroup]] = []
    for number, group in zip(numbers, groups, strict=True):
        rewards = [rollout.grade.reward for rollout in group.rollouts if not rollout.grade.failed]
        if rewards:
            means.append((sum(rewards) / len(rewards), number, group))
    if not means:
        return []
    worst = min(means, key=lambda found: (found[0], found[1]))
    best = max(means, key=lambda found: (found[0], -found[1]))
    return [_sample("worst", min, *worst, decode_raw), _sample("best", max, *best, decode_raw)]


def worst_and_best(samples: Sequence[TextSample]) -> list[TextSample]:
    """Choose the worst and the best of all ranks' samples; only the best where all groups are alike."""
    if not samples:
        return []
    worst = min((one for one in samples if one.which == "worst"), key=lambda one: (one.group_mean, one.number))
    best = max((one for one in samples if one.which == "best"), key=lambda one: (one.group_mean, -one.number))
    alike = worst.group_mean == best.group_mean and worst.reward == best.reward
    return [best] if alike else [worst, best]


def shorten(text: str, head: int, tail: int) -> str:
    """Cut to one line of about ``head`` and ``tail`` characters, without what a terminal would obey."""
    if len(text) > head + tail:
        text = f"{text[:head]} [...] {text[len(text) - tail :]}"
    # A model writes escape sequences, too: they would move the cursor, or change the title of the window.
    return "".join(char if char.isprintable() else "\u21b5" if char == "\n" else "\ufffd" for char in text).strip()


def _sample(
    which: str, pick: Callable[..., Rollout], mean: float, number: int, group: RolloutGroup,
    decode_raw: Callable[[Sequence[int]], str],
) -> TextSample:  # fmt: skip
    graded = (rollout for rollout in group.rollouts if not rollout.grade.failed)
    rollout = pick(graded, key=lambda rollout: rollout.grade.reward)
    grade, task = rollout.grade, group.source.task
    return TextSample(
        which, number, group.source.environment, task.id, _clip(decode_raw(group.sequences(rollout)[0].prompt_ids)),
        _clip(_answer(group.sequences(rollout), decode_raw)), grade.reward, grade.correct, gold_answer(task), mean,
        len(group.rollouts),
    )  # fmt: skip


def _answer(sequences: Sequence[Branch], decode_raw: Callable[[Sequence[int]], str]) -> str:
    """Join several sequences, each further one with what is new in its prompt."""
    text = decode_raw(sequences[0].completion.token_ids)
    for number, sequence in enumerate(sequences[1:], start=1):
        origin, shared = shared_prompt(sequence.prompt_ids, sequences[:number])
        new = decode_raw(sequence.prompt_ids[shared:] + sequence.completion.token_ids)
        text += f"\n[sequence {number + 1}, after {shared} tokens of sequence {origin + 1}]\n{new}"
    return text


def _clip(text: str) -> str:
    """Keep both ends: the question and the result stand there."""
    half = MAX_CHARACTERS // 2
    cut = len(text) - 2 * half
    return text if cut <= 0 else f"{text[:half]}\n[{cut} characters]\n{text[-half:]}"
