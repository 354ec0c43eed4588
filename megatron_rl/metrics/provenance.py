"""Where a run came from: versions, commit, host."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from megatron_rl.signals import by_torchrun

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "triton", "megatron-rl")
GIT_TIMEOUT_S = 10.0


def package_versions() -> dict[str, str]:
    """Python and the packages that decide the numbers; those not installed are left out."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def git_commit(source: Path | None = None) -> str | None:
    """Commit of the checkout this library runs from, ``-dirty`` when edited; ``None`` outside a checkout."""
    folder = source or Path(__file__).parent
    if "site-packages" in folder.parts:
        # Installed into a virtual environment: the repository around it is the user's, not ours.
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def typed_command(argv: Sequence[str]) -> list[str]:
    """The words that start this again, the launcher's included; ``argv`` itself if no command line ends with its flags.

    ``argv[0]`` is what Python makes of the program: it says nothing of ``torchrun``, ``-m`` or the interpreter.
    """
    flags = list(argv[1:])
    for words in (_launcher(), sys.orig_argv):
        if words[len(words) - len(flags) :] == flags and words:
            return list(words)
    return list(argv)


def _launcher() -> list[str]:
    """torchrun's command line; empty if this process is not torchrun's."""
    if not by_torchrun():
        return []
    try:
        return psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):  # it has ended, or may not be looked at
        return []
