"""Trained tokens per CPU second: our policy update against one in plain PyTorch.

    python -m tools.benchmark.update --shape 64x3 --samples 256
    python -m tools.benchmark.update --experts 32           grouped products against megatron's loop over experts
    python -m tools.benchmark.update --group 8              prompts computed once against once a sample

Both start from the same samples and end at moved weights. Ours packs them, runs megatron's
GPTModel under DDP with the distributed optimizer, and also makes the step's statistics (entropy,
mismatch, clip fractions). The other pads each micro-batch to its longest sample and runs the
Hugging Face twin with torch's fused AdamW. Same clipped loss; padding is not counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence

from megatron_rl.algorithms import StepRewards, Terms, TokenBatch
from megatron_rl.algorithms.batch import Sample
from megatron_rl.algorithms.extension import Function, loss_of
from megatron_rl.algorithms.objective import PolicyObjective
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import MegatronRLError
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models.gpt import PolicyModel, build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, seed_everything
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.trainer.scoring import Scorer
from tools.benchmark.common import (
    LOOP,
    SPEED,
    benchmark_config,
    command_line,
    compete,
    expert_flags,
    random_prompts,
    ranks_of,
    report_rounds,
    tokens_per_cpu_second,
)
from tools.benchmark.twin import hugging_face_twin

Update = Callable[[Sequence[Sample]], tuple[float, float]]
"""One update; returns its loss and the norm of its gradient before clipping."""


def make_samples(
    count: int, vocab: int, prompt_tokens: int, new_tokens: int, *, equal: bool, seed: int = 1, group: int = 1
) -> list[Sample]:
    """Answers of 1 to ``new_tokens`` tokens (``equal``: all the longest), rewards -1 and 1; ``group`` to a prompt."""
    draw, samples = random.Random(seed), []
    for index in range(count):
        answer = new_tokens if equal else draw.randint(1, new_tokens)
        if index % group == 0:
            (prompt,) = random_prompts(1, prompt_tokens, vocab, draw.random())
        ids = [*prompt, *random_prompts(1, answer, vocab, draw.random())[0]]
        tensors = {"token_ids": torch.tensor(ids), "loss_mask": torch.arange(len(ids)) >= prompt_tokens}
        tensors |= {"inference_logprobs": torch.zeros(len(ids)), "versions": torch.zeros(len(ids), dtype=torch.int64)}
        samples.append(Sample(**tensors, reward=draw.choice((-1.0, 1.0)), sample_id=index))
    return samples


def rewards_of(samples: Sequence[Sample]) -> StepRewards:
    """A step of these samples, each of a task of its own."""
    everything = torch.ones(len(samples), dtype=torch.bool)
    rewards = torch.tensor([sample.reward for sample in samples])
    numbers = torch.arange(len(samples))
    return StepRewards(rewards, everything, numbers, everything, everything, everything.long())


def make_trainer(
    policy: PolicyModel, config: RLConfig, groups: ParallelGroups, timer: PhaseTimer, advantage: Function
) -> PolicyTrainer:
    """What a run trains with, built from the same flags."""
    optimization, objective = Optimization(policy, config), PolicyObjective.of(config)
    scorer = Scorer(policy, groups, temperature=1.0)
    return PolicyTrainer(optimization, scorer, advantage, objective, 1, timer)


def own_reward(batch: TokenBatch) -> Terms:
    """The advantage of a sample is its reward."""
    return batch.of_samples(batch.step.rewards), {}


def our_update(policy: PolicyModel, config: RLConfig, groups: ParallelGroups) -> Update:
    """What `loop.py` does with a rollout's samples."""
    trainer = make_trainer(policy, config, groups, PhaseTimer(), own_reward)
    training = config.training
    batches = BatchBuilder(
        training.rl_sequence_packing_bin_size, 1, policy.device, groups, shares_prompts=training.rl_share_prompts
    )

    def update(samples: Sequence[Sample]) -> tuple[float, float]:
        metrics = trainer.step(batches.updates(samples, len(samples), seed=0), rewards_of(samples)).metrics
        return metrics["actor/pg_loss"], metrics["actor/grad_norm"]

    return update


