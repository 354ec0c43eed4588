"""Data sets in the layouts in which they are published, and files of layouts that nobody knows."""

from __future__ import annotations

import json

import pytest

from megatron_rl.environments.data import AFTER, BEFORE
from megatron_rl.environments.data.layouts import bare_problem
from megatron_rl.environments.loader import find_environment
from megatron_rl.errors import ConfigError

SLIME = BEFORE.replace("$Answer (without quotes)", "\\boxed{$Answer}")
VERL_GSM8K = "How many? Let's think step by step and output the final answer after \"####\"."
WORKED = "He has 2*3 = <<2*3=6>>6.\n#### 1,006"


def chat(text):
    return [{"role": "user", "content": text}]


def environment(folder, name, rows, ending="jsonl"):
    path = folder / f"rows.{ending}"
    if ending == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return find_environment(name).from_options({"path": str(path), **({"held_out": 0} if name == "dapo" else {})})


def only_task(folder, name, row, ending="jsonl"):
    made = environment(folder, name, [row], ending)
    [task] = made.tasks("test" if made.evaluation_only else "train")
    return task


DAPO_ASKS = f"{BEFORE}P?{AFTER}"
PUBLISHED = {
    "dapo of verl": ("dapo", {"prompt": chat(DAPO_ASKS), "reward_model": {"ground_truth": "34"}}, DAPO_ASKS, "34"),
    "dapo of slime": ("dapo", {"prompt": chat(f"{SLIME}P?{AFTER}"), "label": "34"}, f"{SLIME}P?{AFTER}", "34"),
    "a label that is a number": ("dapo", {"prompt": chat(DAPO_ASKS), "label": -7}, DAPO_ASKS, "-7"),
    "a bare problem": ("dapo", {"prompt": "P?", "label": "34"}, DAPO_ASKS, "34"),
    "a prompt that is text": ("dapo", {"prompt": DAPO_ASKS, "label": "34"}, DAPO_ASKS, "34"),
    "aime of slime": ("aime", {"prompt": chat(f"{SLIME}P?{AFTER}"), "label": "033"}, f"{SLIME}P?{AFTER}", "33"),
    "Maxwell-Jia": ("aime", {"ID": "2024-II-4", "Problem": "P?", "Solution": "S", "Answer": 33}, DAPO_ASKS, "33"),
    "math-ai/aime24": ("aime", {"id": 60, "problem": "P?", "solution": "\\boxed{204}", "url": "u"}, DAPO_ASKS, "204"),
    "math-ai/aime25": ("aime", {"problem": "P?", "answer": "70", "id": "0"}, DAPO_ASKS, "70"),
    "opencompass": ("aime", {"question": "P?", "answer": "336^\\circ"}, DAPO_ASKS, "336"),
    "MathArena": ("aime", {"problem_idx": 1, "answer": 70, "problem": "P?", "problem_type": []}, DAPO_ASKS, "70"),
    "HuggingFaceH4": (
        "aime", {"id": 1, "problem": "P?", "solution": "S", "answer": "025", "year": "2024"}, DAPO_ASKS, "25",
    ),
    "MATH-500": (
        "math500", {"problem": "P?", "solution": "S", "answer": "p - q", "subject": "Algebra", "level": 2},
        "P?\n\nReason step by step, and put the final answer within \\boxed{}.", "p - q",
    ),
    "gsm8k of verl": (
        "gsm8k", {"data_source": "openai/gsm8k", "prompt": chat(VERL_GSM8K), "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1006"},
        "extra_info": {"split": "train", "index": 0, "answer": WORKED, "question": "How many?"}}, VERL_GSM8K, "1006",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PUBLISHED)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_published_layouts(tmp_path, case, ending):
    name, row, asked, gold = PUBLISHED[case]
    task = only_task(tmp_path, name, row, ending)
    assert task.prompt == ({"role": "user", "content": asked},)
    assert task.data["gold"] == gold


def test_one_problem_is_one_task_whatever_asks_for_it(tmp_path):
    """So the same problems are held out, and repetitions are found, in every layout."""
    layouts = [row for name, row, *_ in PUBLISHED.values() if name in ("dapo", "aime") and "label" in row]
    assert len({only_task(tmp_path, "dapo", row | {"label": "1"}).id for row in layouts}) == 1
    assert bare_problem(VERL_GSM8K) == "How many?"


def test_the_demonstrations_of_verls_gsm8k_are_the_published_ones(tmp_path):
    [shown] = environment(tmp_path, "gsm8k", [PUBLISHED["gsm8k of verl"][1]]).demonstrations("train")
    assert shown.completion == "He has 2*3 = 6.\n#### 1006"
    [published] = environment(tmp_path, "gsm8k", [{"question": "How many?", "answer": WORKED}]).demonstrations("train")
    assert (published.task, published.completion) == (shown.task, shown.completion), "asked with the same words, too"


def test_a_prepared_gsm8k_without_solutions_has_no_demonstrations(tmp_path):
    row = {"prompt": chat(VERL_GSM8K), "reward_model": {"ground_truth": "72"}, "extra_info": {"index": 0}}
    made = environment(tmp_path, "gsm8k", [row])
    assert [task.data["gold"] for task in made.tasks("train")] == ["72"]
    assert list(made.demonstrations("train")) == []


NEEDS = "FILE needs the columns"


@pytest.mark.parametrize(
    ("name", "row", "wanted"),
    [
        ("dapo", {"text": "P?", "gold": "1"}, f"{NEEDS} prompt, reward_model or prompt, label; it has text, gold"),
        ("gsm8k", {"q": "P?", "a": "1"}, f"{NEEDS} question, answer or prompt, reward_model, extra_info or prompt, "),
        ("aime", {"problem": "P?"}, f"{NEEDS} prompt, reward_model or prompt, label or problem, answer or question, "),
        ("aime", {"problem": "P?", "solution": "It is 5."}, "FILE: row 1 has a solution without \\boxed{} around its"),
        ("dapo", {"prompt": chat("P?"), "label": 2.5e16}, "FILE: row 1 has label of type float (2.5e+16); it must"),
        ("dapo", {"prompt": chat("P?"), "label": True}, "FILE: row 1 has label of type bool (True); it must be"),
        ("dapo", {"prompt": chat(f"{BEFORE} {AFTER}"), "label": "1"}, "FILE: row 1 has an empty problem in its prompt"),
    ],
)  # fmt: skip
def test_other_layouts_are_one_line(tmp_path, name, row, wanted):
    with pytest.raises(ConfigError) as raised:
        list(environment(tmp_path, name, [row]).tasks("test" if name == "aime" else "train"))
    [line] = raised.value.lines
    assert line.replace(str(tmp_path / "rows.jsonl"), "FILE").startswith(wanted)


def test_problems_of_any_layout_can_be_excluded(tmp_path):
    exam = tmp_path / "exam.jsonl"
    exam.write_text(json.dumps({"Problem": "P ?", "Answer": 1}) + "\n")
    rows = [{"prompt": chat(f"{SLIME}{text}{AFTER}"), "label": "1"} for text in ("P?", "Q?")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dapo = find_environment("dapo").from_options({"path": str(path), "held_out": 0, "exclude_path": str(exam)})
    assert [bare_problem(task.prompt[0]["content"]) for task in dapo.tasks("train")] == ["Q?"]
