"""`GET /metrics` in Prometheus' text format: the names are vLLM's with our prefix.

    # TYPE megatron_rl:generation_tokens_total counter
    megatron_rl:generation_tokens_total{model_name="mine"} 512
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

from megatron_rl.inference.engine import EngineLoad
from megatron_rl.types import Completion


class Metrics:
    """Counts answers, in the HTTP thread. A prompt counts once for each of its answers."""

    def __init__(self, model: str, load: Callable[[], EngineLoad | None]) -> None:
        """``load`` tells what the engine does now; None where none has begun."""
        self._model, self._load = f"model_name={json.dumps(model, ensure_ascii=False)}", load
        self._prompt_tokens = self._cached_tokens = self._sampled_tokens = 0
        self._finished: Counter[str] = Counter(stop=0, length=0)

    def count(self, prompt_tokens: int, completion: Completion) -> None:
        """Count the answer to a prompt of so many tokens."""
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += completion.cached_tokens
        self._sampled_tokens += len(completion.token_ids)
        self._finished["length" if completion.finish_reason == "length" else "stop"] += 1

    def text(self) -> str:
        """Return all metrics."""
        load, finished = self._load(), 'request_success_total,finished_reason="{}"'
        rows: list[tuple[str, str, float]] = []
        if load is not None:
            rows.append(("num_requests_running", "Answers in the engine's batch.", load.running))
            rows.append(("num_requests_waiting", "Answers that wait for a place in it.", load.waiting))
        if load is not None and load.blocks:
            rows.append(("kv_cache_blocks_in_use", "Blocks of the KV cache that answers hold.", load.used_blocks))
            rows.append(("kv_cache_usage_perc", "Their part of all, 0 to 1.", load.used_blocks / load.blocks))
        rows.append(("prompt_tokens_total", "Tokens of answered prompts.", self._prompt_tokens))
        rows.append(("generation_tokens_total", "Tokens of answers.", self._sampled_tokens))
        rows.append(("prefix_cache_queries_total", "Tokens of prompts, as the KV cache is asked.", self._prompt_tokens))
        rows.append(("prefix_cache_hits_total", "Those that it had.", self._cached_tokens))
        rows += [(finished.format(reason), "Answers by their end.", count) for reason, count in self._finished.items()]
        lines: dict[str, None] = {}
        for name, about, value in rows:
            name, comma, label = f"megatron_rl:{name}".partition(",")
            kind = "counter" if name.endswith("_total") else "gauge"
            lines |= dict.fromkeys([f"# HELP {name} {about}", f"# TYPE {name} {kind}"])
            lines[f"{name}{{{self._model}{comma}{label}}} {value}"] = None
        return "\n".join([*lines, ""])
