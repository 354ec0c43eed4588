"""Data files that are not what they should be: one line each, with the file, the row and what it has."""

from __future__ import annotations

import gzip
import json

import pytest

from megatron_rl.environments.data import DatasetEnvironment, Problem, Source
from megatron_rl.environments.data.layouts import QUESTION
from megatron_rl.environments.data.rows import MAX_PROBLEMS
from megatron_rl.errors import ConfigError

GOOD = [{"question": f"{n}?", "answer": str(n), "more": [n]} for n in range(8)]


class Quiz(DatasetEnvironment):
    """A data set of questions."""

    name = "quiz"
    source = Source("nobody/no-such-data-set", "train", (QUESTION,))

    def parse(self, row):
        return Problem(row.text("question"), row.text("question"), row.text("answer"))


def lines(rows=GOOD):
    return "".join(json.dumps(row) + "\n" for row in rows)


def tasks(path):
    return list(Quiz.from_options({"path": str(path)}).tasks("train"))


def problems(path):
    with pytest.raises(ConfigError) as raised:
        tasks(path)
    assert all(str(path) in problem and "\n" not in problem for problem in raised.value.lines)
    return [problem.replace(str(path), "FILE") for problem in raised.value.lines]


def parquet(path, rows=GOOD):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "json", "json.gz", "csv", "csv.gz", "parquet"])
def test_every_format_gives_the_same_tasks(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    csv = "question,answer,more\r\n" + "".join(f"{row['question']},{row['answer']},x\r\n" for row in GOOD)
    text = {"jsonl": lines(), "json": json.dumps(GOOD), "csv": csv}.get(ending.partition(".")[0])
    if text is None:
        parquet(path)
    else:
        path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    found = tasks(path)
    assert [(task.prompt, task.data) for task in found] == [(f"{n}?", {"gold": str(n)}) for n in range(8)]


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("x.jsonl", "", "FILE has no rows"),
        ("x.jsonl", "\n \n", "FILE has no rows"),
        ("x.json", "[]", "FILE has no rows"),
        ("x.csv", "question,answer\n", "FILE has no rows"),
        ("x.txt", lines(), "FILE has an unknown ending; use .json, .jsonl or .csv (also .gz), or .parquet"),
        ("x.json", lines(), "FILE is not JSON (Extra data: line 2 column 1 (char 47)); name it .jsonl"),
        ("x.json", '[{"question": "a', "FILE is not JSON (Unterminated string"),
        ("x.json", '{"question": "a"}', "FILE must hold a list of rows, not a dict"),
        ("x.jsonl", lines()[:-20], "FILE: row 8 is not JSON"),
        ("x.jsonl", '{"question": NaN}\n', "FILE: row 1 is not JSON (NaN is not JSON)"),
        ("x.jsonl", "[" * 100_000 + "\n", "FILE: row 1 is not JSON (nested too deeply)"),
        ("x.jsonl.gz", lines(), "FILE cannot be read: Not a gzipped file"),
        ("x.jsonl.gz", gzip.compress(lines().encode())[:-12], "FILE cannot be read: Compressed file ended before"),
        ("x.jsonl", gzip.compress(lines().encode()), "FILE is not UTF-8 text"),
        ("x.csv", "question,answer\na,b,c\n", "FILE: row 1 has 3 fields, its header 2"),
        ("x.csv", 'question,answer\n"a,b\n', "FILE is not CSV or is truncated"),
        ("x.parquet", lines(), "FILE is not parquet or is truncated"),
        ("x.parquet", "", "FILE is not parquet or is truncated"),
        ("x.jsonl", lines([{"problem": "a", "solution": "b"}]), "FILE needs the columns question, answer; it has prob"),
        ("x.csv", "a;b\n1;2\n", "FILE needs the columns question, answer; it has a;b"),
        ("x.jsonl", '["a"]\n', "FILE: row 1 is a list, not a mapping of columns"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, name, content, wanted):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    [problem] = problems(path)
    assert problem.startswith(wanted)


@pytest.mark.parametrize("answer", ["2024-01-05", "007", "NA", "5", 5, 10**30])
def test_answers_stay_as_the_file_has_them(tmp_path, answer):
    """`datasets` makes dates, numbers, None and floats of them: decision 021."""
    (tmp_path / "x.jsonl").write_text(lines([{"question": "?", "answer": answer}, {"question": "!", "answer": "text"}]))
    (tmp_path / "x.csv").write_text(f"question,answer\n?,{answer}\n!,text\n")
    for name in ("x.jsonl", "x.csv"):
        assert [task.data["gold"] for task in tasks(tmp_path / name)] == [str(answer), "text"]


def test_the_end_of_a_cut_file_is_called_truncated(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(lines()[:-20])
    assert problems(path)[0].endswith("the file ends in the middle of it and seems truncated")
    path.write_text(lines()[:40] + "\n" + lines())
    assert "truncated" not in problems(path)[0]


def test_a_parquet_file_that_was_cut(tmp_path):
    path = tmp_path / "x.parquet"
    parquet(path)
    path.write_bytes(path.read_bytes()[:-30])
    assert problems(path)[0].startswith("FILE is not parquet or is truncated")


def test_a_parquet_file_of_other_columns(tmp_path):
    path = tmp_path / "x.parquet"
    parquet(path, [{"question": "a", "solution": "b"}])
    assert problems(path) == ["FILE needs the columns question, answer; it has question, solution"]


def test_a_file_that_is_not_there_or_is_a_folder(tmp_path):
    assert problems(tmp_path / "x.jsonl") == ["FILE cannot be read (No such file or directory)"]
    assert problems(tmp_path) == ["FILE is a folder; name the file in it"]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"question": "a"}, "lacks answer; it has question"),
        ({"question": " ", "answer": "b"}, "has an empty question"),
        ({"question": "a", "answer": ""}, "has an empty answer"),
        ({"question": "a", "answer": True}, "has answer of type bool (True); it must be text"),
        ({"question": "a", "answer": None}, "has answer of type NoneType (None); it must be text"),
        ({"question": "a", "answer": ["b"]}, "has answer of type list (['b']); it must be text"),
        ({"question": "a\ud800", "answer": "b"}, "has question with a broken character at 1"),
        (["a"], "is a list, not a mapping of columns"),
    ],
)
def test_a_bad_row_is_named_with_what_it_has(tmp_path, row, wanted):
    path = tmp_path / "x.jsonl"
    path.write_text(lines([*GOOD[:3], row, *GOOD[3:]]))
    assert problems(path) == [f"FILE: row 4 {wanted}"]