class PlainUpdate:
    """What one would write with transformers and torch alone, as fast as it easily gets: padded micro-batches.

    Padding is on the right and attention is causal, so no mask is passed: that is the fast way
    through Hugging Face's attention.
    """

    def __init__(self, policy: PolicyModel, config: RLConfig, max_length: int) -> None:
        self._model = hugging_face_twin(policy, max_length).train()
        settings = config.optimizer
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=settings.lr, betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps, weight_decay=settings.weight_decay, fused=True,
        )  # fmt: skip
        self._clip_grad = settings.clip_grad
        self._micro_batch = config.training.micro_batch_size
        loss = loss_of(config)
        self._clip_range = 1 - loss.clamp_eps_lower, 1 + loss.clamp_eps_upper

    def __call__(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """One update; returns its loss and the norm of its gradient before clipping."""
        self._optimizer.zero_grad()
        denominator = sum(int(sample.loss_mask.sum()) for sample in samples)
        total = 0.0
        for start in range(0, len(samples), self._micro_batch):
            loss = self._loss_sum(samples[start : start + self._micro_batch]) / denominator
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_grad)
        self._optimizer.step()
        return total, norm.item()

    def _loss_sum(self, samples: Sequence[Sample]) -> torch.Tensor:
        ids = pad_sequence([sample.token_ids for sample in samples], batch_first=True)
        mask = pad_sequence([sample.loss_mask for sample in samples], batch_first=True)[:, 1:]
        advantage = torch.tensor([sample.reward for sample in samples])[:, None]

        logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        current = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (current - current.detach()).exp()
        clipped = ratio.clamp(*self._clip_range)
        per_token = torch.maximum(-ratio * advantage, -clipped * advantage)
        return torch.where(mask, per_token, 0.0).sum()


def main(argv: Sequence[str] | None = None) -> None:
    """Check that both compute the same update, measure and report; the defaults are the quickstart's step."""
    parser = command_line("update", shape="64x3", vocab=16, rounds=5)
    parser.add_argument("--samples", type=int, default=256)
    micro_batch = "samples a padded micro-batch; ours packs as many tokens"
    parser.add_argument("--micro-batch", type=int, default=64, help=micro_batch)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=44)
    parser.add_argument("--equal", action="store_true", help="all samples of one length: no padding for anybody")
    parser.add_argument("--group", type=int, default=1, help="samples a prompt; above 1 against ours without sharing")
    parser.add_argument("--experts", type=int, default=0, help="in each layer: against megatron's loop over them")
    arguments = parser.parse_args(argv)
    length = arguments.prompt_tokens + arguments.new_tokens
    flags = [f"--micro-batch-size={arguments.micro_batch}", "--lr-decay-style=constant", "--use-distributed-optimizer",
             "--rl-correction=none", "--weight-decay=0", "--clip-grad=1.0"]  # fmt: skip
    shared = ["--rl-share-prompts"] if arguments.group > 1 else []
    config = benchmark_config(arguments.shape, length, *flags, *shared, *expert_flags(arguments))
    with ranks_of(config, arguments.seed) as groups:
        policy = build_model(config, current_platform(), arguments.vocab)
        if arguments.experts:
            looped = benchmark_config(arguments.shape, length, *flags, *expert_flags(arguments, LOOP))
            seed_everything(arguments.seed)
            other: Update = our_update(build_model(looped, current_platform(), arguments.vocab), looped, groups)
        elif arguments.group > 1:
            alone = benchmark_config(arguments.shape, length, *flags)
            seed_everything(arguments.seed)
            other = our_update(build_model(alone, current_platform(), arguments.vocab), alone, groups)
        else:
            other = PlainUpdate(policy, config, length)
        name = "loop" if arguments.experts else "each" if arguments.group > 1 else "plain"
        updates: dict[str, Update] = {"ours": our_update(policy, config, groups), name: other}
        samples = make_samples(
            arguments.samples, arguments.vocab, arguments.prompt_tokens, arguments.new_tokens,
            equal=arguments.equal, seed=arguments.seed, group=arguments.group,
        )  # fmt: skip
        first = {name: update(samples) for name, update in updates.items()}
        if any(abs(a - b) > 1e-3 * max(abs(b), 1e-2) for a, b in zip(*first.values(), strict=True)):
            raise MegatronRLError(f"loss and gradient norm differ, {first}: speeds mean nothing")

        def work(name: str, _: int) -> int:
            updates[name](samples)
            return sum(sample.length for sample in samples)

        turns = {name: partial(tokens_per_cpu_second, partial(work, name)) for name in updates}
        rounds = compete(turns, arguments.rounds)
    report_rounds("update", SPEED, arguments, rounds, first_update=first)


if __name__ == "__main__":
    main()
