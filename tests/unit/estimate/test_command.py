"""`train_rl.py --estimate` and `megatron-rl estimate`: what is printed, and the exit code."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.main import main
from tests.support.hugging_face import write_shape
from tests.support.tiny import FLAGS, VOCABULARY, write_tokenizer

NOT_NEEDED = ("tokenizer-model", "langrl-env-config", "run-dir", "train-iters", "lr")


def command(*more: str, without: tuple[str, ...] = ()) -> list[str]:
    """The tiny model's flags; its tokenizer and environments do not exist."""
    kept = {name: value for name, value in FLAGS.items() if name not in without}
    flags = [word for name, value in kept.items() for word in (f"--{name}", value) if word is not None]
    return ["--estimate-vocab-size", str(VOCABULARY), *map(str, flags), *more]


def test_files_that_are_not_there_do_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train_rl.py", "--estimate", *command()]) == 0
    printed = capsys.readouterr().out
    assert "vocabulary 32, padded to 32; ranks: 1 (tensor 1 x data 1)" in printed
    assert "\nrollout: " in printed and "\ntraining: " in printed


def test_both_commands_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train_rl.py", "--estimate", *command()]) == 0
    first = capsys.readouterr().out
    assert cli.main(["estimate", *command()]) == 0
    assert capsys.readouterr().out == first


def test_flags_that_change_no_byte_may_be_absent(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", *command(without=NOT_NEEDED)]) == 0
    assert "weights" in capsys.readouterr().out


def test_ranks_are_asked_for_or_those_of_the_launch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["estimate", *command()]) == 0
    assert "ranks: 4 (tensor 1 x data 4)" in capsys.readouterr().out
    assert cli.main(["estimate", *command("--check-world-size", "8", "--tensor-model-parallel-size", "2")]) == 0
    assert "ranks: 8 (tensor 2 x data 4)" in capsys.readouterr().out


