"""Large models on 8 to 512 GPUs, on paper: which layout for which model, and what bounds it. Nothing is measured.

    python tools/benchmark/scaling.py      prints the tables of docs/measurements/on_paper.md

Assumed, beside the numbers of the machines below:

- Rollouts: 8-bit copies of all linears and a bf16 KV cache with room for whole contexts; the linears' bf16 weights and
  the gradients are given up meanwhile, the optimizer's state stays. Prompts are short and cost nothing; lengths of
  answers are spread evenly from 0 to the context. A decode step reads every weight (of the experts those that some row
  chose, each as likely) and the cache once.
- Pipeline stages in rollouts: as many lanes of rows as stages, each in another stage at a time.
- Experts lie whole on a rank (expert tensor parallelism 1); expert groups are neighbours, over tensor-parallel groups.
- Updates: one a step, so no old log-probs are computed; no reference; all layers are recomputed; bins are full.
  Communication does not overlap with products.
- Context-parallel ranks share the sequences of an update, and are replicas of their own in rollouts.
- Grading, packing, the optimizer's step and quantising take no time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.benchmark.on_paper.seconds import Machine, rollout_parts, update_parts
from tools.benchmark.on_paper.sizes import Layout, Memory, Model, memory

H100 = Machine(
    name="H100",
    memory=74e9,  # 80 GB less 6 for the context, communication buffers and fragmentation
    bandwidth=0.84 * 3.35e12,  # of the peak
    matmul=0.6 * 989e12,
    grouped_matmul=0.4 * 989e12,
    matmul_8bit=0.45 * 1979e12,
    node=8,
    link=300e9,  # of 450 each way
    network=40e9,  # a card of 400 Gbit/s for each GPU
    reduce_latency=15e-6,
    exchange_latency=20e-6,
    exchange_latency_nodes=60e-6,
    hop_latency=30e-6,
    layer_kernels=25e-6,  # in a CUDA graph
    expert_layer_kernels=40e-6,
    head_kernels=60e-6,
    burst=8,
    unevenness=1.2,
)
H200 = dataclasses.replace(H100, name="H200", memory=135e9, bandwidth=0.84 * 4.8e12)
MACHINES = (H100, H200)

FLAGS = {
    "Qwen2.5-32B":
        "--num-layers 64 --hidden-size 5120 --ffn-hidden-size 27648 --num-attention-heads 40 --num-query-groups 8 "
        "--add-qkv-bias",
    "Qwen3-30B-A3B":
        "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --num-query-groups 4 "
        "--kv-channels 128 --qk-layernorm --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8",
    "Qwen3-235B-A22B":
        "--num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 --num-query-groups 4 "
        "--kv-channels 128 --qk-layernorm --num-experts 128 --moe-ffn-hidden-size 1536 --moe-router-topk 8",
}  # fmt: skip
QWEN_32B = Model.of("Qwen2.5-32B", FLAGS["Qwen2.5-32B"], 152064)
QWEN_30B_A3B = Model.of("Qwen3-30B-A3B", FLAGS["Qwen3-30B-A3B"], 151936)
QWEN_235B_A22B = Model.of("Qwen3-235B-A22B", FLAGS["Qwen3-235B-A22B"], 151936)
MODELS = (QWEN_32B, QWEN_30B_A3B, QWEN_235B_A22B)
COMPARED = (
    (QWEN_32B, 64, ((8, 1, 1, 1), (4, 1, 1, 1), (2, 1, 1, 1), (4, 2, 1, 1), (8, 2, 1, 1), (8, 8, 1, 1), (8, 1, 1, 2))),
    (QWEN_30B_A3B, 64, ((1, 1, 8, 1), (1, 1, 4, 1), (4, 1, 4, 1), (8, 1, 8, 1), (1, 1, 16, 1), (1, 1, 64, 1),
                        (1, 1, 8, 2), (1, 4, 1, 1), (1, 2, 8, 1))),
    (QWEN_30B_A3B, 256, ((1, 1, 8, 1), (4, 1, 4, 1), (1, 4, 1, 1))),
    (QWEN_235B_A22B, 128, ((4, 4, 8, 2), (4, 4, 8, 1), (8, 4, 8, 1), (4, 8, 8, 1), (8, 8, 8, 1), (8, 2, 8, 1),
                           (8, 1, 64, 1), (4, 4, 16, 2))),
)  # fmt: skip
"""Layouts that `side_by_side` compares: tensor, pipeline, expert and context parallel."""
GPUS = (8, 16, 32, 64, 128, 256, 512)
BIN = 16384
"""Tokens of a micro-batch, or one whole context if that is longer."""
LEAST_ROWS = 8
"""Sequences that a GPU's memory must hold at once; with fewer, prefill and waiting would be most of a rollout."""


