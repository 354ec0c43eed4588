#!/usr/bin/env python
"""The quickstart's task in a Python loop on one CPU: demonstrations first, then RL until it is right often enough.

python examples/python/train.py [RUN_DIR]
"""

import runpy
import sys
from pathlib import Path

import megatron_rl

MODEL = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 192, "num_attention_heads": 4, "swiglu": True,
    "disable_bias_linear": True, "init_method_std": 0.125, "embedding_init_method_std": 0.5, "seq_length": 64,
    "make_vocab_size_divisible_by": 16, "langrl_env_config": '{"environment": "arithmetic"}', "adam_beta2": 0.95,
}  # fmt: skip
SFT = {"train_iters": 600, "global_batch_size": 32, "micro_batch_size": 16, "lr": 4e-3, "lr_decay_style": "constant"}
RL = {"perform_rl_step": True, "train_iters": 60, "grpo_prompts_per_step": 16, "grpo_group_size": 8, "lr": 8e-4,
      "rl_max_new_tokens": 44, "micro_batch_size": 32, "lr_decay_style": "constant"}  # fmt: skip


def main(run_dir: Path, sft: dict = SFT, rl: dict = RL, enough: float = 0.5) -> None:
    """Train both ways; the RL ends as soon as a step's mean reward is ``enough``."""
    tokenizer = run_dir / "tokenizer"
    runpy.run_path(str(Path(__file__).parents[1] / "quickstart" / "make_tokenizer.py"))["main"](tokenizer)
    model = MODEL | {"tokenizer_model": tokenizer}
    for _, metrics in megatron_rl.steps(model, **sft, run_dir=run_dir / "sft", log_interval=100):
        metrics["mine/bits_per_token"] = metrics["train/loss"] / 0.6931  # in metrics.jsonl and the displays, too
    checkpoint = run_dir / "sft" / "checkpoints"
    for number, metrics in megatron_rl.steps(model, **rl, pretrained_checkpoint=checkpoint, run_dir=run_dir / "rl"):
        if metrics["critic/rewards/mean"] >= enough:
            print(f"step {number}: a mean reward of {metrics['critic/rewards/mean']:.2f} is enough")
            break


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/python"))
