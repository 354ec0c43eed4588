"""Hugging Face checkpoints in and out, a piece at a time: no rank ever holds more than it needs."""

from megatron_rl.checkpoint.hf.convert import import_hf
from megatron_rl.checkpoint.hf.load import load_hf
from megatron_rl.checkpoint.hf.save import export_checkpoint, save_hf

__all__ = ["export_checkpoint", "import_hf", "load_hf", "save_hf"]
