"""The model built from flags, its norm, and its two modes."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_rl.errors import ConfigError
from megatron_rl.families import LayerCache
from megatron_rl.families.blocks import BLOCKS
from megatron_rl.models.blocks.heads import HeadAttention
from megatron_rl.models.gpt import build_transformer_config, rollout_mode
from megatron_rl.models.rollout_ops import TorchNorm, is_rms
from megatron_rl.models.spec import layer_spec
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups
from tests.support.samples import tiny_optimization
from tests.support.tiny import SHAPES, VOCABULARY, tiny_config, tiny_policy

OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is there")
def test_without_transformer_engine_its_layers_are_one_line(one_rank: ParallelGroups) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny_policy(tiny_config(transformer_impl="transformer_engine"))
    (line,) = refused.value.lines
    assert "cannot import Transformer Engine" in line and "--transformer-impl local" in line


def test_flags_reach_the_model(one_rank: ParallelGroups) -> None:
    changes = {
        "num_layers": 3, "ffn_hidden_size": 48, "rotary_base": 500, "norm_epsilon": 1e-3,
        "qk_layernorm": True, "untie_embeddings_and_output_weights": False, "make_vocab_size_divisible_by": 20,
    }  # fmt: skip
    policy = tiny_policy(tiny_config(**changes))
    gpt = policy.gpt
    layer = gpt.decoder.layers[0]
    assert len(gpt.decoder.layers) == 3
    assert layer.mlp.linear_fc1.weight.shape == (2 * 48, 32)  # gate and up
    assert layer.input_layernorm.eps == layer.self_attention.q_layernorm.eps == 1e-3
    assert layer.self_attention.linear_qkv.bias is not None
    assert layer.mlp.linear_fc1.bias is None
    assert (policy.vocab_size, policy.padded_vocab_size) == (VOCABULARY, 40)
    assert gpt.share_embeddings_and_output_weights
    assert policy.num_parameters == sum(parameter.numel() for parameter in gpt.parameters())
    plain = tiny_policy()
    assert not torch.equal(plain.ropes["main"].cos, policy.ropes["main"].cos[: plain.ropes["main"].cos.shape[0]])


def test_the_seed_fixes_the_weights(one_rank: ParallelGroups) -> None:
    first, same, other = (tiny_policy(seed=seed).gpt.output_layer.weight for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_bf16_holds_parameters_in_bf16(one_rank: ParallelGroups) -> None:
    policy = tiny_policy(tiny_config(bf16=True))
    assert {parameter.dtype for parameter in policy.gpt.parameters()} == {torch.bfloat16} == {policy.dtype}


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norm(normalization: str, sequence_parallel: bool) -> None:
    settings = SimpleNamespace(
        params_dtype=torch.float32, sequence_parallel=sequence_parallel, normalization=normalization,
        layernorm_zero_centered_gamma=False,
    )  # fmt: skip
    norm = TorchNorm(settings, hidden_size=4, eps=0.5)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    # mean 1, mean square 3, variance 2: divided by sqrt(3 + 0.5) or, centred, by sqrt(2 + 0.5)
    values = torch.tensor([[1.0, -1.0, 3.0, 1.0]])
    if normalization == "RMSNorm":
        expected = values / 3.5**0.5 * norm.weight
        assert norm.bias is None
    else:
        with torch.no_grad():
            norm.bias.fill_(0.25)
        expected = (values - 1) / 2.5**0.5 * norm.weight + 0.25
        assert norm.bias.sequence_parallel == sequence_parallel
    torch.testing.assert_close(norm(values), expected)
    assert norm.weight.sequence_parallel == sequence_parallel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_stores_its_weight_less_1(dtype: torch.dtype) -> None:
    settings = SimpleNamespace(
        params_dtype=dtype, sequence_parallel=False, normalization="RMSNorm", layernorm_zero_centered_gamma=True
    )
    norm = TorchNorm(settings, hidden_size=4, eps=0.5)
    values = torch.tensor([[1.0, -1.0, 3.0, 1.0]], dtype=dtype)
    torch.testing.assert_close(norm(values), (values.float() / 3.5**0.5).to(dtype))
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2**-10, 0.0, 1.0, -1.0]))  # 1 + 2^-10 would be 1 in bf16
    expected = torch.tensor([[(1 + 2**-10) / 3.5**0.5, -1 / 3.5**0.5, 6 / 3.5**0.5, 0.0]])
    torch.testing.assert_close(norm(values), expected.to(dtype))
    assert not is_rms(norm), "the kernels multiply by the weight as it is stored"


@pytest.mark.parametrize("changes", [{}, OVERLAP])
def test_rollout_mode_ends_also_by_an_exception(one_rank: ParallelGroups, changes: dict[str, bool]) -> None:
    optimization = tiny_optimization(**changes)
    policy, (wrapped,) = optimization.policy, optimization.wrapped
    hooks = len(wrapped.remove_forward_pre_hook_handles)
    assert (hooks > 0) == bool(changes)
    with pytest.raises(KeyboardInterrupt), rollout_mode(policy, [wrapped]):
        assert not policy.gpt.training
        assert len(wrapped.remove_forward_pre_hook_handles) == 0
        raise KeyboardInterrupt
    assert policy.gpt.training
    assert len(wrapped.remove_forward_pre_hook_handles) == hooks


def test_sequence_parallelism_is_off_in_a_rollout_and_then_as_it_was(one_rank: ParallelGroups) -> None:
    policy = tiny_policy()
    embedding, layer = policy.gpt.embedding, policy.gpt.decoder.layers[0].mlp.linear_fc1
    policy.config.sequence_parallel = layer.sequence_parallel = True
    embedding.word_embeddings.reduce_scatter_embeddings = True
    embedding.scatter_to_sequence_parallel = False
    with rollout_mode(policy):
        assert not (policy.config.sequence_parallel or layer.sequence_parallel)
        assert not embedding.word_embeddings.reduce_scatter_embeddings
    assert policy.config.sequence_parallel and layer.sequence_parallel
    assert embedding.word_embeddings.reduce_scatter_embeddings
    assert not embedding.scatter_to_sequence_parallel


def test_a_rollout_leaves_no_reference_to_the_model(one_rank: ParallelGroups) -> None:
    """A cache by ``id(model)`` would hand a later model at the same address the modules of this one."""
    policy = tiny_policy()
    policy.config.sequence_parallel = True
    with rollout_mode(policy):
        pass
    embedding = weakref.ref(policy.gpt.embedding.word_embeddings)
    del policy
    gc.collect()
    assert embedding() is None


def test_a_rollout_first_does_not_spoil_training(one_rank: ParallelGroups) -> None:
    """megatron caches tensors; made inside inference_mode, they could not be trained with."""
    optimization = tiny_optimization()
    ids, positions = torch.tensor([[1, 2, 3]]), torch.arange(3)[None]
    with rollout_mode(optimization.policy), torch.inference_mode():
        optimization.policy.gpt(ids, positions, None)
    optimization.policy.gpt(ids, positions, None).sum().backward()


@pytest.mark.parametrize(
    ("setting", "experts"),
    [
        ({"moe_latent_size": 16}, True),
        ({"activation_func_clamp_value": 7.0}, False),
        ({"attention_output_gate": True}, False),
    ],
)
def test_what_only_megatrons_training_computes_is_refused(setting: dict[str, object], experts: bool) -> None:
    """Rollouts would pass over it, and so would the reference policy and checkpoints of what is no parameter."""
    config = tiny_config(**SHAPES["experts"] if experts else {})
    settings = build_transformer_config(config, current_platform())
    (kind, *_) = config.architecture().kinds
    assert layer_spec(settings, kind)
    for name, value in setting.items():
        setattr(settings, name, value)
    with pytest.raises(ConfigError, match=f"({'|'.join(setting)}) .* is not built of heads and {kind.mlp}"):
        layer_spec(settings, kind)


def test_a_block_may_need_settings_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadAttention, "settings", MLATransformerConfig)
    settings = build_transformer_config(tiny_config(rotary_base=500), current_platform())
    assert (type(settings), settings.rotary_base) == (MLATransformerConfig, 500)


def test_heads_of_different_sizes_are_refused(one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = itertools.count(8)
    growing = replace(BLOCKS["heads"], cache=lambda model, ranks: LayerCache(2, next(widths), 8))
    monkeypatch.setitem(BLOCKS, "heads", growing)
    with pytest.raises(ConfigError, match="layers whose heads differ in number or width are not built"):
        tiny_policy()
