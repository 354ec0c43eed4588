"""The one HTML file of a report or a comparison: style, data and scripts put into ``page.html``."""

from __future__ import annotations

import json
from importlib.resources import files

from megatron_rl.metrics.jsonl import to_plain

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def build_page(data: object, *scripts: str) -> str:
    """A page that fetches nothing, with ``data`` and the files that show it; they run in this order, as one script."""
    parts = {
        "__STYLE__": _read("page.css"),
        "__SCRIPT__": "\n".join(_read(name) for name in ("base.js", "charts.js", *scripts)),
        "__REPORT_DATA__": to_script_json(data),  # the last: it may hold any text, these words too
    }
    page = _read("page.html")
    for place, text in parts.items():
        page = page.replace(place, text, 1)
    return page


def to_script_json(value: object) -> str:
    """Strict JSON that cannot leave the ``<script>`` element it is put in.

    Completions are written by a model under training: one of them will contain ``</script>`` or ``<!--``.
    ``json`` itself escapes everything outside ASCII, the line separators U+2028 and U+2029 included.
    """
    text = json.dumps(to_plain(value), allow_nan=False, separators=(",", ":"))
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _read(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
