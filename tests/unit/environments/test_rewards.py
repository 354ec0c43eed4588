"""What `reward` may be: a function of ours or of TRL's signature, and several with weights."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from megatron_rl.environments.workers import WorkerPool
from megatron_rl.types import Task, Transcript
from tests.support.dataset_files import NO_TEST, grade, make, problems, write

ROW = {"question": "2 + 3?", "answer": "5", "level": 2}
TRL = '''
import sys, tempfile
from megatron_rl.types import Grade

def brief(completions, **columns):
    """As TRL's documents have it, for chats."""
    return [1.0 if len(chat[0]["content"]) < 4 else 0.0 for chat in completions]

def by_level(prompts, completions, level, answer):
    assert prompts == [[{"role": "user", "content": "2 + 3?"}]]
    return [float(one) * (chat[0]["content"] == right)
            for chat, one, right in zip(completions, level, answer, strict=True)]

def does_not_apply(completions, **columns):
    return [None for _ in completions]

def plain(prompts, completions):
    return [float(prompt + completion == "2 + 3?5") for prompt, completion in zip(prompts, completions, strict=True)]

def shapeless(completions, **columns):
    return 1.0

def with_ids(completions, completion_ids):
    return [0.0]

async def waits(completions, **columns):
    return [0.0]

def writes(completion, row):
    there = "sqlite3" in sys.modules
    if not completion:
        import not_installed
    import sqlite3
    with open("log.txt", "a") as log:
        log.write(completion * 10**6)
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write(completion)
    return Grade(float(there), status="written", extracted=file.name)

def ours(completion, row):
    return 0.5 * (completion == row["answer"])
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("trl.py").write_text(TRL)
    return tmp_path


def test_a_reward_may_write_files_and_import_in_its_functions(folder: Path) -> None:
    """Its temporary files go with the worker; what is slow to import is there before the deadline counts."""
    options = {"path": write("rows.jsonl", [ROW]), "reward": "trl.py:writes"}
    with contextlib.closing(WorkerPool(1, environments=[("dataset", options)])) as pool:
        item = (Task("0", "2 + 3?", {"row": ROW}), Transcript("5", "stop", 1))
        [result] = pool.grade("dataset", options, [item], 20.0, 0.0)
        assert (result.reward, result.message) == (1.0, "")
        assert Path(result.extracted).read_text() == "5"
    assert (folder / "log.txt").stat().st_size == 10**6
    assert not Path(result.extracted).parent.parent.exists()


class TestTrlsSignature:
    @pytest.mark.parametrize(
        ("name", "text", "reward"),
        [("brief", "5", 1.0), ("brief", "It is 5.", 0.0), ("by_level", "5", 2.0)],
    )
    def test_chats_and_columns_come_as_lists_of_one(self, name: str, text: str, reward: float) -> None:
        assert grade(make([ROW], reward=f"trl.py:{name}", **NO_TEST), text).reward == reward

    def test_plain_text_stays_text(self) -> None:
        assert grade(make([ROW], reward="trl.py:plain", chat=False, **NO_TEST), "5").reward == 1.0

    @pytest.mark.parametrize(
        "returned",
        ["[True]", "(1,)", "[numpy.float32(1)]", "[numpy.bool_(True)]", "[numpy.array(1.0)]", "numpy.array([1.0])",
         "[torch.tensor(1.0)]", "torch.tensor([1])", "[torch.tensor(True)]"],
    )  # fmt: skip
    def test_what_trl_takes_as_a_number_is_one(self, returned: str) -> None:
        Path("types.py").write_text(f"import numpy, torch\ndef one(completions, **columns):\n    return {returned}\n")
        result = grade(make([ROW], reward="types.py:one", **NO_TEST), "5")
        assert (result.reward, type(result.reward), result.correct) == (1.0, float, True)

    @pytest.mark.parametrize("returned", ["['1']", "'1'", "[]", "[1, 1]", "[[1]]", "torch.tensor(1.0)", "{'a': 1}"])
    def test_what_trl_takes_for_no_number_masks_the_sample(self, returned: str) -> None:
        Path("types.py").write_text(f"import torch\ndef one(completions, **columns):\n    return {returned}\n")
        result = grade(make([ROW], reward="types.py:one", **NO_TEST), "5")
        assert result.failed and "for one completion, not a list of one number" in result.message

    def test_a_return_that_is_no_list_of_one_masks_the_sample(self) -> None:
        result = grade(make([ROW], reward="trl.py:shapeless", **NO_TEST), "5")
        assert result.failed and "returned 1.0 for one completion, not a list of one number" in result.message

    def test_none_is_no_reward_of_0(self) -> None:
        """Alone it masks the sample; beside others it is left out."""
        result = grade(make([ROW], reward="trl.py:does_not_apply", **NO_TEST), "5")
        assert result.failed and "returned None" in result.message
        both = grade(make([ROW], rewards={"exact": 1, "trl.py:does_not_apply": 1}, **NO_TEST), "5")
        assert (both.reward, dict(both.metrics), both.correct) == (1.0, {"exact": 1.0}, True)
        none = grade(make([ROW], rewards={"trl.py:does_not_apply": 1}, **NO_TEST), "5")
        assert none.failed and "returned None" in none.message

    @pytest.mark.parametrize("name", ["with_ids", "waits"])
    def test_what_only_trl_can_give_is_refused(self, name: str) -> None:
        [line] = problems([ROW], reward=f"trl.py:{name}")
        assert "it is async, or asks for completion_ids or trainer_state, which only TRL's trainer has" in line


class TestSeveralRewards:
    def test_they_are_added_up_with_their_weights(self) -> None:
        """Right and short: 1 x 1 + 0.2 x 1 + 2 x 0.5 = 2.2; wrong and short: 0.2."""
        environment = make([ROW], rewards={"exact": 1, "trl.py:brief": 0.2, "trl.py:ours": 2}, **NO_TEST)
        assert environment.reward_range == (0.0, pytest.approx(3.2))
        right, wrong = grade(environment, "5"), grade(environment, "6")
        assert right.reward == pytest.approx(2.2) and wrong.reward == pytest.approx(0.2)
        assert dict(right.metrics) == {"exact": 1.0, "brief": 1.0, "ours": 0.5}
        assert right.correct is True and wrong.correct is False, "the first one says what is right"

    def test_one_that_fails_masks_the_sample(self) -> None:
        assert grade(make([ROW], rewards={"exact": 1, "trl.py:shapeless": 1}, **NO_TEST), "5").failed

    def test_a_grader_needs_the_answers_column(self) -> None:
        [line] = problems([{"question": "Q?"}], rewards={"exact": 1, "trl.py:brief": 1})
        assert "needs the columns" in line and "it has question" in line

    @pytest.mark.parametrize(
        ("options", "line"),
        [
            ({"rewards": {"exact": 0}}, "the weight of reward exact is 0; it must be a number above 0"),
            ({"rewards": {"exact": 1}, "reward": "math"}, "rewards cannot be combined with reward"),
            ({"rewards": {"unit_tests": 1}}, "rewards cannot be combined with reward or unit_tests"),
            ({"rewards": {"exact": 1, "exakt": 1}}, "there is no grader 'exakt': did you mean exact?"),
        ],
    )
    def test_what_cannot_be(self, options: dict, line: str) -> None:
        [found] = problems([ROW], **options)
        assert line in found
