"""Training data: `Sample`, and ``TokenBatch``, the input of losses, corrections and advantages for a micro-batch.

Shapes: ``[T]`` packed tokens, ``[B]`` sequences of the batch, ``[N]`` samples of the step. Log-probs are fp32 and
stored at their token's index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_type_hints

import torch
from torch import Tensor

from megatron_rl.algorithms.agents import AgentRows
from megatron_rl.algorithms.context import Share

LOG_RATIO_LIMIT = 20.0
"""Nats. Without a limit, one token of 88 nats makes the loss of the batch inf; exp(20) is beyond every clip range."""

Aggregation = Literal["token-mean", "sequence-mean", "constant"]
Terms = tuple[Tensor, dict[str, Tensor]]
"""Result of a loss, correction or advantage: values [T] fp32, and sums to log by name.

A sum is [] or [T], 0 at masked positions. It is summed over tokens, micro-batches and ranks and divided by the step's
loss tokens. Names ending in ``_max`` are maxima.
"""


@dataclass(frozen=True)
class StepRewards:
    """Rewards of the step's samples on all ranks; identical on every rank, on the CPU. Index n is sample n."""

    rewards: Tensor
    """[N] fp32, finite where ``valid``."""
    valid: Tensor
    """[N] bool; False if grading failed: excluded from baseline and loss."""
    group_index: Tensor
    """[N] int64, the task of each sample, from 0."""
    informative: Tensor
    """[number of groups] bool: groups whose advantages can differ from 0."""
    in_loss: Tensor
    """[N] bool: trained samples."""
    loss_tokens: Tensor
    """[N] int64: tokens that the policy wrote, in all sequences of the sample."""
    parts: Tensor | None = None
    """[N, R] fp32: the advantage's named rewards (`reward_names`), if any."""
    policy_version: int = 0
    """Number of training steps before the current one."""
    turns: TurnRewards | None = None
    """With --rl-turn-discount."""
    agents: AgentRows | None = None
    """If samples have several agents: index n is then one agent's part of one sample."""

    @property
    def informative_tasks(self) -> Tensor:
        """[tasks] bool: tasks with an informative group."""
        return self.informative if self.agents is None else self.agents.by_task(self.informative)


@dataclass(frozen=True, kw_only=True)
class TurnRewards(StepRewards):
    """Rewards by turn: index n is turn n of the step, with its discounted return.

    A group contains the turns with the same number in the samples of one task. Advantages of these rewards are per
    turn.
    """

    own: Tensor
    """[N] fp32: undiscounted rewards of the turns; the last one includes the final reward."""
    discount: float
    """Factor of the next turn's return."""


@dataclass(frozen=True)
class FieldSpec:
    """How a field of `Sample` is exchanged and concatenated."""

    dtype: torch.dtype | None
    """None: uint8 or int16, [L, layers, k]; such a field may be None."""
    per_token: bool = True
    """True: a tensor with one row per token; False: a scalar per sequence."""
    padding: int | None = 0
    """Value for padding tokens; None: the dtype's maximum."""
    on_host: bool = False
    """Kept as a tuple of integers in micro-batches, without device reads; dummy sequences are left out."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence ready for training, on the CPU. Sequences of one sample share its id and reward.

    Exchange and `TokenBatch.samples` are derived from this declaration: there L is T, and scalars are tensors [B].
    """

    token_ids: Annotated[Tensor, FieldSpec(torch.int64)]
    """[L] int64."""
    loss_mask: Annotated[Tensor, FieldSpec(torch.bool)]
    """[L] bool: tokens written by the policy; False in prompts and environment messages."""
    inference_logprobs: Annotated[Tensor, FieldSpec(torch.float32)]
    """[L] fp32, 0 at prompt positions and in supervised samples."""
    versions: Annotated[Tensor, FieldSpec(torch.int64)]
    """[L] int64: policy version that drew the token (number of steps)."""
    routing: Annotated[Tensor | None, FieldSpec(None, padding=None)] = None
    """[L, layers of this rank, k]: experts to use (`--rl-router-replay`). The dtype's maximum, for tokens that the
    rollout did not feed: the router chooses.
    """
    reward: Annotated[float | Tensor, FieldSpec(torch.float32, per_token=False)] = 0.0
    sample_id: Annotated[int | tuple[int, ...], FieldSpec(torch.int64, per_token=False, on_host=True)] = 0
    """Index of the sample in the step; links to its rows in the rollout records."""
    sequence: Annotated[int | Tensor, FieldSpec(torch.int64, per_token=False)] = 0
    """Index among the sample's sequences; index 0 always exists."""
    first_sequence: Annotated[int | Tensor, FieldSpec(torch.int64, per_token=False)] = 0
    """Index of its agent's first sequence, which always exists; 0 without agents."""
    tokens_elsewhere: Annotated[int | Tensor, FieldSpec(torch.int64, per_token=False)] = 0
    """Tokens that the policy wrote in the sample's (or its agent's) other sequences, on any rank."""
    truncated: Annotated[bool | Tensor, FieldSpec(torch.bool, per_token=False)] = False
    """True if the sequence reached its length limit."""
    turn: Annotated[Tensor | None, FieldSpec(torch.int64, padding=-1)] = None
    """[L] int64: the turn's index in `TurnRewards`, -1 for tokens that the policy did not write; None without turns."""

    @property
    def length(self) -> int:
        """Number of tokens, prompt included."""
        return self.token_ids.numel()


