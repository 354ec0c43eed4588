"""A `Sample` for training, and ``TokenBatch``: all that losses, corrections and advantages know of a micro-batch.

Shapes: ``[T]`` packed tokens, ``[B]`` sequences of the batch, ``[N]`` samples of the step. Log-probs are fp32 and sit
at their token's index.
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
"""Nats. Unbounded, one token of 88 nats turns the loss of the batch into inf; exp(20) is beyond every clip range."""

Aggregation = Literal["token-mean", "sequence-mean", "constant"]
Terms = tuple[Tensor, dict[str, Tensor]]
"""What a loss, a correction or an advantage returns: a number for each token, [T] fp32, and sums to log by name.

A sum is [] or [T], 0 at masked positions. It is added up over tokens, micro-batches and ranks and divided by the step's
loss tokens. Of a name that ends in ``_max`` the largest is logged.
"""


@dataclass(frozen=True)
class StepRewards:
    """Rewards of the step's samples, of all ranks: the same on every rank, on the CPU. Index n is sample n."""

    rewards: Tensor
    """[N] fp32, finite where ``valid``."""
    valid: Tensor
    """[N] bool; False where grading failed: masked from baseline and loss."""
    group_index: Tensor
    """[N] int64, the task of each sample, counted from 0."""
    informative: Tensor
    """[number of groups] bool: groups whose advantages can differ from 0."""
    in_loss: Tensor
    """[N] bool: the samples that are trained on."""
    loss_tokens: Tensor
    """[N] int64: tokens of the sample that the policy wrote, in all its sequences."""
    parts: Tensor | None = None
    """[N, R] fp32: the rewards that the advantage names (`reward_names`); None where it names none."""
    policy_version: int = 0
    """Of the policy at the beginning of the step: how many steps have changed it."""
    turns: TurnRewards | None = None
    """With --rl-turn-discount."""
    agents: AgentRows | None = None
    """Where samples have several agents: index n is then what one agent did in one sample."""

    @property
    def informative_tasks(self) -> Tensor:
        """[tasks] bool: those with an informative group."""
        return self.informative if self.agents is None else self.agents.by_task(self.informative)


@dataclass(frozen=True, kw_only=True)
class TurnRewards(StepRewards):
    """The same with turns in place of samples: index n is turn n of the step, its reward a discounted return.

    Groups are the turns of one number in the samples of one task. An advantage that is made of them is of turns.
    """

    own: Tensor
    """[N] fp32: the rewards of single turns; the last has what was given at the end, too."""
    discount: float
    """Of the next turn's return."""


@dataclass(frozen=True)
class FieldSpec:
    """The way a field of `Sample` travels between ranks and is laid end to end."""

    dtype: torch.dtype | None
    """None: uint8 or int16, [L, layers, k]; such a field may be None."""
    per_token: bool = True
    """A tensor with one row a token; else one Python number of the sequence."""
    padding: int | None = 0
    """Of the tokens that round T up; None is the largest number of the dtype."""
    on_host: bool = False
    """In a micro-batch a tuple of integers, for which no kernel waits; dummy sequences are left out."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence ready for training, on the CPU. Sequences of one sample share its id and reward.

    The exchange between ranks and `TokenBatch.samples` follow from this declaration: there L is T, and a number of a
    sequence is a tensor [B].
    """

    token_ids: Annotated[Tensor, FieldSpec(torch.int64)]
    """[L] int64."""
    loss_mask: Annotated[Tensor, FieldSpec(torch.bool)]
    """[L] bool: the policy wrote the token; False in the prompt and where it read."""
    inference_logprobs: Annotated[Tensor, FieldSpec(torch.float32)]
    """[L] fp32, 0 at prompt positions and in supervised samples, which nothing sampled."""
    versions: Annotated[Tensor, FieldSpec(torch.int64)]
    """[L] int64: how many steps had changed the policy that drew the token."""
    routing: Annotated[Tensor | None, FieldSpec(None, padding=None)] = None
    """[L, layers of this rank, k]: experts to send the tokens to (`--rl-router-replay`). Where it is the largest number
    of the dtype, as the rollout did not feed the token, the router chooses."""
    reward: Annotated[float | Tensor, FieldSpec(torch.float32, per_token=False)] = 0.0
    sample_id: Annotated[int | tuple[int, ...], FieldSpec(torch.int64, per_token=False, on_host=True)] = 0
    """Of the sample in the step; ties it to its rows in the rollout records."""
    sequence: Annotated[int | Tensor, FieldSpec(torch.int64, per_token=False)] = 0
    """Number among the sample's sequences; number 0 is always there."""
    first_sequence: Annotated[int | Tensor, FieldSpec(torch.int64, per_token=False)] = 0
    """Number of the first sequence of its agent, which is always there, too; 0 without agents."""
    tokens_elsewhere: Annotated[int | Tensor, FieldSpec(torch.int64, per_token=False)] = 0
    """Tokens that the policy wrote in the sample's (of its agents: this one's) other sequences, wherever these are."""
    truncated: Annotated[bool | Tensor, FieldSpec(torch.bool, per_token=False)] = False
    """The sequence was cut at its length limit."""
    turn: Annotated[Tensor | None, FieldSpec(torch.int64, padding=-1)] = None
    """[L] int64: the turn's index in `TurnRewards`, -1 where the policy did not write; None without them."""

    @property
    def length(self) -> int:
        """Number of tokens, prompt included."""
        return self.token_ids.numel()


