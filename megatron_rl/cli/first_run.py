"""A first run in one line: ``megatron-rl train --model DIR --data questions.jsonl --reward exact``.

What such a line leaves open is filled in from the data, the model and this machine, and printed as the full command.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.cli import propose
from megatron_rl.cli.options import Ranks, read_ranks, take
from megatron_rl.config.arguments import read_flags
from megatron_rl.config.flags import flag
from megatron_rl.config.rl_config import RLConfig, all_flags, resolve
from megatron_rl.environments.loading import DataSize, data_size
from megatron_rl.errors import ChatRefused, ConfigError, Problem
from megatron_rl.run.gpu_defaults import BIN_FLAGS, FILLED, most_sequences
from megatron_rl.run.memory.estimate import estimate, in_words
from megatron_rl.run.preflight.chats import template_problems
from megatron_rl.run.preflight.inputs import open_tokenizer
from megatron_rl.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

HEADING = "A first run in one line; what it leaves open is filled in and printed:"
GROUP = 8
SHORTEST_LIMIT = 256
"""Tokens an answer may have at least, however short the right ones are: a model thinks before it answers."""
HELD_OUT = 16
"""One row in so many is for evaluations, where there are enough."""
ENOUGH_TO_HOLD_OUT = 128
MOST_STEPS = 200
MOST_SEQUENCES = 32
"""Of a packed batch on a CPU."""
ALIGNMENT = 64
LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
)  # fmt: skip
"""Whoever types one of them lays the model out."""
RATES = ((10e6, 5e-4, 1e-3), (400e6, 2e-5, 5e-5), (float("inf"), 1e-6, 1e-5))
"""Up to so many parameters: the learning rate of RL, and of SFT; see docs/hyperparameters.md."""


@dataclass(frozen=True, kw_only=True)
class FirstRun:
    """The flags of the short form."""

    model: str | None = flag(None)
    """The model to start from: a Hugging Face directory, a name on the hub, or a GGUF file."""
    data: str | None = flag(None)
    """Rows with a question and an answer: a file (jsonl, json, csv, parquet) or a name on the hub."""
    reward: tuple[str, ...] = flag(())
    """exact, math or another grader; file.py:function(completion, row) or, as in TRL, (completions, **columns). Several
    are added up, with weights: exact style.py:brief=0.2."""
    data_args: tuple[str, ...] = flag(())
    """Further options of the data set, KEY=VALUE: prompt=q answer=a (names of columns), template="{q} = "."""
    sft: bool = flag(False)
    """Learn to write the completions (or the chats' last messages) of the data instead of RL with a reward."""


class Machine(NamedTuple):
    """The device of a first run: ``free`` is its free memory in bytes, ``bf16`` whether products of bf16 are fast."""

    is_cuda: bool
    free: int
    bf16: bool


def is_first_run(words: Sequence[str]) -> bool:
    """Return whether ``words`` are the short form."""
    return bool({"--model", "--data", "--reward", "--sft"} & {word.partition("=")[0] for word in words})


def full_flags(words: Sequence[str]) -> tuple[Ranks, list[str]]:
    """Return the ranks and flags of the run that ``words`` mean; what they say themselves comes last and holds.

    Raises:
        ConfigError: every problem of the words, or the first of model and data.
    """
    ranks, rest = read_ranks(words)
    asked, rest = take(FirstRun, rest)
    given = ["--load-hf", asked.model] if asked.model else []
    reading = read_flags([*given, *rest])
    unread = [Problem(each.flag, each.text.replace("--load-hf", "--model")) for each in reading.problems]
    if problems := [*_missing(asked), *unread]:
        raise ConfigError(problems)
    options = {"path": asked.data, **_rewards(asked.reward), **_values(asked.data_args)}
    ranks, machine = find_machine(ranks, any(word.startswith("--nproc") for word in words))
    config = resolve(reading.config, ranks.world_size)
    if config.tokenizer.tokenizer_model is None:
        raise ConfigError([f"--model {asked.model} has no tokenizer; name one with --tokenizer-model DIR"])
    tokenizer = open_tokenizer(config)
    if not tokenizer.has_chat_template():
        options.setdefault("chat", False)
    if options.get("chat", True) and (problems := list(template_problems(tokenizer))):
        raise ConfigError(problems)
    size = _size(options, asked.sft)
    if size.tasks >= ENOUGH_TO_HOLD_OUT and not {"test_path", "test_split", "held_out"} & set(options):
        options["held_out"] = HELD_OUT
    found = _Settings(config, tokenizer, size, machine, ranks.world_size, asked.sft)
    values = found.values("held_out" in options or "test_path" in options or "test_split" in options)
    values["run_dir"] = f"runs/{_stem(asked.data)}-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    entry = json.dumps({"environment": "dataset", "args": options}, ensure_ascii=False)
    flags = {each.name: each for each in all_flags()}
    unsaid = [flags[name].typed(value) for name, value in values.items() if name not in config.typed]
    return ranks, [*given, "--langrl-env-config", entry, *shlex.split(" ".join(unsaid)), *rest]


def show(words: Sequence[str], ranks: Ranks) -> None:
    """Print the full command ``words``, a few flags a line, and the layout of several ranks."""
    lines = [" ".join(words[:2])]
    for word in map(shlex.quote, words[2:]):
        if word.startswith("--") and len(lines[-1]) > 90:
            lines.append("   ")
        lines[-1] += f" {word}"
    sys.stdout.write("the full command, to keep and to change:\n\n" + " \\\n".join(lines) + "\n\n")
    if ranks.world_size > 1:
        config = resolve(read_flags(words[4:]).config, ranks.world_size)
        sizes = {"data": config.data_parallel_size(ranks.world_size)}
        sizes |= {name.partition("_")[0]: config.value(name) for name in LAYOUT}
        text = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        sys.stdout.write(f"{ranks.world_size} ranks, parallel: {text}\n\n")
    sys.stdout.flush()


def _missing(asked: FirstRun) -> list[Problem]:
    wanted = {
        "model": "the model to start from, for example --model Qwen/Qwen2.5-0.5B-Instruct",
        "data": "rows with a question and an answer, for example --data questions.jsonl",
        "reward": "what an answer is worth, for example --reward exact (or --sft for demonstrations)",
    }
    lacks = [name for name in wanted if not getattr(asked, name) and not (asked.sft and name == "reward")]
    problems = [Problem(f"--{name}", f"--{name} is missing: {wanted[name]}") for name in lacks]
    if asked.reward and asked.sft:
        problems.append(Problem("--sft", "--sft learns from completions and takes no --reward; leave one of them out"))
    return problems


def _rewards(texts: Sequence[str]) -> dict[str, Any]:
    """The option of the data set: one reward, or several with weights."""
    if len(texts) == 1 and "=" not in texts[0]:
        return {"reward": texts[0]}
    weights: dict[str, float] = {}
    for text in texts:
        name, equals, weight = text.rpartition("=") if "=" in text else (text, "", "1")
        try:
            weights[name] = float(weight)
        except ValueError:
            raise ConfigError([f"--reward {text}: {weight!r} is no number; write {name}=0.2"]) from None
    return {"rewards": weights} if weights else {}


def _values(texts: Sequence[str]) -> dict[str, Any]:
    if wrong := [text for text in texts if "=" not in text]:
        raise ConfigError([f"--data-args {text} has no value; write {text}=VALUE" for text in wrong])
    pairs = [text.partition("=")[::2] for text in texts]
    words = {"true": True, "false": False}
    return {name: int(value) if value.isdecimal() else words.get(value, value) for name, value in pairs}


def _size(options: Mapping[str, Any], sft: bool) -> DataSize:
    try:
        size = data_size(json.dumps({"environment": "dataset", "args": options}), sft)
    except ConfigError as error:
        lines = [re.sub(r"^the environment:1: (dataset: )?", "", line) for line in error.lines]
        advice = "; write --data-args prompt=COLUMN answer=COLUMN"
        raise ConfigError([f"--data: {line}{advice if 'name its columns' in line else ''}" for line in lines]) from None
    if not size.tasks:
        what = "completions to learn from" if sft else "rows to train on"
        raise ConfigError([f"--data {options['path']} has no {what}"])
    return size


def _stem(data: str) -> str:
    return re.sub(r"[^\w-]", "_", Path(data).name.partition(".")[0]) or "data"


def find_machine(ranks: Ranks, are_given: bool) -> tuple[Ranks, Machine]:
    """All GPUs of this machine unless ranks are given, and what a rank has. Torch is imported here."""
    import torch

    from megatron_rl.platform.device import bf16_speedup, host_available

    if not torch.cuda.is_available():
        return ranks, Machine(False, int(host_available() * FILLED) // ranks.nproc, bf16_speedup() > 1.2)
    if not are_given:
        ranks = replace(ranks, nproc=torch.cuda.device_count())
    return ranks, Machine(True, int(torch.cuda.get_device_properties(0).total_memory * FILLED), True)


@dataclass(frozen=True)
class _Settings:
    """What a first run is told, from what there is."""

    config: RLConfig
    tokenizer: Tokenizer
    size: DataSize
    machine: Machine
    world_size: int
    sft: bool

    def values(self, evaluates: bool) -> dict[str, Any]:
        """Field -> value."""
        values = self._lengths() | {"bf16": True} if self.machine.bf16 else self._lengths()
        if self.world_size > 1:
            values["use_distributed_optimizer"] = True
        values |= self._layout_and_batch(values)
        typed = self.config.typed
        samples = values["global_batch_size"] if self.sft else values["grpo_prompts_per_step"]
        steps = typed.get("train_iters") or min(max(-(-self.size.tasks // samples), 20), MOST_STEPS)
        parameters = self._estimate(values).sizes.parameters
        rate = next(rates[self.sft] for most, *rates in RATES if parameters <= most)
        values |= {"lr": rate, "train_iters": steps, "lr_decay_style": "constant"}
        values |= {"save_interval": max(1, steps // 5), "keep_last": 2, "resume": True}
        if evaluates:
            values |= {"eval_interval": max(1, steps // 5), "rl_prompts_per_eval": 32, "rl_samples_per_eval_prompt": 4}
        return values

    def _lengths(self) -> dict[str, int]:
        """Tokens, from the longest answer and the longest prompt of the data that leaves room for one."""
        answered = len(self.tokenizer.encode(self.size.answer)) + 16
        limit = answered if self.sft else self.config.typed.get("rl_max_new_tokens") or max(SHORTEST_LIMIT, answered)
        most = self.config.typed.get("seq_length") or self.config.model.max_position_embeddings or sys.maxsize
        asked = self._longest_prompt(most - min(limit, 16))
        length = self.config.typed.get("seq_length") or min(-(-(asked + limit) // ALIGNMENT) * ALIGNMENT, most)
        return {"seq_length": length} if self.sft else {
            "perform_rl_step": True, "seq_length": length, "rl_max_new_tokens": min(limit, length - asked)
        }  # fmt: skip

    def _longest_prompt(self, most: int) -> int:
        """Return the tokens of the longest prompt that has at most so many. A run skips longer ones."""
        first = ""
        for longer, (number, prompt) in enumerate(self.size.prompts):
            try:
                asked = len(self.tokenizer.encode_prompt(prompt if isinstance(prompt, str) else tuple(prompt)))
            except ChatRefused:  # such rows are skipped, others have about its length
                asked = len(self.tokenizer.encode(" ".join(message["content"] for message in prompt)))
            if asked <= most:
                if longer:
                    logger.warning("--data: %d row(s) will be skipped; %s", longer, first)
                return asked
            first = first or f"row {number} has a prompt of {asked:,} tokens, and {most:,} leave room for an answer"
        raise ConfigError([f"--data: {first}; so it is with the next {len(self.size.prompts) - 1:,}"])

    def _layout_and_batch(self, values: dict[str, Any]) -> dict[str, Any]:
        """A copy of the model on every rank if it fits, or as typed; else over several ranks, as the planner finds it
        fastest.
        """
        try:
            return self._batch(values)
        except ConfigError as error:
            if self.world_size == 1 or set(LAYOUT) & set(self.config.typed):
                raise
            if (layout := self._planned(values)) is None:
                text = f"{error.problems[0].text}; no layout of {self.world_size} ranks fits"
                raise ConfigError([text]) from None
            return layout | self._batch(values | layout)

    def _planned(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the flags of the fastest layout that holds one sequence at a time; None if none does."""
        rest = {"lr": 1.0, "train_iters": 1, "run_dir": "runs", "langrl_env_config": "none", "micro_batch_size": 1}
        given = {**values, **self._counts(), **rest}
        config = self.config.with_values(**given | self.config.typed)
        question = propose.Question(gpus=self.world_size, gpu_memory=self.machine.free / propose.USABLE / 1e9)
        found = propose.proposals(replace(config, typed=given | config.typed), question, ("none",))
        best = min(found, key=lambda one: one.rollout_s + one.update_s, default=None)
        return None if best is None else best.values

    def _counts(self) -> dict[str, int]:
        """Prompts of a step, or sequences of a batch."""
        most = 32 if self.machine.is_cuda or self.sft else 8
        count = 2 ** (min(most, self.size.tasks).bit_length() - 1)
        return {"global_batch_size": count} if self.sft else {
            "grpo_prompts_per_step": count, "grpo_group_size": GROUP
        }  # fmt: skip

    def _batch(self, values: dict[str, Any]) -> dict[str, Any]:
        """Prompts of a step, or sequences of a batch, and the micro-batch: the largest that fit."""
        batch = self._counts()
        sequences = math.prod(batch.values()) // self._resolved(values).data_parallel_size(self.world_size)
        sequences = sequences if self.machine.is_cuda else min(sequences, MOST_SEQUENCES)
        for most, more in ((sequences, {}), (1, propose.FULL)):
            config = self._resolved({**values, **batch, **more, "lr": 1.0, "train_iters": 1})
            sizes = self.world_size, self.tokenizer.vocab_size, self.machine.free
            count, needed = most_sequences(config, *sizes, most)
            if needed <= self.machine.free or BIN_FLAGS & set(self.config.typed):
                return {**batch, "micro_batch_size": count, **more}
        raise ConfigError([
            f"the model does not fit: it takes {in_words(needed)} on each rank, and {in_words(self.machine.free)} can "
            "be planned with; use more ranks with --nproc, or a smaller model"
        ])

    def _estimate(self, values: Mapping[str, Any]) -> Any:
        return estimate(self._resolved(values), self.world_size, self.tokenizer.vocab_size)

    def _resolved(self, values: Mapping[str, Any]) -> RLConfig:
        unsaid = {name: value for name, value in values.items() if name not in self.config.typed}
        return resolve(self.config.with_values(**unsaid), self.world_size)
