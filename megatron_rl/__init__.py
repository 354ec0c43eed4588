"""Reinforcement learning of language models inside one Megatron process per GPU."""

__version__ = "0.1.0"

from megatron_rl.arithmetic import ask_for_strict_products

ask_for_strict_products()  # before the first product of this process
