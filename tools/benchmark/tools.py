"""Makes ``python tools/benchmark/NAME.py`` work like ``python -m tools.benchmark.NAME``.

A file run by its path has its own folder first on the path, so its ``from tools.benchmark...`` finds this
module, which points to the real folder. With ``-m`` nobody sees it.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[1])]
