"""Rollout engines built from flags as a run builds them; prefill and decode steps against the bytes they must read.

The cache is filled by prefill: a prompt of its own for every row up to ``Sizes.distinct_prompts``, above that groups
that share a prompt. Timed bursts include the host's read and bookkeeping. Rows reach the context asked for to within
the few tokens that others decode while the last prompts are read.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.inference.engine import Engine
from megatron_rl.models.attention.backend import BACKENDS
from megatron_rl.models.attention.selection import facts_of
from megatron_rl.models.gpt import PolicyModel, build_model, rollout_mode
from megatron_rl.platform.groups import seed_everything
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.run.generation import build_engine
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Request, SamplingParams
from tools.benchmark.common import Shape, benchmark_config, random_prompts, requests_of
from tools.benchmark.on_gpu.measure import Bench, Row, guarded
from tools.benchmark.on_gpu.shapes import (
    BF16,
    FP8,
    FP8_KV,
    INT8,
    Format,
    decode_bytes,
    forward_flops,
    ratio,
    roofline_ms,
    utilisation,
)

GRAPHS = ("--enable-cuda-graph", "--inference-dynamic-batching-num-cuda-graphs=8")
"""Captures of the batches that are measured, the powers of two, and few others."""
ATTENTION_BATCHES = (32, 256)
PROFILED = 32
"""Rows at most of the decode steps whose kernels are listed."""
PREFILLED = 8
"""Prompts read at once."""


class _Numbers:
    """As much of a Hugging Face tokenizer as ours asks for: a token's text is its number."""

    eos_token_id = 0
    chat_template = None

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def __len__(self) -> int:
        return self._vocab

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self._vocab)}

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return " ".join(map(str, ids))


@dataclass(frozen=True)
class Rolling:
    """A model with its engine."""

    config: RLConfig
    policy: PolicyModel
    tokenizer: Tokenizer
    engine: Engine
    quantization: RolloutQuantization
    shape: Shape

    @contextlib.contextmanager
    def rollouts(self) -> Iterator[None]:
        """Rollout mode on freshly quantised weights. The first time it audits a few tokens: see the audit."""
        with rollout_mode(self.policy):
            with self.quantization.rollout():
                yield

    def warm(self) -> None:
        """Kernels compile, and the audit looks at its one rollout, before anything is timed."""
        with self.rollouts():
            self.generate(prompts=1, copies=1, prompt_tokens=8, new_tokens=4)

    def generate(self, **sizes: int) -> None:
        """A whole rollout: see `requests`."""
        self.submit(**sizes)
        while self.engine.has_unfinished:
            self.engine.step()

    def submit(self, **sizes: int) -> None:
        """Begin a rollout: see `requests`."""
        self.engine.begin(seed=1, policy_version=0)
        for request in self.requests(**sizes):
            self.engine.submit(request)

    def requests(self, *, prompts: int, copies: int, prompt_tokens: int, new_tokens: int) -> list[Request]:
        """One a random prompt, ``copies`` samples each."""
        sampling = SamplingParams(max_new_tokens=new_tokens)
        return requests_of(random_prompts(prompts, prompt_tokens, self.shape.vocab, seed=1), copies, sampling)


def open_engine(bench: Bench, shape: Shape, *, batch: int, length: int, flags: Sequence[str] = ()) -> Rolling:
    """Random weights made on the device, and the engine of these flags; ``length`` is of prompt and answer."""
    config = benchmark_config(
        shape, length, "--bf16", f"--inference-max-batch-size={batch}",
        f"--rl-decode-steps-per-sync={bench.sizes.steps}", *flags, *bench.flags,
    )  # fmt: skip
    seed_everything(1)
    policy = build_model(config, bench.platform, shape.vocab)
    tokenizer = Tokenizer(_Numbers(shape.vocab), "numbers")
    engine = build_engine(config, policy, tokenizer, bench.groups)
    recipe = config.quantization.rl_rollout_quantization
    quantization = RolloutQuantization(policy.gpt, recipe, (), lambda audit: None)
    return Rolling(config, policy, tokenizer, engine, quantization, shape)


def attention(bench: Bench) -> Iterator[Row]:
    """Every attention backend of this device, at two contexts, on a few layers of the 7B."""
    sizes = bench.sizes
    for name in BACKENDS.names():
        labels = {"model": sizes.attention.name, "layers": sizes.attention.layers, "attention": name}
        backend = BACKENDS.get(name)
        problem = "it has no kernel over the KV cache" if backend.cache is None else None
        problem = problem or backend.problem(facts_of(bench.device))
        if problem is not None:
            yield {**labels, "skipped": problem}
            continue
        for context in (sizes.context, sizes.long_context):
            batches = [batch for batch in sizes.batches if batch in ATTENTION_BATCHES] or sizes.batches[-1:]
            flags = (f"--attention-backend={name}", *(GRAPHS if bench.platform.is_cuda else ()))
            rows = decode_rows(bench, sizes.attention, BF16, batches, context, flags)
            yield from guarded(rows, labels)


