"""Hugging Face checkpoints in and out, a piece at a time: no rank ever holds more than it needs."""

from megatron_rl.checkpoint.hf.load import load_hf
from megatron_rl.checkpoint.hf.save import save_hf

__all__ = ["load_hf", "save_hf"]
