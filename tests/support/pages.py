"""What the script of a page shows, run in node (`page.js`)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

NODE = shutil.which("node")


def shown_by(page: Path) -> dict[str, Any]:
    command = [NODE, str(Path(__file__).with_name("page.js")), str(page)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
