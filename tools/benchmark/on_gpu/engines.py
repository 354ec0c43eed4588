"""Models and rollout engines, built from flags as a run builds them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.build_engine import build_engine
from megatron_rl.config import RLConfig
from megatron_rl.inference import Engine
from megatron_rl.models import PolicyModel, build_model, rollout_mode
from megatron_rl.parallel import seed_everything
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import GenerationRequest, SamplingParams, SourcedTask, Task
from tools.benchmark.common import benchmark_config, random_prompts
from tools.benchmark.on_gpu.measure import Bench
from tools.benchmark.on_gpu.shapes import ModelShape


class _Numbers:
    """As much of a Hugging Face tokenizer as ours asks for: a token's text is its number."""

    eos_token_id = 0
    chat_template = None

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def __len__(self) -> int:
        return self._vocab

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self._vocab)}

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return " ".join(map(str, ids))


def number_tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer of ``vocab`` tokens that needs no files."""
    return Tokenizer(_Numbers(vocab), "numbers")


@dataclass(frozen=True)
class Rolling:
    """A model with its engine."""

    config: RLConfig
    policy: PolicyModel
    engine: Engine
    quantization: RolloutQuantization
    shape: ModelShape

    @contextlib.contextmanager
    def rollouts(self) -> Iterator[None]:
        """Rollout mode on freshly quantised weights. The first time it audits a few tokens: see the audit."""
        with rollout_mode(self.policy), self.quantization.rollout(self._a_little):
            yield

    def warm(self) -> None:
        """Kernels compile, and the audit looks at its one rollout, before anything is timed."""
        with self.rollouts():
            self._a_little()

    def _a_little(self) -> None:
        self.submit(prompts=1, copies=1, prompt_tokens=8, new_tokens=4)
        while self.engine.has_unfinished:
            self.engine.step()

    def submit(self, *, prompts: int, copies: int, prompt_tokens: int, new_tokens: int) -> None:
        """Begin a rollout of random prompts."""
        self.engine.begin(seed=1, policy_version=0)
        for request in make_requests(self.shape, prompts, copies, prompt_tokens, new_tokens):
            self.engine.submit(request)


def open_engine(bench: Bench, shape: ModelShape, *, batch: int, length: int, flags: Sequence[str] = ()) -> Rolling:
    """Random weights made on the device, and the engine of these flags; ``length`` is of prompt and answer."""
    config = benchmark_config(
        shape, length, "--bf16", f"--inference-max-batch-size={batch}",
        f"--rl-decode-steps-per-sync={bench.sizes.steps}", *flags, *bench.flags,
    )  # fmt: skip
    seed_everything(1)
    policy = build_model(config, bench.platform, shape.vocab)
    engine = build_engine(config, policy, number_tokenizer(shape.vocab), bench.groups)
    recipe = config.quantization.rl_rollout_quantization
    quantization = RolloutQuantization(policy.gpt, recipe, (), shape.layers, lambda audit: None)
    return Rolling(config, policy, engine, quantization, shape)


def make_requests(
    shape: ModelShape, prompts: int, copies: int, prompt_tokens: int, new_tokens: int
) -> list[GenerationRequest]:
    """One a prompt, ``copies`` samples each."""
    sampling = SamplingParams(max_new_tokens=new_tokens)
    return [
        GenerationRequest(SourcedTask("benchmark", Task(str(index), "")), prompt, copies, sampling, index)
        for index, prompt in enumerate(random_prompts(prompts, prompt_tokens, shape.vocab, seed=1))
    ]
