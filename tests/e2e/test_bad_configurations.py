"""Every wrong input is found before a model is built, all of them together, one line each with the way out."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from tests.support.launches import launched
from tests.support.runs import run, run_many

BROKEN = "tests.support.e2e_environments:Broken"
DIGITS = "tests.support.e2e_environments:Digits"


@pytest.fixture(scope="module")
def used_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def endless_tokenizer(workshop) -> Path:
    """The tokenizer, its end token taken out of the settings."""
    folder = workshop.folder / "endless"
    folder.mkdir()
    (folder / "tokenizer.json").write_text((workshop.tokenizer / "tokenizer.json").read_text())
    settings = json.loads((workshop.tokenizer / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def curious_tokenizer(workshop) -> Path:
    """The tokenizer with a chat template that reaches for attributes."""
    folder = shutil.copytree(workshop.tokenizer, workshop.folder / "curious")
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    return folder


@pytest.fixture(scope="module")
def larger_tokenizer(workshop) -> Path:
    """The tokenizer with three more tokens."""
    folder = workshop.folder / "larger"
    folder.mkdir()
    data = json.loads((workshop.tokenizer / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary |= {text: len(vocabulary) + index for index, text in enumerate("xyz")}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text((workshop.tokenizer / "tokenizer_config.json").read_text())
    return folder


@pytest.fixture(scope="module")
def cases(workshop, warm_start, used_port, endless_tokenizer, larger_tokenizer, curious_tokenizer):
    """Name -> command and the parts its one line must have."""
    nowhere, taken = workshop.folder / "nowhere", workshop.folder / "a_file"
    taken.touch()
    malformed = workshop.folder / "malformed.yaml"
    malformed.write_text("- environment: [\n")
    mapping = workshop.folder / "mapping.yaml"
    mapping.write_text("environment: arithmetic\n")
    lists = workshop.environments
    misspelt = lists("misspelt", [{"environment": "arithmetik"}])
    weightless = lists("weightless", [{"environment": DIGITS, "weight": 0}])
    broken = lists("broken", [{"environment": BROKEN}])
    chat = lists("chat", [{"environment": DIGITS, "args": {"chat": True}}])
    silent = lists("silent", [{"environment": DIGITS, "args": {"demonstrations": 0}}])
    rl, model = workshop.rl, {"pretrained_checkpoint": warm_start}
    return {
        "heads": (rl("x", num_attention_heads=3, kv_channels=8, num_query_groups=1, tensor_model_parallel_size=2),
                  ["--num-attention-heads 3", "tensor-parallel size 2", "use"]),
        "batch": (rl("x", global_batch_size=6), ["--global-batch-size 6", "16 samples", "use 4 or 8"]),
        "group of one": (rl("x", grpo_group_size=1), ["--grpo-group-size 1", "use 2 or more"]),
        "length": (rl("x", inference_max_seq_length=64, max_position_embeddings=48, micro_batch_size=4),
                   ["--inference-max-seq-length 64", "--max-position-embeddings 48", "at most 48"]),
        "cache": (rl("x", inference_dynamic_batching_buffer_size_gb=1e-6), ["cannot hold one", "use at least"]),
        "environment": (rl("x", langrl_env_config=misspelt), ["misspelt.yaml:1", "did you mean 'arithmetic'"]),
        "weights": (rl("x", langrl_env_config=weightless), ["weights sum to 0", "positive weight"]),
        "field": (rl("x", langrl_env_config=broken), ["train row 2", "lacks prompt", "it has question, id"]),
        "end token": (rl("x", tokenizer_model=endless_tokenizer), ["no end-of-text token", "eos_token"]),
        "no tokenizer": (rl("x", tokenizer_model=nowhere), ["--tokenizer-model", "cannot be loaded"]),
        "no checkpoint": (rl("x", pretrained_checkpoint=nowhere), ["no checkpoint in", "step_*"]),
        "nothing to load": (rl("x", load=nowhere), ["--load: no checkpoint in"]),
        "architecture": (rl("x", **model, num_layers=3), ["num_layers 2", "this run has 3"]),
        "vocabulary": (rl("x", **model, tokenizer_model=larger_tokenizer), ["vocabulary of 16", "has 19"]),
        "other mode": (rl("x", load=warm_start), ["mode supervised", "mode rl", "--pretrained-checkpoint"]),
        "other optimizer": (
            workshop.supervised("x", load=warm_start, use_distributed_optimizer=True),
            ["use_distributed_optimizer False", "this run has True", "--no-load-optim"]),
        "file in the way": (rl("x", run_dir=taken), ["a_file is a file", "choose another"]),
        "unwritable": (rl("x", run_dir="/proc/run"), ["/proc is not writable"]),
        "unwritable save": (rl("x", save="/proc/checkpoints"), ["--save /proc/checkpoints", "not writable"]),
        "used save": (rl("x", save=warm_start), ["--save", "already holds checkpoints", "--resume"]),
        "port": (rl("x", rl_environment_port=used_port), [str(used_port), "cannot be used", "0 for any free port"]),
        "wandb": (rl("x", wandb_project="p", wandb_mode="online"), ["API key", "--wandb-mode offline"]),
        "no list": (rl("x", langrl_env_config=workshop.folder / "nowhere.yaml"), ["nowhere.yaml' cannot be read ("]),
        "malformed list": (rl("x", langrl_env_config=malformed), ["malformed.yaml:", "not valid YAML"]),
        "no list in it": (rl("x", langrl_env_config=mapping), ["must be a list"]),
        "no demonstrations": (workshop.supervised("x", langrl_env_config=silent), ["no environment gives"]),
        "no chat template": (rl("x", langrl_env_config=chat), ["train row 0 is a chat", "--chat-template FILE"]),
        "chat template": (rl("x", langrl_env_config=chat, tokenizer_model=curious_tokenizer),
                          ["chat template of tokenizer", "SecurityError", "use the tokenizer of a chat model"]),
        "too wide": (rl("x", hidden_size=2**18, ffn_hidden_size=2**20, num_layers=16),
                     ["weights, gradients and optimizer state take", "more than any machine has"]),
        "root": (rl("x", run_dir="/"), ["/ is the root of the file system", "name a directory"]),
        "advantage": (rl("x", rl_advantage="gpro"), ["'gpro'", "did you mean", "grpo"]),
        "loss": (rl("x", rl_policy_loss="clap"), ["'clap'", "did you mean clip"]),
        "correction": (rl("x", rl_correction="tis"), ["'tis'", "did you mean token_tis"]),
        "setting": (rl("x", grpo_clamp_eps_lower=0), ["--grpo-clamp-eps-lower must be above 0"]),
        "top-p": (rl("x", rl_top_p=0.9), ["--rl-top-p 0.9", "use --rl-top-p 1"]),
    }  # fmt: skip


@pytest.fixture(scope="module")
def checked(cases, workshop):
    """All of them checked, in one process."""
    # Of other ranks than these, this machine's ports and accounts say nothing.
    ranks = {"heads": ["--check-world-size", "2"]}
    commands = [[*argv, "--check", *ranks.get(name, [])] for name, (argv, _) in cases.items()]
    fine = [*workshop.rl("x"), "--check", "--check-world-size", "2"]
    uneven = [*workshop.rl("x", tensor_model_parallel_size=2), "--check", "--check-world-size", "3"]
    outcomes = run_many([fine, uneven, *commands])
    return {"fine": outcomes[0], "world size": outcomes[1], **dict(zip(cases, outcomes[2:], strict=True))}


def test_each_problem_is_one_line_with_its_facts_and_a_way_out(cases, checked):
    for name, (_, fragments) in cases.items():
        lines = checked[name].check(2).output.strip().splitlines()
        assert lines[0] == "1 problem(s) in the configuration:", f"{name}: {lines}"
        assert len(lines) == 2, f"{name}: {lines}"
        assert [text for text in fragments if text not in lines[1]] == [], f"{name}: {lines[1]}"


def test_a_right_configuration_passes_and_writes_nothing(checked, workshop):
    assert "configuration is valid" in checked["fine"].check(0).output
    assert not workshop.run_dir("x").exists()


def test_a_world_size_that_does_not_fit_is_found(checked):
    line = checked["world size"].check(2).output.splitlines()[1]
    assert "world size 3 is not divisible by 2" in line
    assert "start 2 or 4 ranks" in line


def _many_problems(workshop, used_port, endless_tokenizer) -> tuple[list[str], list[str]]:
    """A command with several problems of different kinds, and what each of their lines has."""
    argv = workshop.rl(
        "many", grpo_group_size=1, rl_max_new_tokens=48, num_attention_heads=5, kv_channels=8, num_query_groups=1,
        tensor_model_parallel_size=2, tokenizer_model=endless_tokenizer, run_dir="/proc/many", rl_policy_loss="clap",
        pretrained_checkpoint=workshop.folder / "nowhere", rl_environment_port=used_port,
        langrl_env_config=workshop.environments("many", [{"environment": "arithmetik"}]),
        wandb_project="p", wandb_mode="online", inference_dynamic_batching_buffer_size_gb=1e-6,
    )  # fmt: skip
    return argv, [
        "world size", "--grpo-group-size 1", "--rl-max-new-tokens 48", "--num-attention-heads 5", "end-of-text",
        "/proc is not", "'clap'", "no checkpoint in", str(used_port), "'arithmetik'", "API key", "cannot hold one",
    ]  # fmt: skip


def _is_complete(output: str, fragments: list[str]) -> bool:
    head, _, rest = output.partition("problem(s) in the configuration:\n")
    lines = [line for line in rest.splitlines() if line.startswith("  ")][: len(fragments)]
    named = all(any(fragment in line for line in lines) for fragment in fragments)
    return named and head.splitlines()[-1].strip() == str(len(fragments))  # torch may have warned before


def test_problems_of_all_kinds_come_together(workshop, used_port, endless_tokenizer):
    argv, fragments = _many_problems(workshop, used_port, endless_tokenizer)
    outcome = run(argv).check(2)
    assert _is_complete(outcome.output, fragments), outcome.output


OF_RANK_0 = {"run_dir": "/proc/many", "rl_policy_loss": "clap", "wandb_project": "p", "wandb_mode": "online"}
"""Problems that rank 0 finds, with the process groups already there."""
SAID_BY_RANK_0 = ["/proc is not", "'clap'", "API key"]


def test_of_two_connected_ranks_one_says_so(workshop):
    output = run(workshop.rl("many", **OF_RANK_0), ranks=2).check(2).output
    assert _is_complete(output, SAID_BY_RANK_0), output
    assert output.count("problem(s) in the configuration") == 1
    assert "Traceback" not in output


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 2])
def test_under_torchrun_the_lines_are_whole(workshop, used_port, endless_tokenizer, ranks):
    """3 ranks do not even fit the model; 2 are connected when rank 0 finds what is wrong."""
    argv, fragments = _many_problems(workshop, used_port, endless_tokenizer)
    if ranks == 2:
        argv, fragments = workshop.rl("many", **OF_RANK_0), SAID_BY_RANK_0
    with launched(argv, workshop.run_dir("many"), ranks=ranks) as launch:
        assert launch.wait() != 0
        assert _is_complete(launch.output, fragments), launch.output
        assert launch.output.count("problem(s) in the configuration") == 1, "all ranks find them, one says so"
        ours = launch.output.partition("torch/distributed")[0]
        assert "Traceback" not in ours
        cause = launch.output.partition("Root Cause")[2]  # torchrun's: the first rank that ended
        assert "rank      : 0" in cause or ranks == 2, "of two connected ranks, either may end first"
        assert "exitcode  : 2" in cause
        assert launch.leftovers() == []
