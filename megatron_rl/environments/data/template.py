"""The prompt of DAPO-Math-17k, which AIME 2024 in the same layout shares."""

from __future__ import annotations

from megatron_rl.types import Message

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo_prompt(statement: str) -> tuple[Message, ...]:
    """The chat that asks for a problem."""
    return ({"role": "user", "content": f"{BEFORE}{statement}{AFTER}"},)


def dapo_statement(prompt: tuple[Message, ...]) -> str:
    """The problem in such a chat; the whole message when it is written otherwise."""
    return prompt[-1]["content"].removeprefix(BEFORE).removesuffix(AFTER)
