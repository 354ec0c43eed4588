"""A configuration as data: dictionaries and notes."""

from __future__ import annotations

import json

import pytest

from megatron_rl.config.rl_config import difference_from_defaults, resolve, to_dict
from megatron_rl.config.rules import notes
from tests.support.flags import parse_config


def test_to_dict_is_nested_and_survives_json(config):
    data = to_dict(resolve(config(rl_stop_strings="a b"), 1))
    assert json.loads(json.dumps(data)) == data
    assert data["model"]["num_layers"] == 4
    assert data["rollout"]["rl_stop_strings"] == ["a", "b"]
    assert list(data)[:6] == ["model", "layers", "latent", "delta", "experts", "rotation"]
    assert "typed" not in data


def test_difference_from_defaults_is_flat_and_small(config):
    assert difference_from_defaults(config(seed="1234", swiglu=True, train_iters=None)) == {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "swiglu": True,
        "tokenizer_model": "tokenizer", "perform_rl_step": True, "seq_length": 128, "lr": 1e-3,
        "run_dir": "runs/test", "langrl_env_config": "environments.yaml", "grpo_prompts_per_step": 8,
        "grpo_group_size": 4,
    }


def test_notes_are_of_typed_flags_only(config):
    assert notes(config()) == []
    assert notes(config(mock_data=True)) == [
        "--mock-data has no effect: tasks come from the environments, so there is no dataset to mock"
    ]
    inverted = notes(config(no_create_attention_mask_in_dataloader=True))
    assert [line.split()[0] for line in inverted] == ["--no-create-attention-mask-in-dataloader"]


def test_a_note_survives_resolving_and_the_value_being_the_default(config):
    assert len(notes(resolve(config(num_workers="2"), 1))) == 1


def test_sequence_parallel_without_ranks_is_noted(config):
    expected = ["--sequence-parallel is off: it needs --tensor-model-parallel-size above 1"]
    assert notes(config(sequence_parallel=True)) == expected
    assert notes(resolve(config(sequence_parallel=True), 1)) == expected
    assert notes(config(sequence_parallel=True, tensor_model_parallel_size="2")) == []


def test_a_penalty_without_a_gradient_is_noted(config):
    (line,) = notes(config(grpo_kl_beta="0.1", rl_kl_estimator="k1"))
    assert line.startswith("--rl-kl-estimator k1 does not hold")
    assert notes(config(grpo_kl_beta="0.1")) == notes(config(rl_kl_estimator="k1")) == []


def test_graph_flags_are_noted_where_they_do_nothing(config):
    """On a CPU the engine says so: the configuration does not know the device."""
    assert notes(config(enable_cuda_graph=True, inference_num_cuda_graphs="4")) == []
    assert notes(config(cuda_graph_impl="local")) == []
    (line,) = notes(config(cuda_graph_impl="transformer_engine"))
    assert line.startswith("--cuda-graph-impl transformer_engine has no effect")


def test_graphs_of_transformer_engines_experts_need_quantised_rollouts(config):
    fp8 = {"transformer_impl": "transformer_engine", "bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise"}
    automatic = {"num_experts": "4", "disable_bias_linear": True}
    experts = automatic | {"enable_cuda_graph": True}
    (line,) = notes(resolve(config(**fp8, **experts), 1))
    assert line.startswith("--enable-cuda-graph has no effect: fp8 products of Transformer Engine's experts")
    assert notes(resolve(config(**fp8, **experts, rl_rollout_quantization="fp8"), 1)) == []
    assert notes(resolve(config(**fp8, **automatic), 1)) == [], "nobody asked"
    (line,) = notes(resolve(config(**experts, no_moe_grouped_gemm=True), 1))
    assert line.startswith("--enable-cuda-graph has no effect: experts in a loop")
    assert notes(resolve(config(**fp8, enable_cuda_graph=True), 1)) == []


def test_notes_do_not_deny_that_layers_of_transformer_engine_are_built(config):
    """They are, with --transformer-impl transformer_engine; graphs of them are not."""
    (graphs,) = notes(config(cuda_graph_impl="transformer_engine", transformer_impl="transformer_engine"))
    assert "graphs of Transformer Engine's layers are not built; local captures the rollouts' decode" in graphs
    (products,) = notes(resolve(config(fp8_format="e4m3", fp8_recipe="blockwise"), 1))
    assert "Transformer Engine's own layers come with --transformer-impl transformer_engine" in products
    for line in (graphs, products):
        assert "layers are always" not in line and "installed or not" not in line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--lr", "1", "--lr", "2"], "--lr 2 holds, which comes after --lr 1"),
        (["--lr=1", "--seed", "3", "--lr", "2", "--lr", "3"], "--lr 3 holds, which comes after --lr 1 and --lr 2"),
        (["--lr", "1", "--lr", "2", "--lr", "1"], "--lr 1 holds, which comes after --lr 2"),
        (["--bf16", "--no-bf16"], "--no-bf16 holds, which comes after --bf16"),
        (
            ["--env-config", "a", "--langrl-env-config", "b"],
            "--langrl-env-config b holds, which comes after --env-config a",
        ),
        (["--lr", "2", "--lr", "2"], None),
    ],
)
def test_a_flag_that_is_given_twice_is_noted_with_the_value_that_holds(words, line):
    assert notes(parse_config(words)) == ([] if line is None else [line])
    assert notes(resolve(parse_config(words), 1)) == ([] if line is None else [line])


def test_a_file_whose_value_the_command_line_replaces_is_no_repetition(tmp_path):
    (tmp_path / "run.yaml").write_text("lr: 1\n")
    (tmp_path / "more.yaml").write_text("lr: 2\n")
    files = ["--config", str(tmp_path / "run.yaml"), "--config", str(tmp_path / "more.yaml")]
    assert notes(parse_config([*files, "--lr", "3"])) == []
