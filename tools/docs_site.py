"""What mkdocs does with links that leave ``docs/``: the README becomes the first page, files are shown as they are.

``mkdocs.yml`` names this file as a hook.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Page of the site -> file in the root of the repository."""
_LINK = re.compile(r"(?<!!)\[((?:[^][]|\[[^]]*\])*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Pages of the folders come last, in the order of their names."""
    for folder in ("measurements", "decisions"):
        pages = sorted((ROOT / "docs" / folder).glob("*.md"))
        config.nav.append({folder.capitalize(): [f"{folder}/{page.name}" for page in pages]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, and every file outside ``docs/`` that a page links to."""
    for name, source in FROM_ROOT.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for file in [file for file in files if file.src_uri.endswith(".md")]:
        for _, target, _ in _LINK.findall(file.content_string):
            outside = _path(file.src_uri, target)
            name = f"source/{outside}.txt"
            if outside is not None and (ROOT / outside).is_file() and name not in files.src_uris:
                files.append(File.generated(config, name, content=(ROOT / outside).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to the pages of the site, and to the files that `on_files` has added; of a folder the text alone."""
    here = page.file.src_uri
    pages = {ROOT / source: name for name, source in FROM_ROOT.items()}

    def changed(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = (_source_folder(here) / target).resolve()
        outside = _path(here, target)
        if path in pages:
            wanted = pages[path]
        elif outside is None:
            wanted = path.relative_to(ROOT / "docs").as_posix()
        else:
            wanted = f"source/{outside}.txt"
        if path.is_dir():
            return text
        return f"[{text}]({os.path.relpath(wanted, os.path.dirname(here) or '.')}{anchor})"

    if here in FROM_ROOT:
        markdown = markdown.replace("](docs/images/", "](images/")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(changed, part) for part in parts)


def _source_folder(page: str) -> Path:
    return ROOT if page in FROM_ROOT else (ROOT / "docs" / page).parent


def _path(page: str, target: str) -> str | None:
    """From the repository's root, of what is outside ``docs/`` and no page; else None."""
    path = (_source_folder(page) / target).resolve()
    within = path.is_relative_to(ROOT / "docs") or path in {ROOT / source for source in FROM_ROOT.values()}
    return None if within or not path.is_relative_to(ROOT) else path.relative_to(ROOT).as_posix()
