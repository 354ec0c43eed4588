"""Stop strings: the one ending that has to be looked for in text."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def truncate_at_stop(
    token_ids: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """How many tokens to keep so that the text just contains a stop string; None without one.

    The token that completes the stop string is kept: its log-prob belongs to the policy's choice.
    """

    def contains(count: int) -> bool:
        text = decode(token_ids[:count])
        return any(string in text for string in stop)

    if not contains(len(token_ids)):
        return None
    low, high = 1, len(token_ids)
    while low < high:  # "contains" is monotone in the number of tokens
        middle = (low + high) // 2
        low, high = (low, middle) if contains(middle) else (middle + 1, high)
    return low
