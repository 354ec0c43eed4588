"""What a run is told goes into its checkpoints, so that a start that goes on can say what has changed."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.rl_config import RLConfig, all_flags, to_dict

_OF_A_START = ("checkpoint", "logging", "compatibility")
"""Sections that say where a start reads and writes."""
_TOLD_OTHERWISE = ("config", "hf_config")
"""Files that give values to other flags."""

logger = logging.getLogger(__name__)


class Settings:
    """By field name; of a file, such as the environment list, the checksum as the run began with it."""

    def __init__(self, config: RLConfig) -> None:
        self._config = config
        self._files: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        sections = [section for name, section in to_dict(config).items() if name not in _OF_A_START]
        values = {name: value for section in sections for name, value in section.items()}
        for flag in all_flags():
            value = values.get(flag.name)
            if flag.path and value is not None and os.path.isfile(value):
                self._files[flag.name] = value = hashlib.sha256(Path(value).read_bytes()).hexdigest()
            elif flag.path and value is not None and os.path.exists(value):
                value = os.path.realpath(value)
            if flag.name in values and flag.name not in _TOLD_OTHERWISE:
                self._values[flag.name] = value

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return dict(self._values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Say what was another when ``state`` was saved; this start's values hold."""
        changed = []
        for flag in all_flags():
            known = flag.name in state and flag.name in self._values
            if known and state[flag.name] != self._values[flag.name]:
                before = "other content" if flag.name in self._files else flag.typed(state[flag.name])
                changed.append(f"{flag.typed(self._config.value(flag.name))} (was {before})")
        if changed:
            logger.info("changed since the checkpoint: %s", ", ".join(changed))
