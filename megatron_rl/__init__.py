"""Reinforcement learning of language models inside one Megatron process per GPU."""

__version__ = "0.1.0"
