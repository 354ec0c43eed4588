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
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import RunState
from megatron_rl.config import RLConfig
from megatron_rl.metrics.table import format_table
from megatron_rl.models import PolicyModel, build_model
from megatron_rl.parallel import ParallelGroups
from megatron_rl.trainer import Optimization
from tools.benchmark.common import Shape, benchmark_config, command_line, one_rank, record_of, turn_order, write_record


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
            "load": lambda: self._load(self.newest),
            "verified load": lambda: self._load(self.manager.find(str(folder / "saved"))),
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

    def _load(self, directory: Path) -> None:
        self.manager.resume(directory, self._policy, self._optimization)


def measure(bench: Bench, rounds: int) -> list[dict[str, float]]:
    """Seconds of everything, once untimed, then in turns."""
    results = []
    for index in range(rounds + 1):
        seconds = {}
        for name in turn_order(list(bench.ways), index):
            started = time.perf_counter()
            bench.ways[name]()
            seconds[name] = time.perf_counter() - started
            bench.manager.finish()  # a save in the background goes on for longer than its updates
        results.append(seconds)
    return results[1:]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record."""
    parser = command_line("checkpoint", shape=Shape(256, 6), vocab=4096, rounds=7)
    parser.add_argument("--updates", type=int, default=6, help="optimizer steps around the save whose cost is taken")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; without it the system's temporary folder")
    arguments = parser.parse_args(argv)
    config = benchmark_config(arguments.shape, 64, "--use-distributed-optimizer", "--micro-batch-size=1")
    with one_rank() as (platform, groups), tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        policy = build_model(config, platform, arguments.vocab)
        bench = Bench(config, policy, groups, Path(folder), arguments.updates)
        rounds = measure(bench, arguments.rounds)
        size = sum(path.stat().st_size for path in bench.newest.iterdir())
    columns = {name: [seconds[name] for seconds in rounds] for name in rounds[0]}
    medians = {name: statistics.median(values) for name, values in columns.items()}
    rows = [[name, f"{1e3 * medians[name]:.0f}", f"{1e3 * min(values):.0f} .. {1e3 * max(values):.0f}"]
            for name, values in columns.items()]  # fmt: skip
    print(f"{size / 1e6:.1f} MB")
    print(format_table(["way", "ms", "spread"], rows))
    write_record(arguments.json, record_of("checkpoint", arguments, bytes=size, seconds=medians, rounds=rounds))


if __name__ == "__main__":
    main()
