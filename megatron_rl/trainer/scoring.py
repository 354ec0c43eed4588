"""Run the model on packed batches and compute log-probs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.context import ContextShare
from megatron_rl.algorithms.logprobs import Entropy, selected_logprobs
from megatron_rl.models.attention.context import ContextPlan, SharedPromptsPlan
from megatron_rl.models.attention.plan import PackedPlan
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.routing import BalanceLosses
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.optimizer import Optimization, UpdateOutcome
from megatron_rl.trainer.update import Forward, Loss, Sums, Updates, reduce_sums, run_schedule, update


class PackedForward:
    """Runs a model on packed batches in any parallel layout; subclasses interpret the output."""

    def __init__(self, policy: PolicyModel, groups: ParallelGroups, balance: BalanceLosses | None = None) -> None:
        """``balance``: for models with experts, in passes with gradients."""
        self._balance = balance
        self._policy = policy
        self.groups = groups
        self._tensor_group = groups.tensor_group if groups.tensor_group.size() > 1 else None

    @property
    def device(self) -> torch.device:
        """Device of the results."""
        return self._policy.device

    def balance_metrics(self) -> dict[str, float]:
        """Return expert load metrics of the passes with gradients since the last call; collective over the job."""
        return {} if self._balance is None else self._balance.metrics()

    def update(
        self, optimization: Optimization, updates: Updates, loss: Loss
    ) -> tuple[list[UpdateOutcome], dict[str, torch.Tensor]]:
        """Take one optimizer step per update; return outcomes and sums; collective."""
        outcomes: list[UpdateOutcome] = []
        sums: list[Sums] = []
        for micro_batches in updates:
            outcome, seen = update(optimization, micro_batches, self.forward, loss)
            outcomes.append(outcome)
            sums += seen
        return outcomes, reduce_sums(sums, self.groups.loss_group, self.device)

    def _read_all(self, batches: Sequence[TokenBatch], forward: Forward, read: Callable[..., Any]) -> list[Any]:
        return run_schedule(self._policy.chunks, batches, forward, read, forward_only=True) if batches else []

    def _shared(
        self, own: Sequence[torch.Tensor], batches: Sequence[TokenBatch], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Broadcast the last stage's values, [T] for each batch, to all stages."""
        stages = self.groups.pipeline_group
        if stages.size() == 1 or not batches:
            return list(own)
        shape = len(batches), batches[0].loss_mask.numel()
        values = torch.stack(list(own)) if own else torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(values, group=stages, group_src=stages.size() - 1)
        return list(values)

    def forward(self, model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
        """Compute the output for this rank's share of the tokens, [W, ..], or the hidden states for the next chunk.

        ``model`` is one of the policy's chunks or its DDP wrapper.
        """
        policy, packing = self._policy, batch.packing
        token_ids, position_ids = batch.samples.token_ids, packing.position_ids
        further = policy.ropes, policy.dtype, policy.attention.packed
        if packing.share is None:
            packed = packing.lengths, packing.cu_seqlens, position_ids
            plan = PackedPlan.build(*packed, *further, policy.windows)
        else:
            plans = ContextPlan if isinstance(packing.share, ContextShare) else SharedPromptsPlan
            plan = plans.of(packing, *further, self.groups.context_group, policy.windows)
            token_ids, position_ids = token_ids[packing.share.local], position_ids[packing.share.local]
        if batch.samples.routing is not None:
            plan.routing = self._routing(batch)
        if self._balance is not None and torch.is_grad_enabled():
            plan.balance = self._balance.new_pass(batch, self._tensor_group)
        output = model(token_ids[None], position_ids[None], None, packed_seq_params=plan)
        return output[0] if getattr(model, "module", model).post_process else output

    def _routing(self, batch: TokenBatch) -> dict[int, torch.Tensor]:
        """Return the experts per layer number of this rank, for the tokens that its routers see."""
        share = batch.packing.share
        routing = batch.samples.routing if share is None else batch.samples.routing[share.local]
        if self._policy.config.sequence_parallel:
            routing = routing.chunk(self._tensor_group.size())[self._tensor_group.rank()]
        by_layer = routing.transpose(0, 1).contiguous()
        return {layer.index + 1: own for layer, own in zip(self._policy.layout.layers, by_layer, strict=True)}


class Scorer(PackedForward):
    """Computes log-probs under the tempered distribution that was sampled.

    ``fused`` makes the output layer part of `select`, so that the logits of a whole batch never exist: less memory for
    one more product. Callers of `forward` and `select` need not know.
    """

    def __init__(
        self, policy: PolicyModel, groups: ParallelGroups, temperature: float, fused: bool = False,
        balance: BalanceLosses | None = None,
    ) -> None:  # fmt: skip
        super().__init__(policy, groups, balance)
        self._vocab_start = groups.tensor_group.rank() * (policy.padded_vocab_size // groups.tensor_group.size())
        self._temperature = temperature
        self._fused = fused

    def forward(self, model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
        """Compute the input of `select`: logits ``[W, V / tensor ranks]``, or fused the hidden states ``[W, H]``."""
        head = self._policy.chunks[-1]
        skips = self._fused and head.post_process
        with _without_product(head.output_layer) if skips else contextlib.nullcontext():
            return super().forward(model, batch)

    def select(
        self, output: torch.Tensor, batch: TokenBatch, entropy: Entropy = "none", *, is_logits: bool = False
    ) -> TokenBatch:
        """Return the batch with current log-probs and entropy; ``output`` is that of `forward`, or logits.

        The backward pass overwrites logits with their gradient.
        """
        weight = None
        if self._fused and not is_logits:
            gpt = self._policy.chunks[-1]
            tied = gpt.share_embeddings_and_output_weights
            weight = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
        logprobs, entropies = selected_logprobs(
            output, batch.samples.token_ids, batch.packing.position_ids, vocab_size=self._policy.vocab_size,
            weight=weight, temperature=self._temperature, vocab_start=self._vocab_start,
            tensor_group=self._tensor_group, entropy=entropy, share=batch.packing.share,
            context_group=self.groups.context_group, overwrite=True,
        )  # fmt: skip
        return replace(batch, current_logprobs=logprobs, entropy=entropies)

    @torch.no_grad()
    def logprobs(self, batches: Sequence[TokenBatch]) -> list[torch.Tensor]:
        """Compute the log-probs of each batch, without gradient, with training's forward pass.

        Collective over pipeline stages, returned on each. For requirements on batches see `run_schedule`.
        """

        def read(output: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
            return self.select(output, batch).current_logprobs

        return self._shared(self._read_all(batches, self.forward, read), batches, torch.float32)

    @torch.no_grad()
    def logprobs_and_top(self, batches: Sequence[TokenBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Compute log-probs, and the likeliest next token after every position, [T] int64, without vocabulary padding.
        """

        def read(logits: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
            top = self._top(logits)
            if batch.packing.share is not None:
                top = batch.packing.share.whole(top, self.groups.context_group)
            return self.select(logits, batch, is_logits=True).current_logprobs, top

        found = self._read_all(batches, super().forward, read)
        logprobs = self._shared([one for one, _ in found], batches, torch.float32)
        return list(zip(logprobs, self._shared([top for _, top in found], batches, torch.int64), strict=True))

    def _top(self, logits: torch.Tensor) -> torch.Tensor:
        real = min(max(self._policy.vocab_size - self._vocab_start, 0), logits.shape[-1])
        if real == 0:  # this rank has padding only
            best = logits.new_full(logits.shape[:1], float("-inf")).float()
            token = torch.zeros_like(best, dtype=torch.int64)
        else:
            best, token = logits[:, :real].float().max(-1)
        token = token + self._vocab_start
        if self._tensor_group is None:
            return token
        overall = best.clone()
        dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=self._tensor_group)
        token = torch.where(best == overall, token, self._policy.padded_vocab_size)
        dist.all_reduce(token, op=dist.ReduceOp.MIN, group=self._tensor_group)  # equal ones: the first
        return token


@contextlib.contextmanager
def _without_product(layer: ColumnParallelLinear) -> Iterator[None]:
    """Make the layer return its input, gathered as for its product, so that gradients are right; inside the context.

    The layer is still called, because its hooks gather its weights with `--overlap-param-gather`.
    """

    def hand_on(
        input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        del weight, runtime_gather_output
        if layer.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(input_), None
        return tensor_parallel.copy_to_tensor_model_parallel_region(input_), None

    layer.forward = hand_on  # on this object, before the class's own
    try:
        yield
    finally:
        del layer.forward
