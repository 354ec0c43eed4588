"""Qwen2.5 counted by hand from its published shapes, and the 64-rank command of the example."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.run.memory.estimate import Estimate, estimate, report_text
from tests.support.recipes import launched

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen2p5_32b_grpo" / "run.sh"
TOKENIZER = 151665
PUBLISHED_ROWS = 152064
"""Of the embedding in the published checkpoints: a multiple of 128."""

SHAPES = {
    # embedding and head 2 x 152064 x 3584                                 1,089,994,752
    # 28 layers: qkv 3584 x (28 + 2 x 4) x 128 and its bias                   16,519,680
    #            proj 3584 x 3584                                             12,845,056
    #            gate, up and down 3 x 3584 x 18944                          203,685,888
    #            two norms                                                         7,168
    # final norm                                                                   3,584
    "7B": ({"num-layers": 28, "hidden-size": 3584, "ffn-hidden-size": 18944, "num-attention-heads": 28,
            "num-query-groups": 4}, 7_615_616_512),
    # embedding and head 2 x 152064 x 5120                                 1,557,135,360
    # 64 layers: qkv 5120 x (40 + 2 x 8) x 128 and its bias                   36,707,328
    #            proj 5120 x 5120                                             26,214,400
    #            gate, up and down 3 x 5120 x 27648                          424,673,280
    #            two norms                                                        10,240
    # final norm                                                                   5,120
    "32B": ({"num-layers": 64, "hidden-size": 5120, "ffn-hidden-size": 27648, "num-attention-heads": 40,
             "num-query-groups": 8}, 32_763_876_352),
}  # fmt: skip


EVEN = ("--seq-length", "12000", "--inference-max-seq-length", "12000")
"""Published are 11,999, which make no round numbers."""


def example(*changes: str, ranks: int = 64) -> RLConfig:
    flags = launched(EXAMPLE, CHECKPOINT="/").flags  # a directory without a config.json: flags say the shape
    config, problems = read_config([*flags, *EVEN, *changes], ranks)
    assert not problems
    return config


def on_64(*changes: str) -> Estimate:
    return estimate(example(*changes), 64, TOKENIZER)


@pytest.mark.parametrize(("shape", "parameters"), SHAPES.values(), ids=SHAPES)
def test_parameters_of_qwen(shape: dict[str, int], parameters: int) -> None:
    flags = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    config = example(*flags, "--tensor-model-parallel-size", "1", ranks=8)
    result = estimate(config, 8, PUBLISHED_ROWS)
    assert (result.sizes.parameters, result.sizes.parameters_per_rank) == (parameters, parameters)
    assert result.weights.update == pytest.approx(2 * parameters, rel=1e-6)


def test_two_context_parallel_ranks_share_tokens_and_optimizer_state() -> None:
    """Tensor-parallel 8, context-parallel 2, data-parallel 4: a rank has 6,000 of the bin's 12,000 tokens."""
    result, alone = on_64("--context-parallel-size", "2"), on_64()
    assert (result.sizes.replicas, result.sizes.copies) == (4, 8)
    for name in ("weights", "gradients", "optimizer", "kv_cache"):
        assert getattr(result, name) == getattr(alone, name)
    a_layer = 4 * 750 * 5120 + 6000 * (3 * 640 + 3 * 128) + 6000 * 3 * 3456
    gathered = (2 * 12000 + 3000) * 2 * 128  # all tokens, and chunks 0 and 3 of four see one and four of them
    assert result.activations.update == 2 * (64 * a_layer + 2 * 750 * 5120 + gathered)
    assert result.training_logits.update == 2 * (6000 + 5120) * 19072
    text = report_text(example("--context-parallel-size", "2"), result)
    assert "(tensor 8 x context 2 x data 4)" in text and "spread over 8 ranks" in text


