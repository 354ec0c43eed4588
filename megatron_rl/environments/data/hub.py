"""Rows of a data set on the Hugging Face hub, or of its copy in the local cache."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock

from megatron_rl.errors import ConfigError

BATCH = 1024
PROBE_SECONDS = 5.0
"""The hub's own client tries for half a minute, for every file, before it gives up."""


def read_hub(
    name: str, config: str | None, split: str, wanted: Collection[str], instead: str
) -> Iterator[tuple[int, Any]]:
    """Pairs of row number, from 1, and row; ``instead`` says in errors which file may be passed."""
    # imported here: `datasets` takes five seconds, which local files need not pay
    import datasets

    with contextlib.ExitStack() as stack:
        if not datasets.config.HF_HUB_OFFLINE and not _answers(datasets.config.HF_ENDPOINT):
            stack.enter_context(_offline())
        stack.callback(datasets.enable_progress_bars)
        datasets.disable_progress_bars()
        try:
            rows = datasets.load_dataset(name, config, split=split)
        except Exception as error:
            # a dozen types in three libraries: no network, no such data set, no access, a broken download
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError([f"cannot read {name} from the Hugging Face hub ({why}); {instead}"]) from error
    if set(wanted) <= set(rows.column_names):
        rows = rows.select_columns(list(wanted))
    number = 0
    for batch in rows.with_format("arrow").iter(BATCH):
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _answers(endpoint: str) -> bool:
    """Whether anything answers there, be it an error."""
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """What HF_HUB_OFFLINE=1 does, for one call: the cache is used, or the call fails at once."""
    with (
        mock.patch("datasets.config.HF_HUB_OFFLINE", True),
        mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
    ):
        yield
