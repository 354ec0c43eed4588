"""Products whose rows do not know each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron_rl.arithmetic import ask_for_strict_products


@pytest.mark.parametrize(("inputs", "outputs"), [(192, 96), (130, 200), (256, 256), (1024, 512)])
def test_a_row_of_a_product_is_the_same_in_any_batch(inputs: int, outputs: int) -> None:
    """From 4 rows on: below, a CPU takes another kernel (decision 001)."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(size, inputs, generator=generator) for size in (outputs, 200))
    expected = torch.mm(rows[:4], weight.t())[0]
    others = [count for count in range(5, 200, 3) if not torch.equal(torch.mm(rows[:count], weight.t())[0], expected)]
    assert not others


@pytest.mark.parametrize(
    ("facts", "before", "after"),
    [
        ("vendor_id\t: GenuineIntel\n", None, "AUTO,STRICT"),
        ("vendor_id\t: GenuineIntel\n", "COMPATIBLE", "COMPATIBLE"),
        ("vendor_id\t: AuthenticAMD\n", None, None),
        (None, None, None),
    ],
)
def test_mkl_is_asked_on_intel_unless_the_user_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: str | None, before: str | None, after: str | None
) -> None:
    if facts is not None:
        (tmp_path / "cpuinfo").write_text(facts)
    monkeypatch.setenv("MKL_CBWR", before or "")
    if before is None:
        monkeypatch.delenv("MKL_CBWR")
    ask_for_strict_products(tmp_path / "cpuinfo")
    assert os.environ.get("MKL_CBWR") == after
