"""Pipeline stages by their flags: who has which layers, and what cannot be, in one line each."""

from __future__ import annotations

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.families import Stages
from megatron_rl.run.memory.estimate import estimate, report_text

SUPERVISED = [
    "--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "8", "--seq-length", "128", "--lr", "1e-3",
    "--tokenizer-model", "unused", "--langrl-env-config", "unused", "--run-dir", "unused", "--train-iters", "4",
]  # fmt: skip
PP = "--pipeline-model-parallel-size"
RL = ("--perform-rl-step", "--grpo-group-size", 4, "--grpo-prompts-per-step", 4, "--micro-batch-size", 2)
STAGES = ("rollouts on pipeline stages", "one stage")


def problems_of(*flags: object, ranks: int = 4) -> list[str]:
    return [str(problem) for problem in read_config([*SUPERVISED, *map(str, flags)], ranks)[1]]


@pytest.mark.parametrize(
    ("stages", "layers", "expected"),
    [
        (Stages(), 3, [[range(3)]]),
        (Stages(2), 4, [[range(2)], [range(2, 4)]]),
        (Stages(2, chunks=2), 8, [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]),
        (Stages(3, first=3), 7, [[range(3)], [range(3, 5)], [range(5, 7)]]),
        (Stages(2, first=4, last=2, chunks=2), 6, [[range(2), range(3, 5)], [range(2, 3), range(5, 6)]]),
    ],
)
def test_who_has_which_layers(stages: Stages, layers: int, expected: list[list[range]]) -> None:
    assert [stages.layers_of(stage, layers) for stage in range(stages.count)] == expected


@pytest.mark.parametrize(
    ("stages", "layers"),
    [
        (Stages(3), 8), (Stages(4), 3), (Stages(2, first=8), 8), (Stages(2, first=3, last=4), 8),
        (Stages(2, chunks=3), 8),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_shared(stages: Stages, layers: int) -> None:
    assert stages.sizes(layers) == []


@pytest.mark.parametrize(
    "flags",
    [
        (PP, 2), (PP, 4, "--tensor-model-parallel-size", 1), (PP, 2, "--num-virtual-stages-per-pipeline-rank", 2),
        (PP, 2, "--num-layers-per-virtual-pipeline-stage", 2), (PP, 2, "--decoder-first-pipeline-num-layers", 3),
        (PP, 2, *RL), (PP, 2, "--num-virtual-stages-per-pipeline-rank", 2, *RL),
        (PP, 2, "--eval-interval", 2, "--rl-rollout-quantization", "int8"),
        (PP, 2, *RL, "--transformer-impl", "transformer_engine", "--enable-cuda-graph"),
        (PP, 2, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 4),
    ],
)  # fmt: skip
def test_what_can_be(flags: tuple[object, ...]) -> None:
    assert problems_of(*flags) == []


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (
            (PP, 4, "--num-layers", 6, "--inference-dynamic-batching-buffer-size-gb", 0.5),
            [f"{PP} 4", "--num-layers 6", "use 1, 2, 3 or 6"],
        ),
        ((PP, 2, "--decoder-first-pipeline-num-layers", 8), [f"{PP} 2", "--decoder-first-pipeline-num-layers 8"]),
        ((PP, 2, "--num-virtual-stages-per-pipeline-rank", 3), [f"{PP} 2", "in 3 chunks each"]),
        ((PP, 2, "--num-layers-per-virtual-pipeline-stage", 3), ["pipeline-stage 3", "chunks"]),
        (("--decoder-last-pipeline-num-layers", 2), ["--decoder-last-pipeline-num-layers", "no stages"]),
        (("--num-virtual-stages-per-pipeline-rank", 2), ["--num-virtual-stages-per-pipeline-rank", "no stages"]),
        (
            (PP, 2, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 3),
            ["--recompute-num-layers 3", "4 layers", "use 1, 2 or 4"],
        ),
    ],
)  # fmt: skip
def test_one_line_for_what_cannot_be(flags: tuple[object, ...], fragments: list[str]) -> None:
    (found,) = problems_of(*flags)
    assert [text for text in fragments if text not in found] == []
    assert "\n" not in found


@pytest.mark.parametrize(
    ("chunks", "in_flight"),
    [
        (1, [4, 3, 2, 1]),
        # Megatron's warm-up of 2 (P - r - 1) + (v - 1) P chunks of half a stage, and the one that comes back
        (2, [5.5, 4.5, 3.5, 2.5]),
    ],
)
def test_a_stage_keeps_the_micro_batches_that_are_on_their_way(chunks: int, in_flight: list[float]) -> None:
    """Of 8 layers on 4 stages each has 2, a quarter of what one rank keeps of one micro-batch."""
    ends = 2 * 128 * 64 * 4  # the final norm's input and output: tokens, hidden size, bytes
    one, problems = read_config(SUPERVISED, 4)
    staged, more = read_config([*SUPERVISED, PP, "4", "--num-virtual-stages-per-pipeline-rank", str(chunks)], 4)
    assert problems == more == []
    a_stage = (estimate(one, 4, 1000).activations.update - ends) / 4
    found = [estimate(staged, 4, 1000, stage).activations.update for stage in range(4)]
    assert found == [a_stage * count + (ends if stage == 3 else 0) for stage, count in enumerate(in_flight)]


def test_the_estimate_is_of_the_fullest_stage() -> None:
    config, problems = read_config([*SUPERVISED, PP, "2"], 4)
    assert problems == []
    first, last = (estimate(config, 4, 1000, stage) for stage in range(2))
    whole, _ = read_config(SUPERVISED, 2)
    assert first.sizes.parameters == last.sizes.parameters == estimate(whole, 2, 1000).sizes.parameters
    assert 0 < first.sizes.parameters_per_rank < first.sizes.parameters
    # The first stage has two micro-batches under way, the last one the logits.
    assert first.activations.update > last.activations.update
    assert last.training_logits.update > first.training_logits.update == 0
    fullest = estimate(config, 4, 1000)
    assert fullest.training == max(first.training, last.training)
    text = report_text(config, fullest)
    assert "tensor 1 x pipeline 2 x data 2" in text and "of the fullest stage" in text
