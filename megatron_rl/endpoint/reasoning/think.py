"""Qwen3, DeepSeek-R1, GLM, SmolLM3 and most others: ``<think>2 and 2 are 4.</think>4``."""

from megatron_rl.endpoint.reasoning import Reasoning

PARSER = Reasoning("<think>", "</think>")
