"""The --config file: flat names, lines in messages, the command line wins."""

from __future__ import annotations

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.errors import ConfigError
from tests.support.flags import parse_config


@pytest.fixture
def write(tmp_path):
    def write_file(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file


def errors_of(path: str, *argv: str) -> list[str]:
    """Problems, with the directory of the file left out."""
    with pytest.raises(ConfigError) as caught:
        parse_config(["--config", path, *argv])
    folder = path.rpartition("/")[0] + "/"
    return [line.replace(folder, "") for line in caught.value.lines]


def test_names_with_dashes_underscores_and_aliases(write):
    path = write("num-layers: 3\nhidden_size: 32\nenv-config: e.yaml\nrl_stop_strings: [a, b]\n")
    config = parse_config(["--config", path])
    assert (config.model.num_layers, config.model.hidden_size) == (3, 32)
    assert config.environment.langrl_env_config == "e.yaml"
    assert config.rollout.rl_stop_strings == ("a", "b")
    assert config.training.config == path


def test_the_command_line_wins_wherever_it_stands(write):
    path = write("seed: 1\nlr: 0.1\n")
    config = parse_config(["--seed", "2", "--config", path])
    assert (config.training.seed, config.optimizer.lr) == (2, 0.1)


def test_of_several_files_the_later_one_wins(write, tmp_path):
    first = write("seed: 1\nlr: 0.1\nweight-decay: 0.2\n")
    second = tmp_path / "second.yaml"
    second.write_text("seed: 2\nlr: 0.3\n")
    config = parse_config(["--config", first, "--lr", "0.4", "--config", str(second)])
    assert (config.training.seed, config.optimizer.lr, config.optimizer.weight_decay) == (2, 0.4, 0.2)
    with pytest.raises(ConfigError, match="run.yaml line 1: sed is not a flag"):
        parse_config(["--config", write("sed: 1\n"), "--config", str(second)])


def test_an_exponent_without_a_point_is_a_number(write):
    # YAML 1.1 itself reads 1e-6 as text.
    assert parse_config(["--config", write("lr: 1e-6\n")]).optimizer.lr == 1e-6


def test_switches_are_true_or_false_under_either_spelling(write):
    path = write("swiglu: true\nbf16: false\ndisable-bias-linear: true\nmasked_softmax_fusion: no\n")
    config = parse_config(["--config", path])
    assert (config.model.swiglu, config.precision.bf16) == (True, False)
    assert config.model.add_bias_linear is False


def test_the_command_line_can_undo_a_switch(write):
    path = write("sequence-parallel: true\n")
    assert parse_config(["--config", path, "--no-sequence-parallel"]).parallel.sequence_parallel is False


def test_null_leaves_the_default_and_an_empty_file_is_fine(write):
    assert parse_config(["--config", write("seed: null\nlr: ~\n")]).training.seed == 1234
    assert parse_config(["--config", write("")]).training.seed == 1234


def test_all_problems_with_their_lines(write):
    path = write("# a comment\nnum-layer: 3\nlr: fast\nswiglu: 7\nmodel:\n  hidden_size: 3\nlr: 0.1\n")
    assert errors_of(path, "--zzz") == [
        "run.yaml line 5: model is nested; the file is flat: flag names and their values",
        "run.yaml line 7: lr was already set in line 3; keep one of them",
        "run.yaml line 2: num-layer is not a flag; did you mean num-layers?",
        "run.yaml line 3: lr is not a number, got 'fast'",
        "run.yaml line 4: swiglu is not true or false, got '7'",
        "--zzz is not a flag; --help-all lists all flags",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "--config run.yaml is not a mapping; write one 'flag-name: value' a line"),
        ("config: other.yaml\n", "run.yaml line 1: config cannot name another file; put its settings here"),
        ("seed: [1, 2]\n", "run.yaml line 1: seed takes one value, got 2: '1 2'"),
        ("# " + 300_000 * "x", "--config run.yaml has more than 0.25 MiB; give a file of flags and values"),
        ("load: ''\n", "run.yaml line 1: load is empty; name a path, or leave it out"),
    ],
)
def test_files_that_are_refused(write, text, message):
    assert errors_of(write(text)) == [message]


def test_what_is_not_yaml_says_where(write):
    (problem,) = errors_of(write("a: [1\nb: 2\n"))
    assert problem.startswith("--config run.yaml is not YAML:")
    assert "line 2" in problem


def test_what_a_lost_file_would_have_set_is_not_missing(tmp_path):
    _, problems = read_config(["--config", str(tmp_path / "no.yaml"), "--lr", "fast"], 1)
    assert [problem.flag for problem in problems] == ["--config", "--lr"]
    _, problems = read_config(["--config", ""], 1)
    assert list(map(str, problems)) == ["--config is empty; name a path, or leave it out"]


def test_an_absent_file(tmp_path):
    (problem,) = errors_of(str(tmp_path / "no.yaml"))
    assert problem == "--config no.yaml cannot be read (No such file or directory); give a file of flags and values"