def test_experts_on_four_ranks_have_optimizer_state_of_their_own() -> None:
    """Tensor-parallel 8, 8 replicas; of 8 experts of width 1,024 a rank has 2 whole ones, as 15 other ranks do."""
    experts = ("--num-experts", "8", "--moe-ffn-hidden-size", "1024", "--transformer-impl", "local")
    sizes = ("--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1")
    result = on_64(*experts, *sizes)
    attention = 5120 * 896 + 896 + 640 * 5120
    dense = 64 * (attention + 8 * 5120 + 2 * 5120) + 2 * 19072 * 5120 + 5120
    own = 64 * 2 * 3 * 5120 * 1024
    assert result.sizes.parameters_per_rank == dense + own
    assert (result.weights.update, result.gradients.update) == (2 * (dense + own), 4 * (dense + own))
    assert result.optimizer.update == 12 * (dense // 8 + own // 16)
    cut = on_64(*experts, "--expert-model-parallel-size", "1")
    assert cut.sizes.parameters_per_rank == dense + 64 * 8 * 3 * 5120 * 128
    # Two experts a token and its way in and out of them: all tokens of the bin, or an eighth with the whole width.
    each = 2 * (5 * 128 + 2 * 5120) + 2 * 8 - (2 * (5 * 1024 + 2 * 5120) + 2 * 8) // 8
    assert cut.activations.update - result.activations.update == 2 * 64 * 12000 * each


def test_the_example_on_64_ranks() -> None:
    """Tensor-parallel 8, data-parallel 8: a rank has 5 query heads, 1 group, 3456 of the MLP's channels."""
    result = on_64()
    layer = 5120 * 896 + 896 + 640 * 5120 + 3 * 5120 * 3456 + 2 * 5120
    held = 64 * layer + 2 * 19072 * 5120 + 5120
    sizes = result.sizes
    assert (sizes.padded_vocab_size, sizes.parameters_per_rank) == (8 * 19072, held) == (152576, 4_096_717_824)
    assert result.sizes.replicas == 8
    assert (result.weights.update, result.gradients.update) == (2 * held, 4 * held)
    assert result.optimizer.update == 12 * held // 8
    assert result.kv_cache.rollout == 32 * 12000 * (2 * 64 * 1 * 128 * 2)
    assert result.rollout_logits.rollout == 3 * 4 * 32 * 152576
    assert result.training_logits.update == 2 * (12000 + 5120) * 19072
    # norms on an eighth of the tokens; projection, rotated q and k, and the result; the MLP
    a_layer = 4 * 1500 * 5120 + 12000 * (3 * 640 + 3 * 128) + 12000 * 3 * 3456
    assert result.activations.update == 2 * (64 * a_layer + 2 * 1500 * 5120)
    assert (result.quantized.update, result.reference.host) == (0, 0)
    in_both = 2 * held + result.kv_cache.rollout
    assert result.rollout == in_both + result.rollout_logits.rollout, "gradients and optimizer are off the device"
    passing = result.activations.update + result.training_logits.update
    assert result.training == in_both + 4 * held + 12 * held // 8 + passing
    assert result.optimizer.host == 12 * held // 8
    stays = on_64("--no-rl-offload-optimizer-during-inference")
    assert stays.rollout == result.rollout + 12 * held // 8
    assert on_64("--rl-keep-in-rollouts", "gradients").rollout == result.rollout + 4 * held
    assert (stays.training, stays.optimizer.host) == (result.training, 0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("--inference-dynamic-batching-buffer-size-gb", "5"), {"sizes.cache_slots": 13}),
        (("--grad-reduce-in-bf16",), {"gradients.update": 2 * 4_096_717_824}),
        (
            ("--grad-reduce-in-bf16", "--rl-offload-optimizer-during-inference"),
            {"optimizer.update": 16 * 4_096_717_824 // 8, "optimizer.host": 12 * 4_096_717_824 // 8},
        ),
        (("--no-use-distributed-optimizer",), {"optimizer.update": 12 * 4_096_717_824}),
        (("--grpo-kl-beta", "0.1"), {"reference.host": 2 * 2 * 4_096_717_824}),
        (("--grpo-default-temperature", "0.9"), {"rollout_logits.rollout": 4 * 4 * 32 * 152576}),
        (("--rl-fused-output-layer",), {"training_logits.update": 2 * 2**27 // 19072 * 19072 + 6 * 5120 * 19072}),
        (
            ("--transformer-impl", "local", "--rl-rollout-quantization", "fp8"),
            {"quantized.update": 64 * (5120 * (896 + 640 + 3 * 3456) + 4 * (896 + 5120 + 2 * 3456 + 5120))},
        ),
    ],
)
def test_one_flag_changes_its_row(change: tuple[str, ...], expected: dict[str, int]) -> None:
    result = on_64(*change)
    assert {name: attrgetter(name)(result) for name in expected} == expected


def test_a_share_of_free_memory_says_which_devices_will_do() -> None:
    config = example().with_values(inference_dynamic_batching_buffer_size_gb=None, rl_rollout_memory_fraction=0.25)
    result = estimate(config, 64, TOKENIZER)
    beside, batch = result.weights.update + result.rollout_logits.rollout, result.kv_cache.rollout
    assert result.device_for(batch, 0.25) == beside + 4 * batch
    one, whole = ((beside + 4 * size) / 2**30 for size in (batch // 32, batch))
    line = f"holds one sequence from {one:.2f} GiB of device memory on, and the largest batch from {whole:.2f} GiB on"
    assert f"--rl-rollout-memory-fraction 0.25: what is free {line}" in report_text(config, result).splitlines()


def test_recomputing_layers_leaves_their_inputs() -> None:
    whole = ("--no-recompute-activations", "--recompute-granularity", "full", "--recompute-method", "uniform",
             "--recompute-num-layers", "1")  # fmt: skip
    layer = 4 * 1500 * 5120 + 12000 * (3 * 640 + 2 * 128) + 12000 * 3 * 3456
    assert on_64(*whole).activations.update == 2 * (64 * 1500 * 5120 + layer + 2 * 1500 * 5120)


def test_the_table() -> None:
    config = example("--transformer-impl", "local", "--rl-rollout-quantization", "fp8", "--grpo-kl-beta", "0.1")
    lines = report_text(config, estimate(config, 64, TOKENIZER)).splitlines()
    assert lines[0] == (
        "32,769,119,232 parameters, 4,096,717,824 a rank; vocabulary 151,665, padded to 152,576; "
        "ranks: 64 (tensor 8 x data 8)"
    )
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line]
    assert cells[0] == ["memory", "rollout", "training", "all ranks", "what"]
    read = "bf16; in rollouts without those that are quantised"  # embedding, output layer, norms and biases
    assert cells[1] == ["weights", "373.87 MiB", "8.00 GiB", "511.73 GiB", read]
    assert [row[0] for row in cells[1:]] == [
        "weights", "gradients", "optimizer", "quantised weights", "KV cache", "activations", "logits, rollout",
        "logits, training",
    ]  # fmt: skip
    assert cells[6][1] == cells[7][2] == cells[8][1] == "-"
    assert [row[1] for row in cells[2:4]] == ["-", "-"]
    assert cells[2][4] == "fp32 buffer"
    rollout, training, state, host = lines[-4:]
    # 0.37 + 3.64 + 11.72 GiB and 0.05 of logits; 7.63 + 15.26 + 5.72, 31.71 of activations and 1.35 of logits
    assert rollout == "rollout: 15.78 GiB a rank, 1,009.63 GiB in all"
    assert training.startswith("training: ")
    whole, without = training.split(" GiB in all; ")
    assert float(whole.split()[1]) - float(without.split()[0]) == pytest.approx(0.37 + 3.64 + 11.72, abs=0.021)
    assert without.endswith(" GiB a rank where what is the rollouts' has to go meanwhile")
    assert state == "optimizer state, in host memory during rollouts: 5.72 GiB a rank, pinned"
    assert host.startswith("reference policy, in host memory: 15.26 GiB a rank")


def test_a_bin_is_padded_to_what_its_ranks_share() -> None:
    odd, even = on_64("--rl-sequence-packing-bin-size", "12001"), on_64("--rl-sequence-packing-bin-size", "12008")
    assert (odd.activations, odd.training_logits) == (even.activations, even.training_logits)
