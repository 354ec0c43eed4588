"""Triton kernels over the paged KV cache. Importing this package does not import Triton.

`paged_decode` (one token a row, the keys cut into splits) and `paged_extend` (several tokens a sequence) import it,
so import them only where `problem` is None. Their twin in plain torch is ``backends/paged.py``.
"""

from __future__ import annotations

import functools
import importlib.util
import os


def problem(device_type: str) -> str | None:
    """Why the kernels cannot run on ``cpu`` or ``cuda``; None if they can.

    Triton's interpreter (``TRITON_INTERPRET=1`` before Triton's import) runs them on a CPU, for tests.
    """
    if not _has_triton():
        return "needs Triton, which is not installed"
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a CUDA device"
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