def test_many_bad_rows_are_counted(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(lines(GOOD[:1] + [{"question": "a", "answer": [n]} for n in range(100)]))
    found = problems(path)
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == f"FILE: {100 - MAX_PROBLEMS} more rows have problems"


def test_chat_prompts_are_checked(tmp_path):
    class Chat(Quiz):
        def parse(self, row):
            return Problem(row.text("answer"), row.messages("question"), row.text("answer"))

    for prompt, wanted in [
        ([], "has an empty question"),
        ("hello", "has question of type str; it must be a list of chat messages"),
        ([{"role": "user"}], "has a message 0 in question without role and content"),
        ([{"role": "user", "content": ""}], "has an empty question[0].content"),
        ([{"role": "user", "content": 3}], "has question[0].content of type int (3); it must be text"),
    ]:
        path = tmp_path / "x.jsonl"
        path.write_text(lines([{"question": prompt, "answer": "1"}]))
        with pytest.raises(ConfigError) as raised:
            Chat.from_options({"path": str(path)}).tasks("train")
        assert raised.value.lines == [f"{path}: row 1 {wanted}"]


def test_one_question_with_two_answers_is_dropped(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(lines([*GOOD[:3], GOOD[0], {"question": "1?", "answer": "other"}]))
    assert [task.prompt for task in tasks(path)] == ["0?", "2?"]
    path.write_text(lines([{"question": "1?", "answer": "1"}, {"question": "1?", "answer": "2"}]))
    assert problems(path) == ["FILE has no usable row; dropped of 2 rows: 2 with two answers"]


def test_a_hub_that_cannot_be_reached_says_which_file_to_pass(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as raised:
        Quiz.from_options({}).tasks("train")
    [problem] = raised.value.lines
    assert problem.startswith("cannot read nobody/no-such-data-set from the Hugging Face hub (")
    assert problem.endswith("pass a local copy as path: FILE (jsonl, json, csv or parquet with question, answer)")


def test_rows_of_the_hub_are_read_like_those_of_a_file(monkeypatch):
    import datasets

    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list(GOOD * 100)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    found = list(Quiz.from_options({}).tasks("train"))
    assert [task.data["gold"] for task in found] == [str(n) for n in range(8)]
    assert asked == [("nobody/no-such-data-set", None, "train")]
