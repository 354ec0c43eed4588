"""The decode section's measuring on a model that a CPU can hold."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_rl.models import PolicyModel
from megatron_rl.platform import current_platform
from megatron_rl.quantization.rollout import RolloutQuantization
from tools.benchmark import decode

SIZES = decode.DecodeSizes(hidden=64, ffn=128, heads=4, groups=2, layers=1, batches=(1, 2), prompt_tokens=4, bursts=2)


@pytest.fixture
def policy(one_rank: object) -> PolicyModel:
    """On the session's process group."""
    return decode._build(SIZES, current_platform())


def test_a_row_a_batch_size(policy: PolicyModel) -> None:
    rows = decode.decode_rows(policy, "fp8", SIZES, bandwidth=1e9)
    assert [(row["recipe"], row["batch"]) for row in rows] == [("fp8", 1), ("fp8", 2)]
    assert all(row["step_ms"] > 0 for row in rows)


def test_bytes_of_a_step_by_hand(policy: PolicyModel) -> None:
    none = RolloutQuantization(policy.gpt, "none", (), 1, lambda rows: None)
    # qkv 128 x 64, proj 64 x 64, fc1 256 x 64, fc2 64 x 128; head 512 x 64; all bf16
    weights = 2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128 + 512 * 64)
    # keys and values of 1 layer x 2 groups x 16 wide in bf16, of 4 + 25 // 2 tokens
    cache = 2 * 2 * 16 * 2 * 16
    assert decode.bytes_read(policy, none, 2, SIZES) == weights + 2 * cache


def test_a_run_of_the_table(policy: PolicyModel, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = dataclasses.replace(SIZES, batches=(2,))
    rows = [row for name in ("none", "int8") for row in decode.decode_rows(policy, name, sizes, 1e9)]
    product = {"linear": "mlp.linear_fc1", "batch": 2, "bf16_us": 2.0, "fp8_us": 1.0, "fp8_roofline_us": 0.5}
    section = {"copy_bytes_per_second": 4e12, "refresh_ms": {"fp8": 5.0}, "decode": rows, "products": [product]}
    decode.print_decode(section)
    shown = capsys.readouterr().out
    assert "copy bandwidth 4.00 TB/s; refresh in ms: fp8 5.00" in shown
    assert "step / roofline" in shown
