#!/usr/bin/env python
"""Write the environment list: MBPP's published training rows (601 to 974), and HumanEval as the held-out test.

``--data`` is a directory with mbpp.jsonl and humaneval.jsonl as published; without it both come from the hub.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

TRAIN = range(601, 975)
ASK = "{text} Your code should pass these tests:\n{test_list}"
COMPLETE = "Complete this function:\n{prompt}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    train = {"path": "google-research-datasets/mbpp", "split": "train"}
    test = {"path": "openai/openai_humaneval", "split": "test"}
    if arguments.data is not None:
        kept = [line for line in (arguments.data / "mbpp.jsonl").read_text().splitlines() if _is_training(line)]
        (output / "mbpp_train.jsonl").write_text("".join(line + "\n" for line in kept))
        train = {"path": str((output / "mbpp_train.jsonl").resolve())}
        test = {"path": str((arguments.data / "humaneval.jsonl").resolve())}
    entries = [
        {"environment": "dataset", "name": "mbpp", "args": {**train, "template": ASK, "reward": "unit_tests"}},
        {
            "environment": "dataset", "name": "humaneval", "evaluation_only": True,
            "args": {**test, "template": COMPLETE, "reward": "unit_tests"},
        },
    ]  # fmt: skip
    (output / "environments.yaml").write_text(yaml.safe_dump(entries, sort_keys=False))


def _is_training(line: str) -> bool:
    return bool(line.strip()) and json.loads(line)["task_id"] in TRAIN


if __name__ == "__main__":
    main()
