"""Magistral and Ministral: ``[THINK]2 and 2 are 4.[/THINK]4``; the marks are special tokens."""

from megatron_rl.endpoint.reasoning import Reasoning

PARSER = Reasoning("[THINK]", "[/THINK]")