SAMPLE_FIELDS = {name: hint.__metadata__[0] for name, hint in get_type_hints(Sample, include_extras=True).items()}


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The places of the B sequences of a micro-batch; the last ones may be dummies that round T up."""

    lengths: tuple[int, ...]
    """Host integers, so that no kernel launch waits for the device."""
    cu_seqlens: Tensor
    """[B+1] int32."""
    position_ids: Tensor
    """[T] int64, restarts at 0 for every sequence."""
    sequence_index: Tensor
    """[T] int64, the sequence of each token; every sequence is whole."""
    share: Share | None = None
    """The tokens that this rank runs through the model; None: all. Each context-parallel rank has the whole batch."""


@dataclass(frozen=True)
class CriticValues:
    """A critic's values and returns before the step's updates."""

    values: Tensor
    """[T], before the token was drawn."""
    end_values: Tensor | None = None
    """[B], after the last token of each sequence."""
    returns: Tensor | None = None
    """[T], what the values are trained towards."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The inputs of a loss or a correction. Masked positions may hold anything, NaN included."""

    packing: Packing
    loss_mask: Tensor
    """[T] fp32, 1 where the policy wrote the token."""
    inference_logprobs: Tensor
    """[T], of the engine that drew the tokens; 0 where ``loss_mask`` is 0."""
    old_logprobs: Tensor | None = None
    """[T] of the trainer's model before the step's updates. None in the first update: the current ones."""
    current_logprobs: Tensor | None = None
    """[T] of the model being trained; the gradient flows into them."""
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
        # In fp64: on a GPU index_add has no fixed order but in --deterministic-mode, and two runs would differ in fp32.
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
    """Sequences laid end to end (``thd``): one micro-batch. All tensors share one device.

    Two samples ``P0 A0 E`` with reward 1 and ``Q0 B0`` with reward 0.5, rounded up to 8 tokens::

        samples.token_ids        P0 A0  E  Q0 B0  -  -  -
        packing.position_ids      0  1  2   0  1  0  1  2
        packing.cu_seqlens        0         3     5        8
        packing.sequence_index    0  0  0   1  1  2  2  2
        loss_mask                 0  1  1   0  1  0  0  0
        rewards                   0  0  1   0  .5 0  0  0

    Collation fills what has no default, the forward pass of an update the current log-probs and their entropy, and
    scoring the rest where it is needed.
    """

    samples: Sample
    """End to end. A harness's sample may have sequences in other micro-batches or on other ranks of the same update."""
    rewards: Tensor
    """[T] fp32: a sequence's reward at its last loss token, 0 elsewhere."""
    step: StepRewards | None = None
    ref_logprobs: Tensor | None = None
    """[T] of the reference; None without a KL penalty."""
    teacher_logprobs: Tensor | None = None
    """[T] of the teacher; None without one."""
    critic: CriticValues | None = None
    advantage_sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Of the advantages, for the metrics."""
    picked: Tensor | None = None
    """[T] bool: the tokens of the update that a loss of `covariance.TokenSelection` treats otherwise; else None."""
    entropy: Tensor | None = None
    """[T], nats, of the distribution the token was drawn from."""

    @property
    def is_counted_here(self) -> bool:
        """True on the context-parallel rank that counts the denominator: all ranks know the whole loss."""
        return self.packing.share is None or self.packing.share.rank == 0

    @property
    def values(self) -> Tensor:
        """The critic's values, [T]."""
        return self.critic.values

    @property
    def rows(self) -> Sequence[int]:
        """The index in ``step`` of each sequence; dummies are left out."""
        ids, agents = self.samples.sample_id, self.step and self.step.agents
        return ids if agents is None else agents.rows(ids, self.samples.first_sequence.tolist())

    @property
    def versions(self) -> Tensor:
        """See `Sample.versions`, [T]."""
        return self.samples.versions

    @property
    def lag(self) -> Tensor:
        """Staleness, [T] int64: steps between the policy that drew the token and that at the beginning of ``step``."""
        return torch.zeros_like(self.versions) if self.step is None else self.step.policy_version - self.versions

    def of_samples(self, values: Tensor) -> Tensor:
        """Give each token the value of its sample: [N] on the CPU -> [T] fp32 on the batch's device.

        Where ``step`` is of turns, the value of its turn; 0 where the policy did not write.
        """
        if isinstance(self.step, TurnRewards):
            if self.samples.turn is None:  # a batch without loss
                return torch.zeros_like(self.loss_mask)
            return torch.cat([values.float(), torch.zeros(1)]).to(self.loss_mask.device)[self.samples.turn]
        own = values[torch.tensor(self.rows, dtype=torch.int64)].float()
        own = torch.cat([own, own.new_zeros(len(self.packing.lengths) - own.numel())])
        return own.to(self.sequence_index.device)[self.sequence_index]

    def sample_tokens(self) -> Tensor:
        """Count the loss tokens of each sequence's sample, in all its sequences: [B] int64.

        What `trusted_mask` left out of other sequences, which may be in another micro-batch, is still counted.
        """
        return self.loss_tokens() + self.samples.tokens_elsewhere


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return ``log(numerator / denominator)`` of each token, within ``LOG_RATIO_LIMIT``, 0 at masked positions.

    All [T]. Masked positions may hold NaN: neither value nor gradient passes.
    """
    difference = numerator_logprobs.float() - denominator_logprobs.float()
    return torch.where(loss_mask > 0, difference, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_weights(kind: Aggregation, batch: TokenBatch, constant: float) -> tuple[Tensor, Tensor]:
    """Return the weights of the tokens and the denominator of their sum.

    The trainer sums ``per_token * weights`` and the denominators over all micro-batches and data-parallel ranks of an
    update and divides once, so two micro-batches equal one.

    =================  ===============================  ==========================================
    kind               weight of a loss token           denominator
    =================  ===============================  ==========================================
    ``token-mean``     1                                number of loss tokens
    ``sequence-mean``  1 / loss tokens of its sample    number of samples with loss tokens
    ``constant``       1 / constant (Dr. GRPO)          number of samples with loss tokens
    =================  ===============================  ==========================================

    A sample of several sequences has the weight of one: all its tokens count, and its first sequence counts it in the
    denominator. Of several agents each one's part is a sample here.

    Args:
        kind: the reduction.
        batch: its mask is that after ``trusted_mask`` and before any rejection by a mismatch correction.
        constant: tokens, positive; Dr. GRPO (arXiv 2503.20783) takes the length limit of completions.

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
    """Reduce each of an extension's sums to [] fp64, detached; the largest of a name that ends in ``_max``."""
    values = {name: value.detach().double() for name, value in sums.items()}
    return {name: value.max() if name.endswith("_max") else value.sum() for name, value in values.items()}


def trusted_mask(loss_mask: Tensor, *logprobs: Tensor | None) -> Tensor:
    """Return [T] fp32: ``loss_mask`` without the tokens that have a non-finite log-prob, which leave every denominator.

    Set to 0 instead, such a token would count as one the policy was certain of.
    """
    trusted = loss_mask > 0
    for values in logprobs:
        trusted = trusted if values is None else trusted & values.detach().isfinite()
    return trusted.float()
