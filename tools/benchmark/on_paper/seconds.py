"""Seconds of decode steps, rollouts and updates, by what they are spent on, for `tools/benchmark/scaling.py`.

Its docstring has the assumptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tools.benchmark.on_paper.sizes import Layout, Model, expert_replicas, numbers_of_a_rank


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU in a node of several. Rates are those that kernels reach, not peaks; see `scaling.py` for the values."""

    name: str
    memory: float
    """Bytes that tensors may take."""
    bandwidth: float
    """Bytes/s of the GPU's memory."""
    matmul: float
    """FLOP/s of dense bf16 products in updates."""
    grouped_matmul: float
    """FLOP/s of the experts' grouped bf16 products in updates."""
    matmul_8bit: float
    """FLOP/s of 8-bit products in decode steps."""
    node: int
    """GPUs of a node."""
    link: float
    """Bytes/s of one GPU to others of its node."""
    network: float
    """Bytes/s of one GPU to other nodes."""
    reduce_latency: float
    """Seconds of an all-reduce within a node, however small."""
    exchange_latency: float
    exchange_latency_nodes: float
    """Seconds of an all-gather or a reduce-scatter of the experts in decode steps, within a node and between nodes."""
    hop_latency: float
    """Seconds for hidden states to reach the next pipeline stage."""
    layer_kernels: float
    expert_layer_kernels: float
    """Seconds of a layer in a decode step beside reading and multiplying."""
    head_kernels: float
    """The same for the head and drawing a token."""
    burst: int
    """Decode steps between two looks of the scheduler, after which a pipeline drains and fills again."""
    unevenness: float
    """Tokens of the busiest expert rank over the mean, in updates."""


# -- rollouts ----------------------------------------------------------------------------------------------------------
def experts_hit(model: Model, rows: float) -> float:
    """Experts of a layer that at least one of ``rows`` tokens chose, each expert as likely as any other."""
    return model.experts * (1 - (1 - model.active / model.experts) ** rows)


def decode_layer_parts(
    model: Model, layout: Layout, machine: Machine, rows: float, cached: float, kv_bytes: int = 2
) -> dict[str, float]:
    """Seconds of one layer in a decode step of ``rows`` rows of a tensor-parallel group with ``cached`` tokens each."""
    tensor, expert = layout.tensor, layout.expert
    weights = (model.attention + model.dense) / tensor
    products = 2 * rows * (model.attention + model.dense) / tensor
    if model.experts:
        together = rows * layout.attention_groups
        weights += experts_hit(model, together) * model.expert / expert
        products += 2 * together * model.active * model.expert / expert
    read = {"weights": weights / machine.bandwidth,
            "KV cache": rows * cached * model.cache_numbers(tensor) * kv_bytes / machine.bandwidth}  # fmt: skip
    beyond = max(0.0, products / machine.matmul_8bit - sum(read.values()))
    kernels = machine.expert_layer_kernels if model.experts else machine.layer_kernels
    exchange = _decode_exchange(model, layout, machine, rows)
    return {**read, "products": beyond, "kernels": kernels, "communication": exchange}


def _decode_exchange(model: Model, layout: Layout, machine: Machine, rows: float) -> float:
    """A tensor-parallel all-reduce after attention and MLP; experts gather the others' rows and scatter the results."""
    hidden = rows * model.hidden * 2
    one = machine.reduce_latency + 2 * ring_seconds(hidden, layout.tensor, 1, machine) if layout.tensor > 1 else 0.0
    if layout.attention_groups == 1:
        return 2 * one
    is_near = layout.expert <= machine.node
    latency = machine.exchange_latency if is_near else machine.exchange_latency_nodes
    moved = hidden * (layout.attention_groups - 1)
    return one + 2 * (latency + moved / (machine.link if is_near else machine.network))


def step_parts(
    model: Model, layout: Layout, machine: Machine, rows: float, cached: float, kv_bytes: int = 2
) -> dict[str, float]:
    """Seconds of one token for each of a replica's ``rows``, by what they are spent on.

    With P stages the rows are P lanes; while each lane passes one stage, another is in the next, so a token takes P
    times a lane's time in a stage. In P lanes and bursts of k steps, P - 1 of P k + P - 1 ticks are idle.
    """
    stages = layout.pipeline
    lane = rows / stages
    parts = {
        name: model.layers * seconds
        for name, seconds in decode_layer_parts(model, layout, machine, lane, cached, kv_bytes).items()
    }
    parts["weights"] += model.head * 2 / layout.tensor / machine.bandwidth
    parts["kernels"] += machine.head_kernels
    if stages > 1:
        parts["communication"] += stages * (machine.hop_latency + lane * model.hidden * 2 / machine.network)
        idle = bubble(stages, stages * machine.burst)
        parts["bubble"] = sum(parts.values()) * idle / (1 - idle)
    return parts


def bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Share of time that a stage waits while the pipeline fills and drains: (P - 1) / (v m + P - 1)."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def rollout_parts(
    model: Model, layout: Layout, machine: Machine, samples: int, context: int, most_rows: int
) -> dict[str, float]:
    """Seconds of a rollout of ``samples`` a replica, ``most_rows`` at once, lengths even from 0 to ``context``.

    While others wait all rows are taken, and a row has context / 3 tokens in the mean (long ones are there longer).
    Then rows end one by one; that is added up in 16 pieces.
    """
    pieces, total = 16, dict[str, float]()
    rows = min(samples, most_rows)
    spans = [((samples - rows) * context / 2 / rows, rows, context / 3)]
    for piece in range(pieces):
        share = (piece + 0.5) / pieces
        spans.append((context / pieces, max(layout.pipeline, rows * (1 - share)), share * context))
    for steps, alive, cached in spans:
        for name, seconds in step_parts(model, layout, machine, alive, cached).items():
            total[name] = total.get(name, 0.0) + steps * seconds
    return total


# -- updates -----------------------------------------------------------------------------------------------------------
def forward_flops(model: Model, length: float) -> tuple[float, float]:
    """A token's of a sequence of ``length``: of dense products with causal attention and head, and of experts.

    A number costs 2. A query meets length / 2 keys and as many values in the mean, 2 a number: 2 q length a layer.
    """
    experts = 2 * model.layers * model.active * model.expert
    dense = 2 * model.active_numbers - experts + 2 * model.layers * model.query * length
    return dense, experts


def all_to_all_bytes(model: Model, layout: Layout, tokens: float) -> float:
    """That a rank sends in one layer's dispatch for ``tokens`` of its bin: k copies of each of its own, bf16.

    Tensor-parallel ranks have a part of the tokens each; one of E copies stays.
    """
    return tokens / layout.tensor * model.active * model.hidden * 2 * (layout.expert - 1) / layout.expert


def micro_batch_parts(model: Model, layout: Layout, machine: Machine, tokens: float, length: float) -> dict[str, float]:
    """Seconds of a stage for one bin, ``tokens`` on each context-parallel rank: forward, again, and backward.

    Backward costs the products of two forward passes and the communication of one; keys and values are gathered in all
    three passes, and their gradients scattered.
    """
    layers = model.layers / layout.pipeline
    dense, experts = forward_flops(model, length)
    share = tokens / (layout.tensor * layout.pipeline)
    parts = {
        "products": 4 * share * dense / machine.matmul,
        "experts": 4 * share * experts * (machine.unevenness if layout.expert > 1 else 1.0) / machine.grouped_matmul,
    }
    hidden = tokens * model.hidden * 2
    blocks = 1 if model.experts else 2  # attention, and an MLP that is cut over the tensor-parallel ranks
    gathered = 3 * 2 * blocks * ring_seconds(hidden, layout.tensor, 1, machine)
    exchanged = _spread_seconds(all_to_all_bytes(model, layout, tokens), layout.expert, machine)
    keys = tokens * layout.context * model.cache_numbers(layout.tensor) * 2
    keys_gathered = ring_seconds(keys, layout.context, layout.tensor, machine)
    parts["communication"] = layers * (gathered + 3 * 2 * exchanged * machine.unevenness + 4 * keys_gathered)
    if layout.pipeline > 1:
        parts["communication"] += 2 * hidden / layout.tensor / machine.network
    return parts


def _spread_seconds(sent: float, ranks: int, machine: Machine) -> float:
    """Bytes sent evenly to all other ``ranks`` of a group of neighbours: those of other nodes go by the network."""
    if ranks == 1:
        return 0.0
    outside = max(0, ranks - machine.node) / (ranks - 1)
    return sent * max((1 - outside) / machine.link, outside / machine.network)


def update_parts(
    model: Model, layout: Layout, machine: Machine, samples: int, context: int, tokens: int
) -> dict[str, float]:
    """Seconds of an update of all replicas' ``samples`` in bins of ``tokens``, lengths even from 0 to ``context``.

    The mean is context / 2, but the mean token is of a sequence of 2/3 of the context.
    """
    bins = max(1, math.ceil(samples * context / 2 / layout.replicas / tokens))
    parts = {
        name: bins * seconds
        for name, seconds in micro_batch_parts(model, layout, machine, tokens / layout.context, context * 2 / 3).items()
    }
    idle = bubble(layout.pipeline, bins)
    parts["bubble"] = sum(parts.values()) * idle / (1 - idle)
    parts["gradients, parameters"] = replica_seconds(model, layout, machine)
    return parts


def replica_seconds(model: Model, layout: Layout, machine: Machine) -> float:
    """fp32 gradients scattered, bf16 parameters gathered after the update and again for what rollouts gave up."""
    dense, experts = numbers_of_a_rank(model, layout)
    replicas = layout.replicas * layout.context
    bytes_a_number = 4 + 2 + 2
    return ring_seconds(dense * bytes_a_number, replicas, layout.tensor, machine) + ring_seconds(
        experts * bytes_a_number, expert_replicas(layout), max(layout.expert, layout.tensor), machine
    )


def ring_seconds(size: float, ranks: int, apart: int, machine: Machine) -> float:
    """An all-gather or a reduce-scatter of ``size`` bytes in all over ``ranks`` ranks, every ``apart``-th one.

    What leaves a node leaves it once, over the network cards of all its ranks in the group.
    """
    inside = max(1, machine.node // apart)
    rate = machine.link if ranks <= inside else min(machine.link, inside * machine.network)
    return size * (ranks - 1) / ranks / rate
