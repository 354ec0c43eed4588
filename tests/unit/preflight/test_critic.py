"""A directory that cannot be this policy's critic is refused in one line, before a model is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.preflight.models import critic_problems
from megatron_rl.run.weights import first_critic
from megatron_rl.tokenizer import load_tokenizer
from tests.support.hugging_face import hf_run, loaded_policy, write_model
from tests.support.tiny import write_tokenizer

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 40, "tie_word_embeddings": True,
}  # fmt: skip
RL = {"perform_rl_step": True, "grpo_group_size": "1", "grpo_prompts_per_step": "4", "rl_advantage": "gae"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """Directories by name; the policy is ``policy``."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "policy", "qwen2", SIZES)
    write_model(folder / "untied", "qwen2", SIZES | {"tie_word_embeddings": False})
    write_model(folder / "wider", "qwen2", SIZES | {"hidden_size": 64, "intermediate_size": 96})
    write_model(folder / "family", "qwen3", SIZES | {"head_dim": 8})
    write_model(folder / "tokens", "qwen2", SIZES | {"vocab_size": 48})
    return folder


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("wider", "its hidden_size is 64, the policy's 32 (and"),
        ("untied", "its untie_embeddings_and_output_weights is True, the policy's False; a critic has"),
        ("family", "its add_qkv_bias is False, the policy's True (and 1 more settings differ)"),
        ("tokens", "it knows 48 tokens and the policy 40; use a model with the policy's tokenizer"),
        ("nowhere", "config.json"),
    ],
)
def test_another_model_is_refused(models, name, told):
    config = hf_run(models / "policy", **RL, rl_critic_load_hf=str(models / name))
    (problem,) = critic_problems(config, None)
    assert told in problem.text
    assert problem.text.startswith("--rl-critic-load-hf")


def test_another_tokenizer_is_refused(tmp_path: Path):
    """Of as many tokens, of which the digits 1 and 2 have changed places."""
    mine, other = write_tokenizer(tmp_path / "mine"), tmp_path / "other"
    write_model(other, "qwen2", SIZES)
    write_tokenizer(other)
    config = hf_run(other, **RL, rl_critic_load_hf=str(other))
    assert critic_problems(config, load_tokenizer(str(mine))) == []
    data = json.loads((other / "tokenizer.json").read_text())
    digits = data["model"]["vocab"]
    digits["1"], digits["2"] = digits["2"], digits["1"]
    (other / "tokenizer.json").write_text(json.dumps(data))
    (problem,) = critic_problems(config, load_tokenizer(str(mine)))
    assert f"{other}: it has another tokenizer than '{mine}': " in problem.text


def test_the_policys_architecture_is_taken_and_its_head_left_behind(one_rank: ParallelGroups, models):
    own = hf_run(models / "untied", **RL)
    policy, _ = loaded_policy(own, 40)
    assert critic_problems(own, None) == []
    config = hf_run(models / "untied", **RL, rl_critic_load_hf=str(models / "untied"))
    assert critic_problems(config, None) == []
    weights = {name: values.detach().clone() for name, values in policy.named_parameters()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    critic = dict(first_critic(config, policy, one_rank).policy.named_parameters())
    assert critic.pop("output_layer.weight").abs().sum() == 0
    for name, values in critic.items():
        assert values.equal(weights[name]), name
