"""Second spellings: each sets its field, on the command line and in a file; the later one of a field holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import all_flags, to_dict
from megatron_rl.config.rules import notes
from tests.unit.config.conftest import build_command

STAGES = {"pipeline_model_parallel_size": "2"}
TABLE = [
    # flags, field, value: the working command has 32 samples a step and 100 steps
    ({"recompute_activations": True}, "recompute_modules", ("core_attn",)),
    ({"no_recompute_activations": True}, "recompute_granularity", None),
    ({"cuda_graph_impl": "local"}, "enable_cuda_graph", True),
    ({"cuda_graph_impl": "none"}, "enable_cuda_graph", False),
    ({"cuda_graph_impl": "transformer_engine"}, "enable_cuda_graph", None),
    ({"calculate_per_token_loss": True, "rl_policy_loss": "gspo"}, "rl_loss_aggregation", "token-mean"),
    ({"rl_inference_logprobs_is_correction": True}, "rl_correction", "token_tis"),
    ({"rl_inference_logprobs_is_correction": True}, "rl_correction_args", ("cap=1e9",)),
    ({"train_iters": None, "train_samples": "330"}, "train_iters", 10),
    ({"train_iters": None, "train_samples": "330"}, "lr_decay_iters", 10),
    ({"train_iters": None, "train_samples": "3200", "perform_rl_step": None, "global_batch_size": "64"},
     "train_iters", 50),
    ({"lr_decay_samples": "320"}, "lr_decay_iters", 10),
    ({"lr_warmup_samples": "320"}, "lr_warmup_iters", 10),
    ({"lr_warmup_samples": "0"}, "lr_warmup_iters", 0),
    ({"lr_warmup_fraction": "0.1", "lr_decay_iters": "50"}, "lr_warmup_iters", 5),
    ({"lr_decay_style": "WSD", "lr_wsd_decay_samples": "640"}, "lr_wsd_decay_iters", 20),
    ({**STAGES, "num_layers_per_virtual_pipeline_stage": "1"}, "num_virtual_stages_per_pipeline_rank", 2),
    ({"rl_advantage": "gae", "rl_gamma": "0.9", "rl_advantage_args": "epsilon=1"}, "rl_advantage_args",
     ("gamma=0.9", "epsilon=1")),
    ({"rl_dual_clip": "3", "grpo_clamp_eps_upper": "0.28"}, "rl_policy_loss_args",
     ("clamp_eps_upper=0.28", "dual_clip=3")),
    ({"rl_correction": "veto", "rl_correction_veto": "1e-3"}, "rl_correction_args", ("veto=0.001",)),
]  # fmt: skip
"""Of every second spelling but the bounds of masked_is, which `test_correction_flags` has."""


@pytest.mark.parametrize(("flags", "field", "value"), TABLE)
def test_it_sets_its_field(flags: dict[str, str | bool | None], field: str, value: object, tmp_path: Path) -> None:
    ranks = 2 if "pipeline_model_parallel_size" in flags else 1
    config, problems = read_config(build_command(**flags), ranks)
    assert (config.value(field), problems) == (value, [])
    assert yaml.safe_dump(to_dict(config)), "a run writes it to its directory"

    file = tmp_path / "flags.yaml"
    given = {name: "true" if text is True else text for name, text in flags.items() if text is not None}
    file.write_text("".join(f"{name}: {text}\n" for name, text in given.items()))
    from_file, problems = read_config([*build_command(**dict.fromkeys(flags)), "--config", str(file)], ranks)
    assert (from_file.value(field), problems) == (value, [])
    assert from_file.typed.keys() - {"config"} == config.typed.keys(), "a typed value is told from a default"


@pytest.mark.parametrize(
    ("words", "field", "value", "note"),
    [
        ("--recompute-activations --recompute-granularity selective", "recompute_granularity", "selective", None),
        ("--train-iters 7 --train-samples 64", "train_iters", 2, "--train-samples 64 holds, which comes after "),
        ("--train-samples 64 --train-iters 7", "train_iters", 7, "--train-iters 7 holds, which comes after "),
        ("--lr-decay-iters 100 --lr-warmup-iters 3 --lr-warmup-fraction 0.1", "lr_warmup_iters", 10,
         "--lr-warmup-fraction 0.1 holds, "),
        ("--cuda-graph-impl local --no-enable-cuda-graph", "enable_cuda_graph", False, "--no-enable-cuda-graph holds"),
        ("--rl-correction-cap 3 --rl-inference-logprobs-is-correction", "rl_correction_args", ("cap=1e9", "cap=3"),
         None),
        ("--rl-gamma 0.8 --rl-gamma 0.9", "rl_advantage_args", ("gamma=0.9",), "--rl-gamma 0.9 holds, "),
    ],
)  # fmt: skip
def test_the_later_one_holds_with_a_note(words: str, field: str, value: object, note: str | None) -> None:
    config, _ = read_config([*build_command(train_iters=None), *words.split()], 1)
    assert config.value(field) == value
    assert [line[: len(note)] for line in notes(config) if note] == [note] * bool(note)


def test_the_command_line_switches_off_what_a_file_switched_on(tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text("recompute-activations: true\nrl-inference-logprobs-is-correction: true\n")
    words = ["--no-recompute-activations", "--no-rl-inference-logprobs-is-correction"]
    config, problems = read_config([*build_command(config=tmp_path / "flags.yaml"), *words], 1)
    assert (problems, config.kernels.recompute_granularity) == ([], None)
    assert (config.algorithm.rl_correction, config.algorithm.rl_correction_args) == ("none", ())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"train_iters": None, "train_samples": "31"}, "--train-samples 31 is less than one step of 32 samples"),
        ({"cuda_graph_impl": "both"}, "--cuda-graph-impl is not local or none, got 'both'"),
        ({"lr_warmup_fraction": "1"}, "--lr-warmup-fraction must be below 1, got 1.0"),
        ({"rl_importance_sampling_truncation_coef": "0"}, "--rl-importance-sampling-truncation-coef must be above 0"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_it(flags: dict[str, str | None], text: str) -> None:
    (problem,) = read_config(build_command(**flags), 1)[1]
    assert problem.text.startswith(text)


def test_every_one_has_a_row() -> None:
    seconds = {each.name for flag in all_flags() for each in flag.seconds}
    tested = {name.removeprefix("no_") for flags, *_ in TABLE for name in flags}
    assert seconds - tested == {"rl_gae_lambda", "grpo_clamp_eps_lower"} | {
        f"rl_correction_{name}" for name in ("cap", "lower", "upper")
    }
