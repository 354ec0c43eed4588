"""The oracle is not ours: what it imports, and what it says of numbers worked out by hand."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

from tests.oracles.algorithm import Settings, advantages, correction, policy_loss
from tests.oracles.formats import e4m3_values, problems
from tests.oracles.optimizer import Optimizer

FOLDER = Path(__file__).parent
ORACLES = ("algorithm", "compare", "formats", "models", "optimizer", "quantised", "sampling", "step")
"""Modules that compute what is expected; the others start the product and hand over files."""
LIBRARIES = {"torch", "transformers", "safetensors"}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_an_oracle_shares_no_code_with_the_product() -> None:
    for name in ORACLES:
        others = {f"tests.oracles.{other}" for other in ORACLES}
        foreign = {
            module for module in _imports(FOLDER / f"{name}.py") - others
            if module.split(".")[0] not in LIBRARIES | set(sys.stdlib_module_names)
        }  # fmt: skip
        assert foreign == set(), name
    for path in FOLDER.glob("*.py"):
        assert not any(module.startswith("megatron") for module in _imports(path)), path.name


def test_advantages_by_hand() -> None:
    """Group 1: mean 1, standard deviation 1. The batch 0 1 2 5: mean 2, standard deviation sqrt(14 / 3)."""
    groups = [[0.0, 1.0, 2.0], [5.0, None]]
    assert advantages(groups, "grpo")[0] == pytest.approx([-1, 0, 1], abs=2e-6)
    assert advantages(groups, "dr_grpo")[0] == [-1, 0, 1]
    assert advantages(groups, "rloo") == [[-1.5, 0, 1.5], [0, 0]]
    assert advantages(groups, "batch_norm")[1] == pytest.approx([3 / (14 / 3) ** 0.5, 0], abs=2e-6)


def test_a_loss_and_a_correction_by_hand() -> None:
    """Ratios 1.5 and 0.5 against a clip range of 0.8 to 1.2."""
    ratios = torch.tensor([1.5, 0.5], dtype=torch.float64)
    old = torch.zeros(2, dtype=torch.float64)
    loss = policy_loss(Settings(), ratios.log(), old, 2.0)
    assert loss.value.tolist() == pytest.approx([-2.4, -1.0]) and loss.clipped.tolist() == [True, False]
    loss = policy_loss(Settings(rl_dual_clip=1.4), ratios.log(), old, -2.0)
    assert loss.value.tolist() == pytest.approx([2.8, 1.6]) and loss.dual_clipped.tolist() == [True, False]
    weights, touched = correction(Settings(rl_correction="token_tis", rl_correction_cap=1.2), ratios.log(), old)
    assert weights.tolist() == pytest.approx([1.2, 0.5]) and touched.tolist() == [True, False]


def test_the_optimizer_is_torchs_own() -> None:
    """Three steps of torch's AdamW and SGD, of a matrix that decays and a vector that does not."""
    for kind in ("adam", "sgd"):
        torch.manual_seed(1)
        ours = [torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64)) for shape in ((3, 2), (3,))]
        theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
        groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
        adam, sgd = torch.optim.AdamW(groups, 0.1, (0.9, 0.999), 1e-3), torch.optim.SGD(groups, 0.1, 0.9)
        torchs = adam if kind == "adam" else sgd
        own = Optimizer(ours, Settings(optimizer=kind, lr=0.1, adam_eps=1e-3, weight_decay=0.1, clip_grad=0))
        for _ in range(3):
            for one, other in zip(ours, theirs, strict=True):
                one.grad = torch.randn_like(one)
                other.grad = one.grad.clone()
            own.step()
            torchs.step()
        assert all(torch.allclose(one, other, rtol=0, atol=1e-14) for one, other in zip(ours, theirs, strict=True))


def test_e4m3_is_torchs_own() -> None:
    """All 256 codes; the one place where torch's idea of the format is asked."""
    torchs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.equal(e4m3_values().nan_to_num(1e9), torchs.nan_to_num(1e9))


def test_wrong_codes_and_scales_are_seen() -> None:
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    assert problems(weight, codes, scales, False) == []
    assert problems(weight, codes + (torch.arange(8) == 3).to(torch.int8), scales, False) != []
    assert problems(weight, codes, scales * 1.01, False) != []
    assert problems(weight, codes, scales[:3], False) != []
