"""TRL's GRPOTrainer as a contender of the step benchmark, one step a call.

``GRPOTrainer.train`` runs as it is, in a thread of its own that stands still between two calls.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megatron_rl.config import RLConfig
from megatron_rl.errors import MegatronRLError
from tools.benchmark.common import prepare
from tools.benchmark.step_task import Judge, QuickstartTask, Weights

PATIENCE_SECONDS = 600
"""Longer than any step: whoever waits longer waits for a thread that has died."""


class TrlStep:
    """One call is one optimizer step of TRL: generation, rewards, advantages, loss, update."""

    def __init__(
        self, model: PreTrainedModel, task: QuickstartTask, config: RLConfig, micro_batch: int, directory: Path
    ) -> None:
        self.judge = Judge(task.environment)
        self._task = task
        self._weights = Weights(list(model.parameters()))
        self._gate = _Gate()
        rows = [{"prompt": each.prompt, "position": index} for index, each in enumerate(task.tasks)]
        with _not_launched():
            self._trainer = GRPOTrainer(
                model=model,
                reward_funcs=self._rewards,
                args=settings(config, micro_batch, directory),
                train_dataset=Dataset.from_list(rows),
                processing_class=AutoTokenizer.from_pretrained(str(task.tokenizer_directory)),
                callbacks=[self._gate],
            )
        self._trainer.remove_callback(PrinterCallback)
        self._thread = ThreadPoolExecutor(1, "trl", initializer=prepare)  # the number of threads is a thread's own
        self._loop: Future[Any] | None = None

    def __call__(self) -> None:
        """One step from the weights it was built with.

        Raises:
            MegatronRLError: TRL's loop stands still, or has ended; an error of its own comes out as it is.
        """
        self._weights.restore()
        self._gate.open()
        if self._loop is None:
            self._loop = self._thread.submit(self._trainer.train)
            self._loop.add_done_callback(self._gate.step_is_done)
        self._gate.wait_for_step()
        if self._loop.done():
            self._loop.result()
            raise MegatronRLError("TRL's trainer has ended before it was asked to")

    def close(self) -> None:
        """Let TRL's loop end."""
        self._gate.leave()
        self._thread.shutdown()

    def _rewards(
        self, completions: Sequence[str], completion_ids: Sequence[Sequence[int]], position: Sequence[int], **_: Any
    ) -> list[float]:
        end = self._task.tokenizer.end_token_id
        return [
            self.judge(self._task.tasks[index], text, len(ids), ended=ids[-1] == end)
            for text, ids, index in zip(completions, completion_ids, position, strict=True)
        ]


def settings(config: RLConfig, micro_batch: int, directory: Path) -> GRPOConfig:
    """TRL's arguments for what our flags say; everything that only costs time is off."""
    algorithm, optimizer = config.algorithm, config.optimizer
    samples = algorithm.grpo_prompts_per_step * algorithm.grpo_group_size
    return GRPOConfig(
        output_dir=str(directory),
        max_steps=1_000_000,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,  # and as many micro-batches share one generate call
        num_generations=algorithm.grpo_group_size,
        max_completion_length=config.rollout.rl_max_new_tokens,
        temperature=1.0,
        shuffle_dataset=False,
        beta=0.0,
        num_iterations=1,
        epsilon=algorithm.grpo_clamp_eps_lower,
        epsilon_high=algorithm.grpo_clamp_eps_upper,
        loss_type="dapo",  # the mean over the batch's tokens
        optim="adamw_torch_fused",
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_epsilon=optimizer.adam_eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_grad,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


@contextlib.contextmanager
def _not_launched() -> Iterator[None]:
    """Our process group of one looks to accelerate like a launched job, and TRL would pay for torch's DDP."""
    local_rank = os.environ.pop("LOCAL_RANK", None)
    try:
        yield
    finally:
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank


class _Gate(TrainerCallback):
    """Holds TRL's loop at the end of every step until somebody asks for the next one."""

    def __init__(self) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._leaving = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first step was asked for before the loop began."""
        self._go.acquire()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step is done: wait."""
        self._done.release()
        self._go.acquire()
        control.should_training_stop = self._leaving

    def open(self) -> None:
        """Ask for a step."""
        self._go.release()

    def leave(self) -> None:
        """Ask for the end instead."""
        self._leaving = True
        self._go.release()

    def step_is_done(self, _: Any = None) -> None:
        """Said when the loop ends, too: nobody waits for ever."""
        self._done.release()

    def wait_for_step(self) -> None:
        """Until the step asked for is done."""
        if not self._done.acquire(timeout=PATIENCE_SECONDS):
            raise MegatronRLError(f"TRL's trainer made no step in {PATIENCE_SECONDS} seconds")
