"""Command line to RLConfig: values, spellings and errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig, all_flags
from megatron_rl.errors import ConfigError
from megatron_rl.run.preflight import extension_problems
from tests.support.flags import parse_config


def errors_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(argv)
    return caught.value.lines


def test_no_arguments_give_the_defaults():
    assert parse_config([]) == RLConfig()


def test_values_arrive_in_their_section_with_their_type():
    config = parse_config(["--num-layers", "64", "--lr", "1e-6", "--save", "out", "--swiglu"])
    assert config.model.num_layers == 64
    assert config.optimizer.lr == 1e-6
    assert config.checkpoint.save == "out"
    assert config.model.swiglu is True
    assert config.typed == {"num_layers": 64, "lr": 1e-6, "save": "out", "swiglu": True}


def test_both_ways_to_write_a_value():
    assert parse_config(["--seed=7"]) == parse_config(["--seed", "7"])


def test_an_empty_value_is_a_value():
    assert parse_config(["--system-prompt="]).tokenizer.system_prompt == ""


def test_a_negative_number_is_a_value_and_not_a_flag():
    assert parse_config(["--grpo-entropy-term-weight", "-1e-3"]).algorithm.grpo_entropy_term_weight == -1e-3


def test_the_last_of_a_repeated_flag_wins():
    assert parse_config(["--seed", "1", "--seed", "2"]).training.seed == 2


def test_lists_take_all_values_up_to_the_next_flag():
    config = parse_config(["--rl-stop-strings", "\n\n", "</answer>", "--seed", "3"])
    assert config.rollout.rl_stop_strings == ("\n\n", "</answer>")
    assert config.training.seed == 3


@pytest.mark.parametrize(
    ("alias", "section", "name", "text", "value"),
    [
        ("--env-config", "environment", "langrl_env_config", "e.yaml", "e.yaml"),
        ("--rl-default-temperature", "rollout", "rl_temperature", "0.7", 0.7),
        ("--grpo-default-temperature", "rollout", "rl_temperature", "0.7", 0.7),
        ("--rl-default-top-p", "rollout", "rl_top_p", "0.9", 0.9),
        ("--rl-default-top-k", "rollout", "rl_top_k", "50", 50),
        ("--inference-max-requests", "rollout", "inference_max_batch_size", "32", 32),
    ],
)
def test_aliases(alias, section, name, text, value):
    assert getattr(getattr(parse_config([alias, text]), section), name) == value


@pytest.mark.parametrize(
    ("flag", "section", "name"),
    [
        ("--disable-bias-linear", "model", "add_bias_linear"),
        ("--grad-reduce-in-bf16", "precision", "accumulate_allreduce_grads_in_fp32"),
    ],
)
def test_inverted_flags_switch_off_what_is_on(flag, section, name):
    assert getattr(getattr(parse_config([]), section), name) is True
    assert getattr(getattr(parse_config([flag]), section), name) is False


def test_every_switch_has_an_opposite():
    assert parse_config(["--sequence-parallel", "--no-sequence-parallel"]).parallel.sequence_parallel is False
    assert parse_config(["--disable-bias-linear", "--add-bias-linear"]).model.add_bias_linear is True
    assert parse_config(["--no-load-optim"]).checkpoint.no_load_optim is True
    assert parse_config(["--no-load-optim", "--load-optim"]).checkpoint.no_load_optim is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layer", "4"], "--num-layer is not a flag; did you mean --num-layers?"),
        (["--env-confg", "x"], "--env-confg is not a flag; did you mean --env-config?"),
        (["--disable-bias-liner"], "--disable-bias-liner is not a flag; did you mean --disable-bias-linear?"),
        (["--zzzzzz"], "--zzzzzz is not a flag; --help-all lists all flags"),
        (["--num-layers", "4.5"], "--num-layers is not a whole number, got '4.5'"),
        (["--num-layers", "0"], "--num-layers must be at least 1, got 0"),
        (["--lr", "fast"], "--lr is not a number, got 'fast'"),
        (["--lr", "0"], "--lr must be above 0, got 0.0"),
        (["--inference-num-cuda-graphs", "0"], "--inference-num-cuda-graphs must be at least 1, got 0"),
        (["--lr", "nan"], "--lr is not a finite number, got 'nan'"),
        (["--rl-top-p", "1.5"], "--rl-top-p must be at most 1, got 1.5"),
        (["--grpo-clamp-eps-lower", "1.5"], "--grpo-clamp-eps-lower must be at most 1, got 1.5"),
        (["--rl-correction-veto", "1"], "--rl-correction-veto must be below 1, got 1.0"),
        (["--recompute-modules", "mlp", "moe"], "--recompute-modules is not core_attn or mlp, got 'moe'"),
        (["--rl-dual-clip", "1"], "--rl-dual-clip must be above 1, got 1.0"),
        (["--rl-temperature", "0"], "--rl-temperature must be at least 0.001, got 0.0"),
        (["--normalization", "BatchNorm"], "--normalization is not RMSNorm or LayerNorm, got 'BatchNorm'"),
        (["--lr"], "--lr needs a value"),
        (["--lr", "1", "2"], "--lr takes one value, got 2: '1 2'"),
        (["--swiglu", "true"], "--swiglu takes no value, got 'true'"),
        (["--rl-stop-strings"], "--rl-stop-strings needs at least one value"),
        (["--lr", "1e30"], "--lr must be at most 10, got 1e+30"),
        (["--num-layers", "1000000000"], "--num-layers must be at most 1000, got 1000000000"),
        (["--grpo-group-size", "1000000000"], "--grpo-group-size must be at most 100000, got 1000000000"),
        (["--train-iters", 20 * "9"], f"--train-iters must be at most 2147483647, got {20 * '9'}"),
        (["--run-dir", ""], "--run-dir is empty; name a path, or leave it out"),
        (
            ["--save", "a\nb"],
            "--save has a line break, another control character or a broken one, got 'a\\nb'; use another name",
        ),
        (
            ["--load-hf", "a/\udcff"],  # bytes that are not UTF-8, as Python hands them over
            "--load-hf has a line break, another control character or a broken one, got 'a/\\udcff'; use another name",
        ),
        (
            ["--run-dir", f"{254 * 'x'}ä"],
            "--run-dir is too long for a file system, which takes names of 255 bytes and here 3072 altogether, got "
            f"'{97 * 'x'}...{97 * 'x'}ä'; use a shorter one",
        ),
        (["train", "--swiglu"], "'train' stands before any flag; every value follows its flag"),
    ],
)
def test_what_is_wrong_with_one_flag(argv, message):
    assert errors_of(*argv) == [message]


@pytest.mark.parametrize("flag", sorted(flag.spelling for flag in all_flags() if flag.path))
def test_every_path_is_looked_at(flag):
    (problem,) = errors_of(flag, "x/" * 2000)
    assert problem.startswith(f"{flag} is too long for a file system")


def test_a_model_that_is_lost_is_not_missing_too(command):
    shape = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "tokenizer_model"))
    _, (problem,) = read_config([*command(**shape), "--load-hf", ""], 1)
    assert problem.text == "--load-hf is empty; name a path, or leave it out"


def test_all_errors_come_at_once():
    problems = errors_of("--num-layer", "4", "--lr", "fast", "--normalization", "x", "--seed", "-1")
    assert [line.split()[0] for line in problems] == ["--num-layer", "--lr", "--normalization", "--seed"]


def test_parsing_and_rules_report_together(command):
    _, problems = read_config(command(num_attention_heads="9", lr="fast", tokenizer_model=None), 1)
    # --lr is not also reported as missing.
    assert [problem.flag for problem in problems] == ["--lr", "--tokenizer-model", "--hidden-size"]


@pytest.mark.parametrize("flag", ["rl_policy_loss", "rl_advantage", "rl_correction"])
def test_an_extension_that_cannot_be_read_is_one_problem(command, tmp_path, flag):
    """The one of the check that imports it."""
    (tmp_path / "broken.py").write_text("def (")
    config, problems = read_config(command(**{flag: f"{tmp_path}/broken.py:mine"}), 1)
    assert problems == []
    (problem,) = extension_problems(config)[1]
    assert problem.flag == f"--{flag.replace('_', '-')}"
    assert "SyntaxError" in problem.text


@pytest.mark.parametrize("changes", [{"lr": "fast"}, {"lr": None}])
def test_parsing_alone_and_rules_alone_report(command, changes):
    _, problems = read_config(command(**changes), 1)
    assert [problem.flag for problem in problems] == ["--lr"]


def test_what_is_read_is_resolved(command):
    config, _ = read_config(command(), 1)
    assert config.model.ffn_hidden_size == 256


@pytest.mark.parametrize(("token", "all_shown"), [("--help", False), ("-h", False), ("--help-all", True)])
def test_help_goes_to_standard_output_and_exits(token, all_shown, capsys):
    with pytest.raises(SystemExit) as exited:
        parse_config([token])
    text = capsys.readouterr().out
    assert exited.value.code == 0
    assert "--grpo-group-size INT (>= 1, <= 100000)" in text
    assert ("--rotary-percent" in text) is all_shown
    assert max(len(line) for line in text.splitlines()) <= 110


def test_importing_and_parsing_needs_no_torch():
    script = (
        "import sys; from megatron_rl.config.arguments import read_config; read_config(['--num-layers', '2'], 1); "
        "sys.exit(' '.join({'torch', 'numpy', 'megatron', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
