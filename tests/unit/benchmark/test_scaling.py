"""The arithmetic of docs/measurements/on_paper.md by hand, and against the estimate of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.run.memory.estimate import estimate
from tools.benchmark import scaling
from tools.benchmark.on_gpu import shapes
from tools.benchmark.on_paper import decode, training
from tools.benchmark.on_paper.seconds import (
    Machine,
    all_to_all_bytes,
    bubble,
    decode_layer_parts,
    experts_hit,
    forward_flops,
    micro_batch_parts,
    replica_seconds,
    ring_seconds,
    rollout_parts,
    step_parts,
    update_parts,
)
from tools.benchmark.on_paper.sizes import Layout, Model, memory

PAPER = (Path(__file__).parents[3] / "docs" / "measurements" / "on_paper.md").read_text(encoding="utf-8")
DENSE = Model("dense", layers=4, hidden=8, query=8, groups=2, group_width=4, attention=100, dense=300, expert=0,
              experts=0, active=0, head=160, has_head_norms=False)  # fmt: skip
MOE = dataclasses.replace(DENSE, name="moe", dense=0, expert=48, experts=8, active=2)
PLAIN = Machine(
    name="plain", memory=1e6, bandwidth=100.0, matmul=1000.0, grouped_matmul=500.0, matmul_8bit=1e9, node=8, link=10.0,
    network=2.0, reduce_latency=3.0, exchange_latency=5.0, exchange_latency_nodes=7.0, hop_latency=11.0,
    layer_kernels=0.5, expert_layer_kernels=0.25, head_kernels=1.5, burst=4, unevenness=1.5,
)  # fmt: skip
"""Rates that one can divide by in the head."""


def test_sizes_of_the_models() -> None:
    """Qwen2.5-32B: qkv 5120 x (40 + 2 x 8) x 128 and proj 5120 x 5120; gate, up and down 3 x 5120 x 27648."""
    dense, moe, large = scaling.MODELS
    assert (dense.attention, dense.dense, dense.head) == (62_914_560, 424_673_280, 778_567_680)
    # qkv 2048 x (32 + 2 x 4) x 128 and proj 4096 x 2048; an expert 3 x 2048 x 768
    assert (moe.attention, moe.dense, moe.expert, moe.active) == (18_874_368, 0, 4_718_592, 8)
    assert moe.active_numbers == 48 * (18_874_368 + 8 * 4_718_592) + 2048 * 151_936
    assert (large.attention, large.expert, large.query, large.groups) == (71_303_168, 18_874_368, 8192, 4)
    for model, published in ((dense, 32.76e9), (moe, 30.53e9), (large, 235.09e9)):
        assert model.layers * (model.attention + model.dense + model.experts * model.expert) + 2 * model.head == (
            pytest.approx(published, rel=1e-3)
        )


def test_a_decode_step_by_hand() -> None:
    """TP2, 6 rows with 10 tokens each: a rank has half the weights and one of the two groups."""
    parts = decode_layer_parts(DENSE, Layout(2, tensor=2), PLAIN, rows=6, cached=10)
    # 8-bit weights; cache 6 x 10 x 4 numbers of 2 bytes; two all-reduces of 6 x 8 x 2 bytes, half of it each way twice
    assert parts == {
        "weights": 400 / 2 / 100, "KV cache": 480 / 100, "products": 0.0, "kernels": 0.5,
        "communication": 2 * (3 + 2 * 96 * 0.5 / 10),
    }  # fmt: skip
    bound = decode_layer_parts(DENSE, Layout(2, tensor=2), dataclasses.replace(PLAIN, matmul_8bit=100.0), 6, 10)
    assert bound["products"] == pytest.approx(2 * 6 * 200 / 100 - 2 - 4.8), "what reading does not hide"
    step = step_parts(DENSE, Layout(2, tensor=2), PLAIN, rows=6, cached=10)
    assert step["weights"] == pytest.approx(4 * 2 + 160 * 2 / 2 / 100)
    assert step["kernels"] == 4 * 0.5 + 1.5


def test_lanes_pay_their_hops_and_the_drained_bursts() -> None:
    one = step_parts(DENSE, Layout(1), PLAIN, rows=3, cached=10)
    two = step_parts(DENSE, Layout(2, pipeline=2), PLAIN, rows=6, cached=10)
    assert two["weights"] == one["weights"], "2 lanes of 3 rows, each read by half the layers: as one rank with 3 rows"
    assert two["communication"] == 2 * (11 + 3 * 8 * 2 / 2)
    busy = sum(one.values()) + two["communication"]
    assert two["bubble"] == pytest.approx(busy * (1 / 9) / (8 / 9)), "1 of 2 x 4 + 1 ticks"


def test_experts_in_a_decode_step_by_hand() -> None:
    assert experts_hit(MOE, 1) == pytest.approx(2)
    assert experts_hit(MOE, 2) == pytest.approx(8 * (1 - 0.75**2))
    parts = decode_layer_parts(MOE, Layout(4, expert=4), PLAIN, rows=2, cached=0)
    assert parts["weights"] == pytest.approx((100 + 8 * (1 - 0.75**8) * 48 / 4) / 100), "8 rows meet on 4 ranks"
    assert parts["communication"] == pytest.approx(2 * (5 + 3 * 2 * 8 * 2 / 10)), "three others' rows there and back"
    far = decode_layer_parts(MOE, Layout(16, expert=16), PLAIN, rows=2, cached=0)
    assert far["communication"] == pytest.approx(2 * (7 + 15 * 2 * 8 * 2 / 2))
    together = decode_layer_parts(MOE, Layout(4, tensor=4, expert=4), PLAIN, rows=2, cached=0)
    assert together["communication"] == pytest.approx(2 * (3 + 2 * 32 * 0.75 / 10)), "the same rows: two all-reduces"


def test_products_by_hand() -> None:
    dense, experts = forward_flops(MOE, length=6)
    assert experts == 2 * 4 * 2 * 48
    assert dense == 2 * (4 * 100 + 160) + 2 * 4 * 8 * 6
    model = scaling.QWEN_32B
    assert 500 * sum(forward_flops(model, 500)) == shapes.forward_flops(shapes.LARGE, [500], head=True)


def test_communication_by_hand() -> None:
    assert [bubble(4, 8), bubble(1, 8), bubble(4, 8, chunks=2)] == [3 / 11, 0, 3 / 19]
    # 16 tokens, half of them on each of two tensor-parallel ranks; two copies of 8 numbers; 3 of 4 leave
    assert all_to_all_bytes(MOE, Layout(8, tensor=2, expert=4), 16) == 8 * 2 * 8 * 2 * 3 / 4
    assert ring_seconds(800, 8, 1, PLAIN) == 700 / 10
    assert ring_seconds(800, 16, 1, PLAIN) == 750 / 10, "eight cards a node are quicker than the links"
    assert ring_seconds(800, 16, 8, PLAIN) == 750 / 2, "one rank a node has one card"
    assert ring_seconds(800, 1, 8, PLAIN) == 0
    # 16 ranks, TP2: 4 layers of 200 numbers and two ends of 80; 8 bytes each over 8 ranks, four of a node
    assert replica_seconds(DENSE, Layout(16, tensor=2), PLAIN) == pytest.approx(8 * 960 * 7 / 8 / 8)


def test_a_micro_batch_by_hand() -> None:
    """EP2 x CP2 x TP1: 10 tokens on a rank."""
    parts = micro_batch_parts(MOE, Layout(4, expert=2, context=2), PLAIN, tokens=10, length=6)
    dense, experts = forward_flops(MOE, 6)
    assert parts["products"] == 4 * 10 * dense / 1000
    assert parts["experts"] == 4 * 10 * experts * 1.5 / 500
    sent = 10 * 2 * 8 * 2 / 2 / 10
    keys = 20 * 8 * 2 / 2 / 10
    assert parts["communication"] == pytest.approx(4 * (6 * sent * 1.5 + 4 * keys))
    cut = micro_batch_parts(DENSE, Layout(4, tensor=2, pipeline=2), PLAIN, tokens=10, length=6)
    gathered = 3 * 2 * 2 * 160 / 2 / 10
    assert cut["communication"] == pytest.approx(2 * gathered + 2 * 160 / 2 / 2)


def test_a_rollout_and_an_update_by_hand() -> None:
    """Without a cache and with one row's costs alone a step is as long with one row as with all."""
    free = dataclasses.replace(DENSE, group_width=0)
    step = sum(step_parts(free, Layout(1), PLAIN, 4, 0).values())
    assert sum(rollout_parts(free, Layout(1), PLAIN, 4, 100, 4).values()) == pytest.approx(100 * step)
    # 12 samples, 4 at once: the 8 others take 8 x 50 / 4 steps before the last 4 drain
    assert sum(rollout_parts(free, Layout(1), PLAIN, 12, 100, 4).values()) == pytest.approx(200 * step)
    update = update_parts(DENSE, Layout(4, pipeline=2), PLAIN, samples=8, context=30, tokens=20)
    one = micro_batch_parts(DENSE, Layout(4, pipeline=2), PLAIN, 20, 20)
    # 8 x 15 tokens on two replicas are 60 each, 3 bins
    assert update["products"] == 3 * one["products"]
    assert update["bubble"] == pytest.approx(sum(one.values()) * 3 * (1 / 4) / (3 / 4))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (scaling.QWEN_32B, Layout(16, tensor=8)),
        (scaling.QWEN_32B, Layout(16, tensor=4, pipeline=2)),
        (scaling.QWEN_30B_A3B, Layout(8)),
        (scaling.QWEN_30B_A3B, Layout(8, pipeline=4)),
    ],
    ids=["32B TP8", "32B TP4 PP2", "30B-A3B", "30B-A3B PP4"],
)
def test_memory_is_the_estimates(model: Model, layout: Layout) -> None:
    """Biases, norms, routers, scales and a buffer's padding are left out here: less than a hundredth."""
    flags = {
        "tensor-model-parallel-size": layout.tensor, "pipeline-model-parallel-size": layout.pipeline,
        "seq-length": 16384, "rl-sequence-packing-bin-size": 16384, "inference-max-batch-size": 3,
        "grpo-prompts-per-step": 64, "grpo-group-size": 16, "recompute-granularity": "full",
        "recompute-method": "uniform", "recompute-num-layers": 1,
    }  # fmt: skip
    switches = ("estimate", "perform-rl-step", "swiglu", "bf16", "disable-bias-linear", "group-query-attention",
                "sequence-parallel", "use-distributed-optimizer", "accumulate-allreduce-grads-in-fp32",
                "untie-embeddings-and-output-weights")  # fmt: skip
    shape = scaling.FLAGS[model.name].split()
    words = [*shape, *(f"--{name}={value}" for name, value in flags.items()), *(f"--{name}" for name in switches)]
    config, _ = read_config([*words, "--rl-rollout-quantization=fp8"], layout.gpus)
    vocabulary = model.head // model.hidden
    stages = [estimate(config, layout.gpus, vocabulary, stage) for stage in (0, layout.pipeline - 1)]
    ours = memory(model, layout, 16384, 16384)
    for mine, theirs in (
        (ours.weights, stages[0].weights.update), (ours.gradients, stages[0].gradients.update),
        (ours.optimizer, stages[0].optimizer.update),
        (ours.copies, stages[0].quantized.update),
    ):  # fmt: skip
        assert mine == pytest.approx(theirs, rel=0.01)
    assert ours.rest == pytest.approx(stages[0].weights.rollout, abs=0.01 * ours.weights)
    assert 3 * ours.row == stages[0].kv_cache.rollout
    most = max(one.activations.update + one.training_logits.update for one in stages)
    assert ours.activations == pytest.approx(most, rel=2e-3)