def decode(bench: Bench, model: str, kinds: Sequence[Format] = (BF16, FP8, INT8, FP8_KV)) -> Iterator[Row]:
    """``small``, ``middle``, ``large`` or ``experts`` of the sizes, in these formats, with CUDA graphs and without.

    Of a model with layers cut, ``whole_ms`` takes the same ratio to the roofline for the whole one.
    """
    shape: Shape = getattr(bench.sizes, model)
    for kind, graphs in itertools.product(kinds, (False, True)):
        labels = {"model": shape.name, "layers": shape.layers, "format": kind.name, "graphs": graphs}
        if graphs and not bench.platform.is_cuda:
            yield {**labels, "skipped": "CUDA graphs need a CUDA device"}
            continue
        most = bench.sizes.batches[-1] if graphs else bench.sizes.largest_eager
        batches = [batch for batch in bench.sizes.batches if batch <= most]
        flags = (*kind.flags, *(GRAPHS if graphs else ("--no-enable-cuda-graph",)))
        rows = decode_rows(bench, shape, kind, batches, bench.sizes.context, flags)
        yield from guarded(rows, labels)


def decode_rows(
    bench: Bench, shape: Shape, kind: Format, batches: Sequence[int], context: int, flags: Sequence[str]
) -> Iterator[Row]:
    """One row a batch size, all by one engine."""
    bench.forget()
    sizes = bench.sizes
    # The prefill takes a few engine steps, in each of which the rows that are ready decode a burst.
    most_fills = min(max(batches), sizes.distinct_prompts)
    new_tokens = 1 + sizes.steps * (most_fills + 3 + sizes.bursts)
    # The host is in a profile's way where steps are eager, and its launches show in the times already.
    profiled = max((batch for batch in batches if batch <= PROFILED), default=0)
    profiled = profiled if set(GRAPHS) & set(flags) or not bench.platform.is_cuda else 0
    rolling = open_engine(bench, shape, batch=max(batches), length=context + new_tokens, flags=flags)
    rolling.warm()
    with rolling.rollouts():
        for batch in batches:
            what = [shape.name, kind.name, *(flag for flag in flags if "backend" in flag)]
            label = ", ".join([*what, f"{sizes.steps} steps of {batch} rows of {context} tokens"])
            label = label if batch == profiled else None
            step, rows = _step_seconds(bench, rolling, batch, context, new_tokens, label)
            least = roofline_ms(decode_bytes(shape, kind, batch, context), bench.bandwidth)
            row = {"batch": batch, "context": context, "step_ms": 1e3 * step, "roofline_ms": least, "rows": rows,
                   "ratio": ratio(1e3 * step, least), "tokens_per_second": batch / step}  # fmt: skip
            if shape.whole_layers:
                whole = decode_bytes(shape.whole, kind, batch, context) / decode_bytes(shape, kind, batch, context)
                row["whole_ms"] = 1e3 * step * whole
            yield row


def _step_seconds(
    bench: Bench, rolling: Rolling, batch: int, context: int, new_tokens: int, profiled: str | None
) -> tuple[float, float]:
    """Median seconds of a decode step over the bursts, and how many rows were computed in each.

    With ``profiled`` one more burst is profiled under that name.
    """
    engine, prompts = rolling.engine, min(batch, bench.sizes.distinct_prompts)
    # Half of the timed steps come before the context asked for, half after it.
    ahead = min(bench.sizes.steps * (2 + bench.sizes.bursts // 2), context // 2)
    rolling.submit(prompts=prompts, copies=batch // prompts, prompt_tokens=context - ahead, new_tokens=new_tokens)
    read = -1
    while engine.statistics.prefill_tokens > read:  # ends with a burst of all rows, which is not timed
        read = engine.statistics.prefill_tokens
        engine.step()
    times, before = [], engine.statistics.decode_rows
    first = engine.statistics.decode_steps
    for _ in range(bench.sizes.bursts):
        at = engine.statistics.decode_steps
        bench.platform.synchronize()
        started = time.perf_counter()
        engine.step()
        bench.platform.synchronize()
        times.append((time.perf_counter() - started) / (engine.statistics.decode_steps - at))
    rows = (engine.statistics.decode_rows - before) / (engine.statistics.decode_steps - first)
    if profiled is not None:
        bench.profile(profiled, engine.step)
    engine.abort()
    return statistics.median(times), rows


def prefill(bench: Bench) -> Iterator[Row]:
    """Prompts of the context's length into the cache, logits for their last tokens only."""
    for shape in (bench.sizes.small, bench.sizes.middle):
        bench.forget()
        context = bench.sizes.context
        rolling = open_engine(bench, shape, batch=PREFILLED, length=context + 1)
        rolling.warm()
        read = partial(rolling.generate, prompts=PREFILLED, copies=1, prompt_tokens=context, new_tokens=1)
        with rolling.rollouts():
            took = bench.seconds(read)
            bench.profile(shape.name, read)
        tokens, flops = PREFILLED * context, forward_flops(shape, [context] * PREFILLED, head=False)
        yield {"model": shape.name, "tokens": tokens, "ms": 1e3 * took, "tokens_per_second": tokens / took,
               "mfu": utilisation(flops, took, bench.peak)}  # fmt: skip