def test_of_several_ranks_one_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["estimate", *command()]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--num-layer", "3"], "--num-layer is not a flag; did you mean --num-layers?"),
        (["--num-attention-heads", "5"], "--hidden-size 32 is not divisible by --num-attention-heads 5"),
        (["--check-world-size", "3", "--tensor-model-parallel-size", "2"], "world size 3 is not divisible by 2"),
        (["--rl-rollout-quantization", "fp9"], "fp9: there is no such recipe; use one of fp8, fp8_block, "),
        (
            ["--rl-rollout-quantization", "int8", "--rl-quantization-skip", "layers.7.*"],
            "--rl-quantization-skip layers.7.* matches no linear layer",
        ),
        (
            ["--num-experts", "4", "--no-add-qkv-bias", "--moe-grouped-gemm", "--rl-rollout-quantization", "int8",
             "--rl-quantization-skip", "*.local_experts.1.*"],
            "leaves layers.0.mlp.experts.local_experts.1.linear_fc1 as it is and other experts of the layer not: with "
            "--moe-grouped-gemm they are one product; skip layers.0.mlp.experts.local_experts.*.linear_fc1, or",
        ),
        (["--rl-quantization-skip", "first:1"], "has nothing to skip"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], flags: list[str], problem: str) -> None:
    assert cli.main(["estimate", *command(*flags)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "problem(s) in the configuration" in err
    assert problem in err


@pytest.mark.parametrize(
    "flags",
    [
        ["last:1", "--pipeline-model-parallel-size", "2"],
        ["*.experts.*", "--expert-model-parallel-size", "2", "--num-experts", "4"],
        ["*.local_experts.3.*", "--expert-model-parallel-size", "2", "--num-experts", "4", "--no-moe-grouped-gemm"],
    ],
)
def test_layers_of_any_rank_may_be_skipped(flags: list[str]) -> None:
    given = command("--check-world-size", "2", "--rl-rollout-quantization", "int8", "--rl-quantization-skip", *flags)
    assert cli.main(["estimate", *given]) == 0


QWEN3_30B_A3B = shlex.split(
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --num-query-groups 4 "
    "--kv-channels 128 --num-experts 128 --moe-ffn-hidden-size 768 --no-add-qkv-bias --qk-layernorm --bf16 "
    "--tensor-model-parallel-size 4 --sequence-parallel --check-world-size 4"
)


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8-block-pow2", "fp8"])
def test_the_check_finds_what_the_estimate_finds(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    """On 4 ranks an expert has 192 outputs, which are no tiles of 128; a scale a row does not mind."""
    flags = [*command(*QWEN3_30B_A3B), "--rl-rollout-quantization", recipe]
    fits = recipe == "fp8"
    assert main(["train_rl.py", "--estimate", *flags]) == (0 if fits else 2)
    estimated = capsys.readouterr().err
    assert ("a rank's part of 192 is no multiple of 128" in estimated) is not fits
    main(["train_rl.py", "--check", *flags])
    assert set(estimated.splitlines()[1:]) <= set(capsys.readouterr().err.splitlines())


OF_ITS_OWN = """
from megatron_rl.quantization.recipes.int8 import Int8

class Wide(Int8):
    tile = (1, 48)

RECIPE = Wide()
"""


def test_a_recipe_by_its_path_says_which_tiles_it_wants(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The projection of attention has 4,096 inputs, 1,024 on each of 4 ranks."""
    monkeypatch.chdir(tmp_path)
    Path("wide.py").write_text(OF_ITS_OWN)
    flags = [*command(*QWEN3_30B_A3B), "--rl-rollout-quantization", "wide.py:RECIPE"]
    assert main(["train_rl.py", "--estimate", *flags]) == 2
    assert "linear_proj: a rank's part of 1024 is no multiple of 48" in capsys.readouterr().err
    assert main(["train_rl.py", "--estimate", *flags[:-1], "absent.py:RECIPE"]) == 2
    assert "absent.py:RECIPE' cannot be imported" in capsys.readouterr().err
    for asked in ("--estimate", "--check"):
        assert main(["train_rl.py", asked, *flags[:-1], "wide.py:Wide"]) == 2
        assert "name an instance" in capsys.readouterr().err


def test_a_shape_that_is_absent_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", *command(without=(*NOT_NEEDED, "num-layers"))]) == 2
    err = capsys.readouterr().err
    assert "1 problem(s)" in err and "--num-layers is missing" in err


def test_the_vocabulary_is_the_tokenizers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = command("--tokenizer-model", str(write_tokenizer(tmp_path / "tokenizer")))[2:]
    assert cli.main(["estimate", *flags, "--make-vocab-size-divisible-by", "12"]) == 0
    assert "vocabulary 16, padded to 24" in capsys.readouterr().out


@pytest.mark.parametrize("without", [(), ("tokenizer-model",)])
def test_an_unknown_vocabulary_names_the_flag(
    capsys: pytest.CaptureFixture[str], without: tuple[str, ...]
) -> None:
    assert cli.main(["estimate", *command(without=without)[2:]]) == 2
    err = capsys.readouterr().err
    assert "1 problem(s)" in err and "give --estimate-vocab-size N" in err


def test_a_supervised_run_without_evaluation_has_no_rollouts(capsys: pytest.CaptureFixture[str]) -> None:
    supervised = [word for word in command() if word != "--perform-rl-step"]
    assert cli.main(["estimate", *supervised]) == 0
    printed = capsys.readouterr().out
    assert "KV cache" not in printed and "\nrollout: " not in printed and "\ntraining: " in printed
    assert cli.main(["estimate", *supervised, "--eval-interval", "1"]) == 0
    assert "KV cache" in capsys.readouterr().out


def test_torch_is_not_imported() -> None:
    program = (
        "import sys; from megatron_rl.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    flags = command("--rl-rollout-quantization", "fp8_block")
    finished = subprocess.run([sys.executable, "-c", program, "estimate", *flags], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "fp8_block, linear layers" in finished.stdout


def test_sub_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "usage: megatron-rl COMMAND" in capsys.readouterr().out
    assert cli.main([]) == cli.main(["evaluate"]) == 2
    assert "usage: megatron-rl COMMAND" in capsys.readouterr().err
    assert cli.main(["train", "--no-such-flag", "--check"]) == 2
    assert "--no-such-flag is not a flag" in capsys.readouterr().err


def test_a_teacher_is_counted_where_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It scores before an update's activations are there: only what is more than these adds to the peak."""
    teacher = write_shape(tmp_path, num_hidden_layers=12)
    printed = []
    for more in ((), ("--rl-keep-in-rollouts", "teacher")):
        assert cli.main(["estimate", *command("--rl-teacher-load-hf", str(teacher), *more)]) == 0
        printed.append(capsys.readouterr().out)
    rows = [next(line for line in text.splitlines() if line.startswith("teacher ")) for text in printed]
    (_, away, training, *_), (_, kept, *_) = ([cell.strip() for cell in row.split("|")] for row in rows)
    assert (away, kept) == ("-", training)
    assert "teacher, in host memory unless it scores: " in printed[0]
    assert "in host memory unless" not in printed[1]


def test_a_critic_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", *command("--rl-advantage", "gae")]) == 0
    assert "\ncritic " in capsys.readouterr().out
    assert cli.main(["estimate", *command("--rl-advantage", "gae", "--rl-offload-optimizer-during-inference")]) == 0
    printed = capsys.readouterr().out
    assert "weights, gradients and optimizer; off in rollouts" in printed
    assert "critic, in host memory during rollouts:" in printed


def test_a_teacher_without_the_policys_layout_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    teacher = write_shape(tmp_path, num_hidden_layers=3)
    asked = command("--pipeline-model-parallel-size", "2", "--rl-teacher-load-hf", str(teacher))
    assert main(["train_rl.py", "--estimate", *asked]) == 2
    told = capsys.readouterr().err
    assert f"--rl-teacher-load-hf {teacher}: of this teacher --pipeline-model-parallel-size 2 does not share" in told
    absent = command("--rl-teacher-load-hf", str(tmp_path / "absent"))
    assert main(["train_rl.py", "--estimate", *absent]) == 2
    assert str(tmp_path / "absent" / "config.json") in capsys.readouterr().err