def test_memory_of_layouts_that_the_estimate_does_not_know() -> None:
    """TP2 EP4 on 8 ranks: two halves of attention, a quarter of the experts on each; 4 and 2 ranks hold the same."""
    layout = Layout(8, tensor=2, expert=4)
    ours = memory(MOE, layout, context=10, tokens=16)
    held = 4 * 100 / 2 + 2 * 160 / 2, 4 * 8 * 48 / 4
    assert (ours.weights, ours.gradients) == (2 * sum(held), 4 * sum(held))
    assert ours.optimizer == 12 * (held[0] / 4 + held[1] / 2)
    assert ours.copies == 4 * 50 + held[1]
    assert ours.row == 10 * 4 * 2 * 4
    halved = memory(MOE, dataclasses.replace(layout, context=2), context=10, tokens=16)
    head = 2 * 160 / 2  # the gradient of the output layer's weight, whatever the tokens
    assert halved.activations - head == (ours.activations - head) / 2 and halved.optimizer == ours.optimizer


def test_layouts_that_are_tried() -> None:
    found = set(scaling.layouts(scaling.QWEN_30B_A3B, scaling.H100, 16))
    assert Layout(16, tensor=2, expert=8) in found and Layout(16, pipeline=2, expert=8) in found
    assert not [one for one in found if one.expert % one.tensor or one.gpus % (one.pipeline * one.expert)]
    assert {one.expert for one in scaling.layouts(scaling.QWEN_32B, scaling.H100, 16)} == {1}