SAMPLE_FIELDS = {name: hint.__metadata__[0] for name, hint in get_type_hints(Sample, include_extras=True).items()}


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Positions of the B sequences of a micro-batch; the last ones may be dummies that pad T."""

    lengths: tuple[int, ...]
    """On the host, so that no kernel launch waits for the device."""
    cu_seqlens: Tensor
    """[B+1] int32."""
    position_ids: Tensor
    """[T] int64, restarts at 0 for every sequence."""
    sequence_index: Tensor
    """[T] int64, the sequence of each token; sequences are contiguous."""
    share: Share | None = None
    """Tokens that this rank runs through the model; None: all. Each context-parallel rank has the whole batch."""


@dataclass(frozen=True)
class CriticValues:
    """A critic's values and returns before the step's updates."""

    values: Tensor
    """[T], before the token was drawn."""
    end_values: Tensor | None = None
    """[B], after the last token of each sequence."""
    returns: Tensor | None = None
    """[T], targets of the values."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Inputs of a loss or a correction. Masked positions may contain anything, including NaN."""

    packing: Packing
    loss_mask: Tensor
    """[T] fp32, 1 for tokens written by the policy."""
    inference_logprobs: Tensor
    """[T], from the rollout engine; 0 where ``loss_mask`` is 0."""
    old_logprobs: Tensor | None = None
    """[T], from the trainer's model before the step's updates. None in the first update: equal to the current ones."""
    current_logprobs: Tensor | None = None
    """[T], from the model being trained, with gradient."""
    advantages: Tensor | None = None
    """[T]."""

    @property
    def in_loss(self) -> Tensor:
        """The mask as [T] bool."""
        return self.loss_mask > 0

    @property
    def sequence_index(self) -> Tensor:
        """[T] int64, the sequence of each token."""
        return self.packing.sequence_index

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Return the sums of ``values`` [T] over the loss tokens of each sequence, [B] fp64; 0 without any."""
        # fp64: index_add on a GPU has a fixed order only in --deterministic-mode, so runs would differ in fp32.
        known = torch.where(self.in_loss, values, 0.0).double()
        return known.new_zeros(len(self.packing.lengths)).index_add(0, self.sequence_index, known)

    def sequence_means(self, values: Tensor) -> Tensor:
        """Return the means of ``values`` [T] over the loss tokens of each sequence, [B] fp32; 0 without any."""
        return (self.sequence_sums(values) / self.loss_tokens().clamp_min(1)).float()

    def loss_tokens(self) -> Tensor:
        """Count the loss tokens of each sequence: [B] int64."""
        return self.sequence_sums(self.loss_mask).long()


@dataclass(frozen=True, kw_only=True)
class TokenBatch(LossInputs):
    """A micro-batch: concatenated sequences (``thd``). All tensors are on one device.

    Two samples ``P0 A0 E`` with reward 1 and ``Q0 B0`` with reward 0.5, padded to 8 tokens::

        samples.token_ids        P0 A0  E  Q0 B0  -  -  -
        packing.position_ids      0  1  2   0  1  0  1  2
        packing.cu_seqlens        0         3     5        8
        packing.sequence_index    0  0  0   1  1  2  2  2
        loss_mask                 0  1  1   0  1  0  0  0
        rewards                   0  0  1   0  .5 0  0  0

    Fields without a default are set by collation, current log-probs and entropy by an update's forward pass, others by
    scoring as needed.
    """

    samples: Sample
    """Concatenated. A sample may have sequences in other micro-batches or on other ranks of the same update."""
    rewards: Tensor
    """[T] fp32: a sequence's reward at its last loss token, 0 elsewhere."""
    step: StepRewards | None = None
    ref_logprobs: Tensor | None = None
    """[T], of the reference model; None without a KL penalty."""
    teacher_logprobs: Tensor | None = None
    """[T], of the teacher, if any."""
    critic: CriticValues | None = None
    advantage_sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums of the advantages, to log."""
    selected: Tensor | None = None
    """[T] bool: tokens selected by a `covariance.TokenSelection` loss; else None."""
    entropy: Tensor | None = None
    """[T], nats, of the distribution the token was drawn from."""

    @property
    def is_counted_here(self) -> bool:
        """True on the context-parallel rank that counts the denominator, since all of them compute the whole loss."""
        return self.packing.share is None or self.packing.share.rank == 0

    @property
    def values(self) -> Tensor:
        """The critic's values, [T]."""
        return self.critic.values

    @property
    def rows(self) -> Sequence[int]:
        """Index of each sequence in ``step``, without dummies."""
        ids, agents = self.samples.sample_id, self.step and self.step.agents
        return ids if agents is None else agents.rows(ids, self.samples.first_sequence.tolist())

    @property
    def versions(self) -> Tensor:
        """See `Sample.versions`, [T]."""
        return self.samples.versions

    @property
    def lag(self) -> Tensor:
        """Staleness, [T] int64: steps between the policy that drew the token and the current one."""
        return torch.zeros_like(self.versions) if self.step is None else self.step.policy_version - self.versions

    def of_samples(self, values: Tensor) -> Tensor:
        """Give each token the value of its sample: [N] on the CPU -> [T] fp32 on the batch's device.

        If ``step`` has turns, the value of its turn; 0 for tokens that the policy did not write.
        """
        if isinstance(self.step, TurnRewards):
            if self.samples.turn is None:  # a batch without loss
                return torch.zeros_like(self.loss_mask)
            return torch.cat([values.float(), torch.zeros(1)]).to(self.loss_mask.device)[self.samples.turn]
        own = values[torch.tensor(self.rows, dtype=torch.int64)].float()
        own = torch.cat([own, own.new_zeros(len(self.packing.lengths) - own.numel())])
        return own.to(self.sequence_index.device)[self.sequence_index]

    def sample_tokens(self) -> Tensor:
        """Count the loss tokens of each sequence's sample, over all its sequences: [B] int64.

        Includes tokens that `trusted_mask` removed from other sequences, which may be in other micro-batches.
        """
        return self.loss_tokens() + self.samples.tokens_elsewhere


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return ``log(numerator / denominator)`` per token, clamped to ``LOG_RATIO_LIMIT``, 0 at masked positions.

    All [T]. NaN at masked positions affects neither value nor gradient.
    """
    difference = numerator_logprobs.float() - denominator_logprobs.float()
    return torch.where(loss_mask > 0, difference, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_weights(kind: Aggregation, batch: TokenBatch, constant: float) -> tuple[Tensor, Tensor]:
    """Return token weights and the denominator of their sum.

    The trainer sums ``per_token * weights`` and the denominators over all micro-batches and data-parallel ranks of an
    update and divides once, so two micro-batches equal one.

    =================  ===============================  ==========================================
    kind               weight of a loss token           denominator
    =================  ===============================  ==========================================
    ``token-mean``     1                                number of loss tokens
    ``sequence-mean``  1 / loss tokens of its sample    number of samples with loss tokens
    ``constant``       1 / constant (Dr. GRPO)          number of samples with loss tokens
    =================  ===============================  ==========================================

    A sample with several sequences counts once, in its first sequence, with all its tokens. With several agents each
    one's part is a sample here.

    Args:
        kind: the reduction.
        batch: masked by ``trusted_mask``, before any rejection by a correction.
        constant: tokens, positive; Dr. GRPO (arXiv 2503.20783) uses the length limit of completions.

    Returns:
        weights [T] fp32, 0 at masked positions, and the denominator, [] int64 on the same device.
    """
    in_loss = batch.in_loss
    if kind == "token-mean":
        return in_loss.float(), in_loss.sum()
    lengths = batch.sample_tokens()
    samples = ((lengths > 0) & (batch.samples.sequence == batch.samples.first_sequence)).sum()
    if kind == "constant":
        return in_loss.float() / constant, samples
    return torch.where(in_loss, 1 / lengths.clamp_min(1)[batch.sequence_index], 0.0), samples


def summed(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reduce each of an extension's sums to [] fp64, detached; names ending in ``_max`` to their maximum."""
    values = {name: value.detach().double() for name, value in sums.items()}
    return {name: value.max() if name.endswith("_max") else value.sum() for name, value in values.items()}


def trusted_mask(loss_mask: Tensor, *logprobs: Tensor | None) -> Tensor:
    """Remove tokens with a non-finite log-prob from ``loss_mask`` and thus from denominators: [T] fp32.

    Setting their log-prob to 0 instead would mean that the policy was certain of them.
    """
    trusted = loss_mask > 0
    for values in logprobs:
        trusted = trusted if values is None else trusted & values.detach().isfinite()
    return trusted.float()
