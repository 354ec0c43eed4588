"""Checkpoints: seconds of save and load beside a plain copy of the same bytes, and what a save costs training.

    python -m tools.benchmark.checkpoint --shape 256x6 --json FILE

One rank, weights and Adam's moments in fp32. ``copy`` copies the files of a checkpoint and waits until the disk has
them, as a save does; ``save`` is a whole one: tensors, checksums, sync, rename, and the deletion of the one before.
``read`` reads the files; ``load`` makes weights and moments of them; ``verified load`` compares the checksums before,
as every resume does. ``updates`` are a few optimizer steps, with a save in their midst or without. Files that were just
written are read from memory, not from the disk. Wall clock; all take turns in each round.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import RunState
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.models.gpt import PolicyModel, build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.optimizer import Optimization
from tools.benchmark.common import benchmark_config, command_line, compete, ranks_of, report_rounds


class Bench:
    """A model that is trained on random gradients, and the folders it is saved into."""

    def __init__(
        self, config: RLConfig, policy: PolicyModel, groups: ParallelGroups, folder: Path, updates: int
    ) -> None:
        self._policy, self._folder, self._updates, self._step = policy, folder, updates, 0
        self._optimization = Optimization(policy, config)
        self.manager = CheckpointManager(folder / "saved", 1, groups)
        self.ways: dict[str, Callable[[], object]] = {
            "copy": self._copy,
            "save": self._save,
            "read": lambda: [path.read_bytes() for path in self.newest.iterdir()],
            "load": lambda: self.manager.resume(self.newest, policy, self._optimization),
            "verified load": lambda: self.manager.resume(
                self.manager.find(str(folder / "saved")), policy, self._optimization
            ),
            "updates": lambda: self._train(None),
            "updates with save": lambda: self._train(False),
            "updates with save in background": lambda: self._train(True),
        }
        self._train(None)  # an optimizer without moments would be saved without them
        self._save()

    @property
    def newest(self) -> Path:
        """The folder of the last save."""
        return self._folder / "saved" / f"step_{self._step:07d}"

    def _save(self, in_background: bool = False) -> None:
        self._step += 1
        state = RunState(step=self._step)
        self.manager.save(state, self._policy, self._optimization, in_background=in_background)

    def _train(self, save_in_background: bool | None) -> None:
        """``None`` saves nothing."""
        for number in range(self._updates):
            self._optimization.zero_grad()
            for parameter in self._policy.gpt.parameters():
                parameter.main_grad.normal_()
            self._optimization.step()
            self.manager.poll()
            if save_in_background is not None and number == self._updates // 2:
                self._save(save_in_background)

    def _copy(self) -> None:
        target = self._folder / "copied"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for path in self.newest.iterdir():
            with (target / path.name).open("wb") as file:
                file.write(path.read_bytes())
                os.fsync(file.fileno())

    def milliseconds(self, way: str, _: int) -> float:
        """Of one of the ways."""
        started = time.perf_counter()
        self.ways[way]()
        took = time.perf_counter() - started
        self.manager.finish()  # a save in the background goes on for longer than its updates
        return 1e3 * took


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record."""
    parser = command_line("checkpoint", shape="256x6", vocab=4096, rounds=7)
    parser.add_argument("--updates", type=int, default=6, help="optimizer steps around the save whose cost is taken")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; without it the system's temporary folder")
    arguments = parser.parse_args(argv)
    config = benchmark_config(arguments.shape, 64, "--use-distributed-optimizer", "--micro-batch-size=1")
    with ranks_of(config) as groups, tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        policy = build_model(config, current_platform(), arguments.vocab)
        bench = Bench(config, policy, groups, Path(folder), arguments.updates)
        rounds = compete({way: partial(bench.milliseconds, way) for way in bench.ways}, arguments.rounds)
        size = sum(path.stat().st_size for path in bench.newest.iterdir())
    print(f"{size / 1e6:.1f} MB")
    report_rounds("checkpoint", "ms", arguments, rounds, bytes=size)


if __name__ == "__main__":
    main()