def test_the_document_has_these_tables() -> None:
    assert scaling.tables() in PAPER, "run tools/benchmark/scaling.py for docs/measurements/on_paper.md"


def test_decode_steps_on_paper_are_those_of_the_document():
    """A 7B in bf16, batch 1 and 1k of context: 7.6e9 numbers less the embedding, and 57,344 bytes of cache a token."""
    for row in decode.rows():
        assert f"| {' | '.join(row)} |" in PAPER, "run tools/benchmark/on_paper/decode.py for it"
    model, ranks, cached = decode.MODELS[1]
    floor, _, launches = decode.decode(model, ranks, 1, cached, "bf16")
    weights = 28 * (3584 * (28 + 8) * 128 + 3584 * 3584 + 3 * 3584 * 18944) + 152064 * 3584
    assert floor == pytest.approx((2 * weights + 1024 * 57_344) / 4.3e12)
    assert launches == 28 * 9 + 14


def test_training_on_paper_is_that_of_the_document():
    """A 7B in fp8, both passes: products of linears count half; the head, 545e6 numbers, and attention do not."""
    for row in training.rows():
        assert f"| {' | '.join(row)} |" in PAPER, "run tools/benchmark/on_paper/training.py for it"
    floor, _ = training.training(decode.MODELS[1][0], "fp8 both")
    linears = 28 * (3584 * (28 + 8) * 128 + 3584 * 3584 + 3 * 3584 * 18944)
    scores = 3 * 8192 * 28 * 2 * 3584 * 2048
    assert floor == pytest.approx((6 * 8192 * (linears / 2 + 152064 * 3584) + scores) / 790e12)
