"""Run the model over a packed batch and read off the log-probs of its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.logprobs import Entropy, selected_logprobs
from megatron_rl.attention import PackedPlan
from megatron_rl.models import PolicyModel


class Scorer:
    """The trainer's view of token probabilities: of the tempered distribution that was sampled.

    ``fused`` makes the output layer part of `select`, so that the logits of a batch never exist: less memory
    for one product more. Whoever calls `forward` and `select` need not know.
    """

    def __init__(
        self, policy: PolicyModel, tensor_group: dist.ProcessGroup, temperature: float, fused: bool = False
    ) -> None:
        self._policy = policy
        self._tensor_group = tensor_group if tensor_group.size() > 1 else None
        self._vocab_start = tensor_group.rank() * (policy.padded_vocab_size // tensor_group.size())
        self._temperature = temperature
        self._fused = fused

    @property
    def device(self) -> torch.device:
        """Where the results lie."""
        return self._policy.device

    def forward(self, model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
        """What `select` takes: logits ``[T, V / tensor ranks]``, or fused the hidden states ``[T, H]``.

        ``model`` is the GPTModel or its DDP wrapper.
        """
        with _without_product(self._policy.gpt.output_layer) if self._fused else contextlib.nullcontext():
            return self._run(model, batch)

    def select(
        self, output: torch.Tensor, batch: TokenBatch, entropy: Entropy = "none", *, is_logits: bool = False
    ) -> TokenBatch:
        """The batch with current log-probs and entropy; ``output`` is that of `forward`, or ``is_logits``."""
        weight = None
        if self._fused and not is_logits:
            gpt = self._policy.gpt
            tied = gpt.share_embeddings_and_output_weights
            weight = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
        logprobs, entropies = selected_logprobs(
            output,
            batch.token_ids,
            batch.position_ids,
            vocab_size=self._policy.vocab_size,
            weight=weight,
            temperature=self._temperature,
            vocab_start=self._vocab_start,
            tensor_group=self._tensor_group,
            entropy=entropy,
        )
        return replace(batch, current_logprobs=logprobs, entropy=entropies)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> torch.Tensor:
        """Log-probs without gradient, by the same forward pass that training uses."""
        return self.select(self.forward(self._policy.gpt, batch), batch).current_logprobs

    @torch.no_grad()
    def logprobs_and_top(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Also the likeliest next token after every position, [T] int64, of the real vocabulary."""
        logits = self._run(self._policy.gpt, batch)
        return self.select(logits, batch, is_logits=True).current_logprobs, self._top(logits)

    def _run(self, model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
        policy = self._policy
        plan = PackedPlan.build(
            batch.lengths, batch.cu_seqlens, batch.position_ids, policy.rope, policy.dtype, policy.attention.packed
        )
        output = model(batch.token_ids[None], batch.position_ids[None], None, packed_seq_params=plan)
        return output[0]

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
    """The layer hands on its input, gathered as for its product: whoever multiplies gets the right gradient.

    The layer is still called, because hooks on it gather its weights with `--overlap-param-gather`.
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
