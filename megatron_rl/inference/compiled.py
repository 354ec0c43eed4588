"""`--rl-compile-rollout`: a decode step's forward pass through torch.compile, on a CPU.

    token ids, positions, cos, sin, cells, columns ─┐
    weights, keys and values of all layers ─────────┴─► one compiled function ─► logits

Rows and keys are dynamic sizes, so one compilation serves every batch. The weights are arguments: they change in
place. What is fused around the products may round differently, so log-probs agree with the eager ones, and the
trainer's, to about 1e-5 and no longer to the bit.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence

import torch

from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.decode import StepForward
from megatron_rl.inference.graph_sources import StepSources
from megatron_rl.inference.kv_cache import Cache
from megatron_rl.models import PolicyModel, RolloutForward
from megatron_rl.models.flat import FlatModel, can_be_flat, flat_step

logger = logging.getLogger(__name__)

Backend = Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Callable]
Report = Callable[[float], None]
"""Told what each compilation took by the clock."""


class CompiledForward:
    """`RolloutForward` for the decode steps of ``context``; eager while linears are quantised or observed."""

    def __init__(
        self,
        eager: RolloutForward,
        policy: PolicyModel,
        context: RolloutContext,
        cache: Cache,
        report: Report,
        backend: Backend,
    ) -> None:
        """``backend`` compiles a graph; injected, so that tests can do without or let it fail."""
        self._eager, self._context, self._cache = eager, context, cache
        self._report, self._backend = report, backend
        self._sources = StepSources(policy.gpt, cache)
        self._model = FlatModel.of(policy)
        self._vocab_size = policy.vocab_size
        self._columns = torch.arange(cache.shape.max_length, device=policy.device)
        # fullgraph: a part that cannot be traced is an error, never a second graph that nobody counts.
        self._step = torch.compile(flat_step, fullgraph=True, backend=self._compile)
        self._off = self._said = False
        self.variants = 0
        """Graphs compiled."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[N]`` ids and positions -> ``[N, V]`` fp32 logits over the real vocabulary."""
        if self._off or self._has_other_linears():
            return self._eager.forward(token_ids, positions)
        plan, cells, cos, sin = self._context.decode_step
        # Cloned: the first tokens of a burst are a view of the state, not of inference mode, and would be a variant.
        rows = (token_ids.clone(), positions, cos, sin, cells)
        columns = self._columns[: plan.key_length]
        before, started = self.variants, time.perf_counter()
        if not before:
            for tensor in (*rows, columns):
                torch._dynamo.mark_dynamic(tensor, 0)
        try:
            logits = self._step(*rows, columns, self._cache.keys, self._cache.values, self._model)
        except (RuntimeError, torch._dynamo.exc.FailOnRecompileLimitHit) as error:  # torch wraps what a compiler raises
            self._off = True
            reason = " ".join([line for line in str(error).splitlines() if line.strip()][:2])
            logger.warning("decode runs eager from here on: it could not be compiled (%s)", reason)
            return self._eager.forward(token_ids, positions)
        if self.variants != before:
            seconds = time.perf_counter() - started
            self._report(seconds)
            logger.info("decode step compiled in %.1f s (variant %d)", seconds, self.variants)
        return logits[:, : self._vocab_size].float()

    def _has_other_linears(self) -> bool:
        """Quantised copies or hooks (calibration, audit), which a graph of the weights would pass by."""
        others = self._sources.observed or any(self._sources.variant)
        if others and not self._said:
            self._said = True
            logger.info("decode runs eager, not compiled, while the linear layers are quantised or observed")
        return others

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable:
        self.variants += 1
        return self._backend(graph, inputs)


def with_compilation(
    eager: RolloutForward, policy: PolicyModel, context: RolloutContext, cache: Cache, report: Report
) -> StepForward:
    """``eager`` for the decode steps, compiled where that can be."""
    problem = _problem(eager, policy, cache) or (compiler_problem() if policy.device.type == "cpu" else None)
    if problem is not None:
        logger.warning("--rl-compile-rollout has no effect: %s", problem)
        return eager
    return CompiledForward(eager, policy, context, cache, report, _inductor)


def _problem(eager: RolloutForward, policy: PolicyModel, cache: Cache) -> str | None:
    """Why the step cannot be compiled; it knows dense models in fp32, whole on one rank, and nothing else."""
    if policy.device.type != "cpu":
        return f"it is for a CPU, and this run is on {policy.device.type}; use --enable-cuda-graph"
    if policy.attention.cache_name != "sdpa" or not cache.numbers.is_exact:
        return "it needs the sdpa backend with a KV cache of the model's own numbers"
    if policy.dtype != torch.float32:
        return f"it is for fp32, and this model is in {policy.dtype}"
    if not eager.is_short or not can_be_flat(policy):
        return "it knows dense layers without norms of query and key, whole on one rank, and this model has others"
    return None


def compiler_problem() -> str | None:
    """Why there is nothing to compile with; None where there is."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # torch's own choice
    return None if shutil.which(name) else f"it needs a C++ compiler, and there is no {name}; install one, or set CXX"


def _inductor(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable:
    from torch._inductor.compile_fx import compile_fx

    # In this process: a pool of compilers would outlive the compilation.
    return compile_fx(graph, inputs, config_patches={"compile_threads": 1})
