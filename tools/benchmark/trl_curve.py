"""TRL's GRPOTrainer on the sums of examples/smollm2: reward and CPU seconds of each step, as JSON lines.

    pip install trl==1.16.0 -c constraints.txt
    megatron-rl import SmolLM2-135M-Instruct.Q4_1.gguf model
    python examples/smollm2/prepare.py --task sums --output sums
    OMP_NUM_THREADS=1 python -m tools.benchmark.trl_curve --model model --tasks sums/sums_train.jsonl --output trl.jsonl

Model, prompts, group, learning rate, lengths and loss are those of examples/smollm2/grpo.yaml; what only costs time is
off. The reward is our grader `exact_number`. Which prompts a step has differs: each shuffles by its own seed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megatron_rl.environments.grading import grade

PROMPTS, GROUP, NEW_TOKENS, LEARNING_RATE = 16, 8, 32, 2e-5


class Curve(TrainerCallback):
    """Writes a line a step: TRL's mean reward, and the CPU seconds of this process up to here."""

    def __init__(self, output: Path) -> None:
        self._output, self._start = output, time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """TRL logs once a step."""
        if logs and "reward" in logs:
            row = {"step": state.global_step, "reward": logs["reward"], "cpu_s": time.process_time() - self._start}
            with self._output.open("a") as file:
                file.write(json.dumps(row) + "\n")


def settings(directory: Path, steps: int, seed: int, micro_batch: int) -> GRPOConfig:
    """TRL's arguments for what the example's flags say."""
    return GRPOConfig(
        output_dir=str(directory), max_steps=steps, seed=seed, per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=PROMPTS * GROUP // micro_batch, num_generations=GROUP,
        max_completion_length=NEW_TOKENS, temperature=1.0, beta=0.0, epsilon=0.2, loss_type="dapo",
        optim="adamw_torch_fused", learning_rate=LEARNING_RATE, lr_scheduler_type="constant", adam_beta2=0.999,
        weight_decay=0.0, max_grad_norm=1.0, bf16=False, gradient_checkpointing=False, use_cpu=True,
        dataloader_pin_memory=False, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--tasks", type=Path, required=True, help="rows of question and answer")
    parser.add_argument("--output", type=Path, required=True, help="a line a step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=32, help="of the update; all are generated at once")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.tasks.read_text().splitlines()]
    prompts = [{"prompt": [{"role": "user", "content": row["question"]}], "gold": row["answer"]} for row in rows]

    def reward(completions: list[Any], gold: list[str], **_: Any) -> list[float]:
        answers = (completion[0]["content"] for completion in completions)
        return [grade("exact_number", answer, right).reward for answer, right in zip(answers, gold, strict=True)]

    trainer = GRPOTrainer(
        model=str(options.model), reward_funcs=reward, train_dataset=Dataset.from_list(prompts),
        args=settings(options.output.with_suffix(".d"), options.steps, options.seed, options.micro_batch),
        processing_class=AutoTokenizer.from_pretrained(str(options.model)), callbacks=[Curve(options.output)],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