@dataclass(frozen=True)
class Plan:
    """A step of one layout: a rollout and an update of the same samples."""

    layout: Layout
    memory: Memory
    rows: int
    """Sequences of a replica that are decoded at once."""
    rollout: dict[str, float]
    update: dict[str, float]
    """Seconds by what they are spent on."""
    tokens: float
    """Of all samples."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.rollout.values()) + sum(self.update.values())


def plan(model: Model, layout: Layout, machine: Machine, samples: int, context: int) -> Plan | str:
    """Or why there is none."""
    tokens = max(BIN, context)
    needs = memory(model, layout, context, tokens)
    if needs.training > machine.memory:
        return f"does not fit: an update takes {needs.training / 1e9:.0f} GB"
    mine = -(-samples // layout.rollout_replicas)
    rows = min(mine, max(0, int((machine.memory - needs.rollout(0)) / needs.row)))
    if rows < min(mine, LEAST_ROWS):
        return f"does not fit: {rows} sequences beside {needs.rollout(0) / 1e9:.0f} GB in a rollout"
    if layout.rollout_replicas > samples or mine < layout.pipeline:
        return "more replicas or lanes than samples"
    return Plan(
        layout, needs, rows, rollout_parts(model, layout, machine, mine, context, rows),
        update_parts(model, layout, machine, samples, context, tokens), samples * context / 2,
    )  # fmt: skip


def layouts(model: Model, machine: Machine, gpus: int) -> Iterator[Layout]:
    """All that divide evenly, tensor-parallel groups within a node and at most 16 stages."""
    powers = [2**power for power in range(7)]
    for tensor in (size for size in powers if size <= machine.node):
        for pipeline in (size for size in powers if size <= 16):
            for context in (size for size in powers if size <= 8):
                for expert in powers if model.experts else [1]:
                    spans_tensor_groups = not model.experts or expert % tensor == 0
                    of_training, of_experts = tensor * pipeline * context, pipeline * expert
                    if spans_tensor_groups and gpus % of_training == 0 and gpus % of_experts == 0:
                        yield Layout(gpus, tensor, pipeline, expert, context)


def plans(model: Model, machine: Machine, gpus: int, samples: int, context: int) -> list[Plan]:
    """Of all layouts that fit, the quickest step first."""
    found = [plan(model, layout, machine, samples, context) for layout in layouts(model, machine, gpus)]
    return sorted((one for one in found if isinstance(one, Plan)), key=lambda one: one.seconds)


def advised(found: Sequence[Plan]) -> Plan:
    """The simplest of those within 5 % of the quickest: what ranks cost that wait for each other is not all counted."""
    close = [one for one in found if one.seconds <= 1.05 * found[0].seconds]
    return min(close, key=lambda one: (one.layout.spread, one.seconds))


# -- tables ------------------------------------------------------------------------------------------------------------
_FIGURES = ("tokens/s rollout", "update", "step s", "GB rollout", "update", "rollout bound by", "update bound by")


def _figures(one: Plan) -> tuple[str, ...]:
    rollout, update = sum(one.rollout.values()), sum(one.update.values())
    return (
        f"{one.tokens / rollout / 1e3:,.0f}k", f"{one.tokens / update / 1e3:,.0f}k", f"{one.seconds:,.0f}",
        f"{one.memory.rollout(one.rows) / 1e9:.0f}", f"{one.memory.training / 1e9:.0f}",
        *(f"{name} {seconds / sum(parts.values()):.0%}" for parts in (one.rollout, one.update)
          for name, seconds in [max(parts.items(), key=lambda part: part[1])]),
    )  # fmt: skip


def _markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _best(model: Model, machine: Machine, gpus: int, samples: int, context: int) -> Sequence[str]:
    found = plans(model, machine, gpus, samples, context)
    if not found:
        return ["nothing fits", *["-"] * len(_FIGURES)]
    return [str(advised(found).layout), *_figures(advised(found))]


def by_size(model: Model, context: int = 16384, samples: int = 1024) -> str:
    """The layout to take on 8 to 512 GPUs, the samples of a step fixed."""
    rows = [
        [machine.name, str(gpus), *_best(model, machine, gpus, samples, context)]
        for machine in MACHINES
        for gpus in GPUS
    ]
    title = f"{model.name}, {context // 1024}k, {samples} samples a step"
    return _markdown(title, ("GPU", "GPUs", "layout", *_FIGURES), rows)


def by_context(gpus: int = 128, samples: int = 1024) -> str:
    """How long the answers may become decides, too."""
    rows = [
        [model.name, machine.name, f"{context // 1024}k", *_best(model, machine, gpus, samples, context)]
        for model in MODELS
        for machine in MACHINES
        for context in (4096, 16384, 32768)
    ]
    return _markdown(f"{gpus} GPUs, {samples} samples a step", ("model", "GPU", "context", "layout", *_FIGURES), rows)


def by_samples(context: int = 16384, a_gpu: int = 16) -> str:
    """With more GPUs more samples: what is lost to a fixed number of them."""
    rows = [
        [model.name, str(gpus), str(a_gpu * gpus), *_best(model, H100, gpus, a_gpu * gpus, context)]
        for model in MODELS
        for gpus in GPUS
        if plans(model, H100, gpus, a_gpu * gpus, context)
    ]
    title = f"H100, {context // 1024}k, {a_gpu} samples a GPU"
    return _markdown(title, ("model", "GPUs", "samples", "layout", *_FIGURES), rows)


def side_by_side(context: int = 16384, samples: int = 1024) -> str:
    """What other layouts would cost."""
    rows = []
    for model, gpus, sizes in COMPARED:
        for tensor, pipeline, expert, in_context in sizes:
            layout = Layout(gpus, tensor, pipeline, expert, in_context)
            one = plan(model, layout, H100, samples, context)
            figures = _figures(one) if isinstance(one, Plan) else (one, *["-"] * (len(_FIGURES) - 1))
            rows.append([model.name, str(gpus), str(layout), *figures])
    title = f"H100, other layouts, {context // 1024}k, {samples} samples a step"
    return _markdown(title, ("model", "GPUs", "layout", *_FIGURES), rows)


def tables() -> str:
    """Return the tables of docs/measurements/on_paper.md, from which a test knows when it is out of date."""
    return "\n\n".join(by_size(model) for model in MODELS)


if __name__ == "__main__":
    print("\n\n".join([tables(), by_context(), side_by_side(), by_samples()]))
