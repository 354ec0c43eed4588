#!/usr/bin/env python
"""Write the tasks of the example, and the list of environments that names them."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import yaml

from megatron_rl.environments.base import split_of

TASKS = ("sums", "instructions", "gsm8k")
PARTIAL = {"strict": True, "format_reward": 0.1}
"""An answer is a number after ####, and a wrong one is worth something; else any text with a number has an answer."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--output", type=Path, required=True, help="a directory, made if it is not there")
    arguments = parser.parse_args()
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        entry = write_sums(arguments.output) if arguments.task == "sums" else {"environment": arguments.task}
        if arguments.task == "gsm8k":
            entry["args"] = PARTIAL
        (arguments.output / "environments.yaml").write_text(yaml.safe_dump([entry], sort_keys=False))
    except OSError as error:
        print(f"{arguments.output} cannot be written ({error.strerror}); use another directory", file=sys.stderr)
        return 2
    return 0


def write_sums(folder: Path) -> dict:
    """All sums of two numbers below 100 as questions, one in 16 held out, and the entry that reads them."""
    rows: dict[str, list[str]] = {"train": [], "test": []}
    for first in range(100):
        for second in range(100):
            question = f"What is {first} plus {second}?"
            row = json.dumps({"question": question, "answer": str(first + second)})
            rows[split_of(question)].append(f"{row}\n")
    files = {split: folder / f"sums_{split}.jsonl" for split in rows}
    for split, path in files.items():
        random.Random(split).shuffle(rows[split])
        path.write_text("".join(rows[split]))
    columns = {"prompt": "question", "answer": "answer", "reward": "exact_number"}
    paths = {"path": str(files["train"].resolve()), "test_path": str(files["test"].resolve())}
    return {"environment": "dataset", "name": "sums", "args": {**paths, **columns}}


if __name__ == "__main__":
    sys.exit(main())
