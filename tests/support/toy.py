"""A run without an environment server: letters for tokens, and a grader in this process."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from megatron_rl import loop, supervised
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.conversations import ConversationSettings, GradeFunction, GroupGradeFunction
from megatron_rl.rollout.harnesses import RunFunction
from megatron_rl.rollout.prompt_source import TaskPool
from megatron_rl.run.base import Run, build_quantization
from megatron_rl.run.memory.phases import Phases
from megatron_rl.signals import StopRequest
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Demonstration, Grade, Task, Transcript
from tests.support.tiny import tiny_policy

LETTERS = "$" + string.ascii_lowercase + "01234"
"""Token i is letter i; ``$`` is the end token."""
TASKS = tuple(Task(id=prompt, prompt=prompt) for prompt in ("abc", "de", "fghijk", "l", "mno", "pqrstuv", "wx", "yz"))
DEMONSTRATIONS = tuple(Demonstration(task, task.prompt[::-1] + "01") for task in TASKS)


class _Letters:
    """As much of a Hugging Face tokenizer as ours asks for."""

    eos_token_id = 0
    chat_template = None
    all_special_tokens, all_special_ids = ("$",), (0,)

    def __init__(self, special: Mapping[int, str] = MappingProxyType({})) -> None:
        self.added_tokens_decoder = {
            number: SimpleNamespace(content=text, special=True) for number, text in special.items()
        }

    def __len__(self) -> int:
        return len(LETTERS)

    def get_vocab(self) -> dict[str, int]:
        return {letter: number for number, letter in enumerate(LETTERS)}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: object) -> str:
        return "".join(LETTERS[i] for i in ids if i or not skip_special_tokens)


def toy_tokenizer() -> Tokenizer:
    """One token a letter."""
    return letters_tokenizer({})


def letters_tokenizer(special: Mapping[int, str]) -> Tokenizer:
    """The same with further special tokens."""
    return Tokenizer(_Letters(special), "letters")


async def vowel_share(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[Grade]:
    """The reward is the share of letters from the first half of the alphabet: nearly every group has signal."""
    texts = [transcript.text for _, transcript in items]
    return [Grade(sum(c <= "m" for c in text) / max(len(text), 1)) for text in texts]


class ToyEnvironments:
    """Stands in for `EnvironmentAccess`."""

    counters = SimpleNamespace(since_last_call=dict)
    by_group: Mapping[str, GroupGradeFunction] = MappingProxyType({})

    def __init__(
        self, grade: GradeFunction, settings: ConversationSettings | None, run: RunFunction | None = None
    ) -> None:
        self.client = SimpleNamespace(grade=grade, run=run)
        self.harnesses = frozenset() if run is None else frozenset({"toy"})
        self._settings = settings

    def training_pools(self) -> list[TaskPool]:
        """One environment with eight prompts."""
        return [TaskPool("toy", TASKS, 1.0)]

    def demonstrations(self) -> list[tuple[str, Demonstration]]:
        """Each prompt backwards."""
        return [("toy", demonstration) for demonstration in DEMONSTRATIONS]

    def conversations(self, max_sequence_length: int) -> ConversationSettings | None:
        """What the test has given."""
        return self._settings


def toy_run(
    config: RLConfig,
    groups: ParallelGroups,
    grade: GradeFunction = vowel_share,
    conversations: ConversationSettings | None = None,
    run_harness: RunFunction | None = None,
) -> Any:
    """The run of the program that the flags choose; nothing is written anywhere. Close `Run.closing` at the end.

    With ``run_harness`` the environment is a harness.
    """
    policy, timer = tiny_policy(config, seed=config.training.seed), PhaseTimer()
    directory = SimpleNamespace(write_quantization=_ignore, quantization=Path("quantization.json"))
    quantization = build_quantization(config, policy, groups, directory, timer)
    base = Run(
        config=config,
        groups=groups,
        policy=policy,
        phases=Phases(config, policy, groups, quantization),
        tokenizer=toy_tokenizer(),
        environments=ToyEnvironments(grade, conversations, run_harness),
        checkpoints=CheckpointManager(Path("unused"), 0, groups),
        directory=directory,
        reporter=SimpleNamespace(open=_ignore, records=_ignore, dump_batches=_ignore),
        timer=timer,
        stop=StopRequest(),
    )
    return (loop if config.training.perform_rl_step else supervised).build(base)


def _ignore(*_: object) -> None:
    """A reporter that writes nothing."""
