"""`--recompute-modules` reaches the layers."""

from __future__ import annotations

from megatron_rl.models.gpt import build_transformer_config
from megatron_rl.platform import current_platform
from tests.support.tiny import tiny_config


def test_chosen_modules_are_recomputed_and_no_others() -> None:
    chosen = tiny_config(recompute_granularity="selective", recompute_modules="mlp")
    assert build_transformer_config(chosen, current_platform()).recompute_modules == ["mlp"]
    default = tiny_config(recompute_activations=True)
    assert build_transformer_config(default, current_platform()).recompute_modules == ["core_attn"]
