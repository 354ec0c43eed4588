"""The gates of experts with a bound and an offset, and flags that ask for them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.arguments import read_config
from megatron_rl.models.expert_ops import ExpertOps, activated, quick_gelu
from tests.support.tiny import FLAGS, SINKS

CONFIG = SimpleNamespace(
    activation_func=quick_gelu, activation_func_clamp_value=1.0, glu_linear_offset=1.0, gated_linear_unit=True,
    use_te_activation_func=False, bias_activation_fusion=False,
)  # fmt: skip


def test_by_hand() -> None:
    """Gates 3 and -2 (bounded above alone), values -2 and 0.5 (bounded on both sides), shares 1/2."""
    inner = torch.tensor([[3.0, -2.0, -2.0, 0.5]])

    def opened(gate: float) -> float:
        return gate / (1 + math.exp(-1.702 * gate))

    wanted = torch.tensor([[opened(1) * (-1 + 1) / 2, opened(-2) * (0.5 + 1) / 2]])
    torch.testing.assert_close(activated(inner, torch.tensor([0.5]), CONFIG), wanted)
    assert opened(1) == pytest.approx(0.845795, abs=1e-6)


def test_the_kernel_that_knows_neither_bound_nor_offset_is_passed_over() -> None:
    inner, shares = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * 3, torch.tensor([0.1, 0.5, 1.0])
    actual = ExpertOps(fused=True).activate(inner, shares, CONFIG, torch.nn.Identity())
    assert torch.equal(actual, activated(inner, shares, CONFIG))


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"num_experts": False, "moe_ffn_hidden_size": False}, "--activation-func-clamp-value 0.5 is of the gates of"),
        ({"quick_geglu": False}, "--glu-linear-offset 1 is of the gates of experts, and the model has none"),
        ({"swiglu": True}, "--quick-geglu and --swiglu are two activations"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "needs experts that no ranks cut; use "),
        ({"transformer_impl": "transformer_engine"}, "--quick-geglu"),
        ({"sandwich_norm": True}, "--sandwich-norm: add --disable-bias-linear"),
        ({"softmax_type": "off-by-one"}, "--softmax-type"),
        ({"lora_rank": 2}, "--lora-targets all has experts with biases, whose adapters are not built; use "),
    ],
)
def test_flags_that_do_not_fit(changes: dict[str, object], fragment: str) -> None:
    flags = FLAGS | {name.replace("_", "-"): value for name, value in (SINKS | changes).items()}
    given = ((name, "" if value is None or value is True else value) for name, value in flags.items())
    argv = [word for name, value in given if value is not False for word in (f"--{name}", *str(value).split())]
    _, problems = read_config(argv, 2)
    assert any(fragment in str(problem) for problem in problems), problems
