#!/usr/bin/env python
"""Write the environment list: MBPP's published training rows (601 to 974), and HumanEval as the held-out test.

``--data`` is a directory with mbpp.jsonl and humaneval.jsonl as published; without it both come from the hub.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import yaml

TRAIN = range(601, 975)
FORM = "Answer with the code alone, in one Python block, without comments or a docstring."
"""Else the model explains first and repeats the docstring, and a short answer is cut off before the code is whole."""
ASK = f"{{text}} Your code should pass these tests:\n{{test_list}}\n{FORM}"
COMPLETE = f"Complete this function. {FORM}\n```python\n{{prompt}}```"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--output", type=Path, required=True, help="a directory, made if it is not there")
    arguments = parser.parse_args()
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        entries = environments(arguments.data, arguments.output)
        (arguments.output / "environments.yaml").write_text(yaml.safe_dump(entries, sort_keys=False))
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; use another directory", file=sys.stderr)
        return 2
    return 0


def environments(data: Path | None, output: Path) -> list[dict]:
    """The entries of the list; of local data the training rows are written to ``output``."""
    train = {"path": "google-research-datasets/mbpp", "split": "train"}
    test = {"path": "openai/openai_humaneval", "split": "test"}
    if data is not None:
        kept = [line for line in (data / "mbpp.jsonl").read_text().splitlines() if _is_training(line)]
        (output / "mbpp_train.jsonl").write_text("".join(line + "\n" for line in kept))
        train = {"path": str((output / "mbpp_train.jsonl").resolve())}
        test = {"path": str((data / "humaneval.jsonl").resolve())}
    return [
        {"environment": "dataset", "name": "mbpp", "args": {**train, "template": ASK, "reward": "unit_tests"}},
        {
            "environment": "dataset", "name": "humaneval", "evaluation_only": True,
            "args": {**test, "template": COMPLETE, "reward": "unit_tests"},
        },
    ]  # fmt: skip


def _is_training(line: str) -> bool:
    return bool(line.strip()) and json.loads(line)["task_id"] in TRAIN


if __name__ == "__main__":
    sys.exit(main())
