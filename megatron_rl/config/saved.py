"""What a checkpoint of ours says of its model, so that a start from its weights need not. No torch: it is JSON."""

from __future__ import annotations

import re
from glob import glob
from pathlib import Path
from typing import Any

from megatron_rl.user_files import read_json

FILE_NAME = "run_state.json"
_STEP = re.compile(r"(?:step|iter)_(\d{7,})")


def saved_model(path: str) -> tuple[Path, dict[str, Any], dict[str, Any], int] | None:
    """A checkpoint's file, the flags that two runs must share to share weights, other flags of the model, and the seed
    of the run.

    None where there is none, or one of Megatron-LM or of an earlier version, which do not say. Whether it is whole is
    found out later: all checkpoints of a run say the same. A pattern stands for what it matches.
    """
    for place in sorted(glob(path)) or [path]:
        for root in (Path(place), Path(place) / "checkpoints"):
            steps = [found for found in root.glob(f"*/{FILE_NAME}") if _STEP.fullmatch(found.parent.name)]
            steps.sort(key=lambda found: int(_STEP.fullmatch(found.parent.name)[1]))
            for file in (root / FILE_NAME, *reversed(steps)):
                try:
                    values = read_json(file)
                    if values.get("flags"):
                        return file, dict(values["architecture"]), dict(values["flags"]), int(values["seed"])
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue  # whoever loads it tells what is wrong
    return None
