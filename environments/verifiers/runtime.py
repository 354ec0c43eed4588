"""Where verifiers runs programs of the runtime ``subprocess``: in the sample's own directory, with this interpreter."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from verifiers.v1 import runtimes


class BesideTheSample(runtimes.SubprocessRuntime):
    """As verifiers' own, which wants a home directory and ``uv``; the process of a sample has neither.

    The dependencies of verifiers' scripts are those of verifiers, so this interpreter has them.
    """

    async def start(self) -> None:
        """The sample's working directory is removed with it, however it ends."""
        self.workdir = Path.cwd() / self.name
        self.workdir.mkdir()
        self.info.id = str(self.workdir)

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        """The command that runs the script."""
        data = script.encode() if isinstance(script, str) else script
        path = self.workdir / f"{hashlib.sha256(data).hexdigest()[:16]}.py"
        path.write_bytes(data)
        return [sys.executable, str(path)]


def use_this_interpreter() -> None:
    """For all episodes of this process; verifiers looks its runtime up by this name."""
    runtimes.SubprocessRuntime = BesideTheSample
