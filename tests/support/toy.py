"""A run without an environment server: letters for tokens, and a grader in this process."""

from __future__ import annotations

import contextlib
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

from megatron_rl import build
from megatron_rl.build_engine import build_engine
from megatron_rl.build_memory import PhaseMemory
from megatron_rl.build_quantization import build_parity_gate, build_quantization, calibration
from megatron_rl.config import RLConfig
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.parallel import ParallelGroups
from megatron_rl.progress import Progress
from megatron_rl.rollout import ConversationSettings, Rollouter, TaskPool
from megatron_rl.rollout.rollouter import GradeFunction
from megatron_rl.run import Run
from megatron_rl.signals import StopRequest
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.trainer import Optimization
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.reference import ReferencePolicy
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import Demonstration, GradeResult, Task, Transcript
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


async def vowel_share(environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[GradeResult]:
    """The reward is the share of letters from the first half of the alphabet: nearly every group has signal."""
    texts = [transcript.text for _, transcript in items]
    return [GradeResult("ok", reward=sum(c <= "m" for c in text) / max(len(text), 1)) for text in texts]


class ToyEnvironments:
    """Stands in for `EnvironmentAccess`."""

    counters = SimpleNamespace(since_last_call=dict)

    def training_pools(self) -> list[TaskPool]:
        """One environment with eight prompts."""
        return [TaskPool("toy", TASKS, 1.0)]

    def demonstrations(self) -> list[Demonstration]:
        """Each prompt backwards."""
        return list(DEMONSTRATIONS)


def toy_run(
    config: RLConfig,
    groups: ParallelGroups,
    grade: GradeFunction = vowel_share,
    conversations: ConversationSettings | None = None,
) -> Run:
    """The parts `build_run` makes, wired by its own helpers; nothing is written anywhere.

    Close the rollouter at the end. Aligned training stays aligned: its layers are never given back.
    """
    tokenizer = toy_tokenizer()
    policy = tiny_policy(config, seed=config.training.seed)
    penalised = config.algorithm.grpo_kl_beta > 0
    reference = ReferencePolicy(policy) if penalised else None
    optimization = Optimization(policy, config)
    factory = build._request_factory(config, tokenizer)
    timer, stop = PhaseTimer(), StopRequest()
    scorer = Scorer(policy, groups.tensor_group, build._temperature(config))
    directory = SimpleNamespace(write_quantization=_ignore, quantization=Path("quantization.json"))
    quantization = build_quantization(
        config, policy, optimization, reference, groups, directory, timer, contextlib.ExitStack()
    )
    memory = PhaseMemory(config, optimization, groups)
    engine = build_engine(config, policy, tokenizer, groups, memory.cache_budget_gb())
    memory.hold(engine.cache_tensors, engine.forget_graphs)
    environments = ToyEnvironments()
    source = build._source(config, environments, tokenizer, factory)
    prompts = source if config.training.perform_rl_step else None
    return Run(
        config=config,
        groups=groups,
        policy=policy,
        tokenizer=tokenizer,
        environments=environments,
        optimization=optimization,
        quantization=quantization,
        source=source,
        factory=factory,
        rollouter=Rollouter(engine, tokenizer, groups, grade, stop, 0.0, conversations),
        generate_a_little=calibration(engine, prompts, factory, ()),
        samples=build._sample_builder(config, groups) if config.training.perform_rl_step else None,
        batches=BatchBuilder(
            config.training.rl_sequence_packing_bin_size,
            config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1,
            policy.device,
            groups,
        ),
        trainer=build._trainer(config, optimization, scorer, reference, groups, timer),
        memory_for_rollouts=memory.for_rollouts,
        parity=build_parity_gate(config, scorer, quantization, policy, groups, engine),
        evaluator=None,
        journal=None,
        checkpoints=None,
        directory=Path(),
        reporter=SimpleNamespace(records=_ignore, dump_batches=_ignore),
        timer=timer,
        stop=stop,
        progress=Progress(),
        origin=None,
    )


def _ignore(*_: object) -> None:
    """A reporter that writes nothing."""
