"""docs/extending.md: every block of Python is run, with numbers worked out by hand."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.environments.loader import find_environment
from megatron_rl.families import read_model
from megatron_rl.families.family import FAMILIES
from megatron_rl.models.attention.backend import Requirements
from megatron_rl.models.attention.selection import fault_of_packed
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.registry import ADVANTAGES, CORRECTIONS, FILTERS, LOSSES, RECIPES
from megatron_rl.run.preflight import extension_problems
from megatron_rl.types import Transcript
from tests.support.hugging_face import batch_of, hf_run, loaded_policy, packed_logits, reference_logits, write_model
from tests.support.tokens import one_token_a_sample, step_rewards, token_batch

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    """File name -> what the page's blocks of Python put there."""
    found: dict[str, str] = {}
    for block in blocks("python"):
        name = re.match(r"# (\S+\.py)", block)[1]
        found[name] = found.get(name, "") + block
    return found


def executed(name: str) -> ModuleType:
    module = ModuleType(name.removesuffix(".py").replace("/", "."))
    exec(compile(files()[name], name, "exec"), vars(module))
    return module


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the files of the page that need not be in the package."""
    for name, text in files().items():
        if "/" not in name:
            (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_every_block_says_where_it_goes() -> None:
    assert set(files()) == {
        "rewards.py", "mine.py", "coarse.py", "internlm_calls.py", "megatron_rl/families/known/seed_oss.py",
        "megatron_rl/models/attention/backends/one_by_one.py",
    }  # fmt: skip


def test_the_reward(here: Path) -> None:
    [entry] = yaml.safe_load(blocks("yaml")[0])
    rows = (json.dumps({"question": f"{number}+1", "answer": number + 1}) for number in range(9))
    (here / "questions.jsonl").write_text("\n".join(rows))
    environment = find_environment("dataset").from_options(entry["args"])
    task = next(iter(environment.tasks("train")))
    assert task.prompt == "0+1="
    for text, reward in (("1", 1.0), ("the sum of both is 1", 1.0), ("the sum of the two is 1", 0.5), ("2", 0.0)):
        grade = environment.grade(task, Transcript(text, "stop", 4))
        assert getattr(grade, "reward", grade) == reward


def test_the_advantage(here: Path) -> None:
    """Rewards 0, 0, 0, 1 of one group: mean 0.25, and 0.75 is cut to 0.5."""
    step = step_rewards(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.ones(4, dtype=torch.bool), torch.zeros(4).long())
    advantages, _ = ADVANTAGES.get("mine.py:Bounded")()(one_token_a_sample(step))
    assert advantages.tolist() == [-0.25, -0.25, -0.25, 0.5]


def test_the_loss(here: Path) -> None:
    batch = token_batch(
        [0, 0], [0.0, 1.0], current_logprobs=torch.tensor([float("nan"), -0.5]), advantages=torch.tensor([0.0, 2.0])
    )
    loss, _ = LOSSES.get("mine.py:Reinforce")()(batch)
    assert loss.tolist() == [0.0, 1.0]


def test_the_correction(here: Path) -> None:
    batch = token_batch(
        [0, 0, 0], [0.0, 1.0, 1.0],
        old_logprobs=torch.tensor([0.0, -1.0, -1.0]), inference_logprobs=torch.tensor([9.0, -1.4, -1.6]),
    )  # fmt: skip
    weights, sums = CORRECTIONS.get("mine.py:Close")()(batch)
    assert weights.tolist() == [0.0, 1.0, 0.0]
    assert [clipped.tolist() for clipped in sums.values()] == [[False, False, True]]


def test_the_filter(here: Path) -> None:
    spread = FILTERS.get("mine.py:Spread")(gap=0.5)
    assert spread(torch.tensor([0.0, 0.5])) and not spread(torch.tensor([0.2, 0.5])) and not spread(torch.tensor([]))


def test_the_recipe(here: Path) -> None:
    recipe = RECIPES.get("coarse.py:RECIPE")
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    quantized = recipe.quantize(weight, None)
    assert int(quantized.codes.abs().max()) == 63
    error = (recipe.matmul(x, quantized) - x @ weight.t()).norm() / (x @ weight.t()).norm()
    assert 0.002 < error < 0.03


def test_the_family_has_the_logits_of_transformers(
    one_rank: ParallelGroups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = executed("megatron_rl/families/known/seed_oss.py").FAMILY
    names, get = FAMILIES.names(), FAMILIES.get
    monkeypatch.setattr(FAMILIES, "names", lambda: (*names, "seed_oss"))
    monkeypatch.setattr(FAMILIES, "get", lambda name: family if name == "seed_oss" else get(name))
    for index, settings in enumerate(family.examples):
        directory = tmp_path / str(index)
        reference = write_model(directory, "seed_oss", settings)
        vocabulary = read_model(directory).architecture.vocab_size
        policy, _ = loaded_policy(hf_run(directory), vocabulary)
        batch = batch_of(vocabulary)
        expected, logits = reference_logits(reference, batch), packed_logits(policy, batch)
        assert expected.std() > 0.5, "too flat to tell a difference"
        assert (logits[:, :vocabulary] - expected).abs().max() <= 1e-4


def test_the_attention_backend() -> None:
    backend = executed("megatron_rl/models/attention/backends/one_by_one.py").BACKEND
    numbers = Requirements(torch.float32, torch.float32, head_width=16)
    assert fault_of_packed(backend.packed, numbers, heads=4, groups=2, device=torch.device("cpu")) is None


def test_all_of_them_pass_the_check_of_a_run(here: Path) -> None:
    """Called with their options, in a process of their own."""
    asked = RLConfig().with_values(
        perform_rl_step=True, rl_dynamic_sampling=True,
        rl_advantage="mine.py:Bounded", rl_advantage_args=("limit=0.3",), rl_policy_loss="mine:Reinforce",
        rl_correction="token_tis + mine.py:Close", rl_correction_args=("nats=0.2",),
        rl_group_filter="mine.py:Spread", rl_group_filter_args=("gap=1",),
        rl_rollout_quantization="coarse.py:RECIPE", rl_tool_call_parser="internlm_calls.py:PARSER",
    )  # fmt: skip
    assert extension_problems(asked) == (asked, [])
