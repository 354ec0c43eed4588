"""Checkpoints: bandwidth of save and load against a plain copy of the same bytes, and what a save costs training.

    python tools/benchmark/checkpoint.py --shape 256x6 --json FILE

One rank, weights and Adam's moments in fp32. ``copy`` copies the files of a checkpoint and waits until the disk has
them, as a save does; ``save`` is a whole one: tensors, checksums, sync, rename, and the deletion of the one before.
``read`` reads the files; ``load`` makes weights and moments of them; ``verified load`` compares the checksums before,
as every resume does. Files that were just written are read from memory, not from the disk. Wall clock; all take turns
in each round.

What a save costs training: a few updates with a save in their midst, less the same updates without one. A save in the
background may go on after the last of them, uncounted; on a CPU its writer takes processor time from the updates.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint import CheckpointManager, RunState
from megatron_rl.config import RLConfig
from megatron_rl.metrics.table import format_table
from megatron_rl.models import PolicyModel, build_model
from megatron_rl.parallel import ParallelGroups, initialize, seed_everything, shut_down
from megatron_rl.platform import current_platform
from megatron_rl.trainer import Optimization
from tools.benchmark.common import Shape, benchmark_config, prepare, provenance, turn_order, write_record

WAYS = ("copy", "save", "read", "load", "verified load")
AGAINST = {"save": "copy", "load": "read", "verified load": "read"}
"""What each way is compared with: the least it could take."""
SAVES = ("updates with save", "updates with save in background")
Round = dict[str, float]
"""Seconds of each way in one round, and of the updates with and without a save."""


class Bench:
    """A model that is trained on random gradients, and the folders it is saved into."""

    def __init__(
        self, config: RLConfig, policy: PolicyModel, groups: ParallelGroups, folder: Path, updates: int
    ) -> None:
        self._policy, self._groups, self._folder, self._updates = policy, groups, folder, updates
        self._optimization = Optimization(policy, config)
        self._step = 0
        self.manager = CheckpointManager(folder / "saved", 1, groups)
        self.ways: dict[str, Callable[[], object]] = {
            "copy": self._copy,
            "save": self.save,
            "read": self._read,
            "load": lambda: self._load(self.newest),
            "verified load": lambda: self._load(self.manager.find(str(folder / "saved"))),
            "updates": lambda: self._train(with_save=False),
            "updates with save": lambda: self._train(with_save=True),
            "updates with save in background": lambda: self._train(with_save=True, in_background=True),
        }
        self.update()  # an optimizer without moments would be saved without them
        self.save()

    @property
    def newest(self) -> Path:
        """The folder of the last save."""
        return self._folder / "saved" / f"step_{self._step:07d}"

    @property
    def bytes(self) -> int:
        """Of one checkpoint."""
        return sum(path.stat().st_size for path in self.newest.iterdir())

    def update(self) -> None:
        """An optimizer step on random gradients: what a step costs apart from making them."""
        self._optimization.zero_grad()
        for parameter in self._policy.gpt.parameters():
            parameter.main_grad.normal_()
        self._optimization.step()

    def save(self, in_background: bool = False) -> None:
        """The next step's checkpoint; the one before it is deleted."""
        self._step += 1
        state = RunState(step=self._step)
        self.manager.save(state, self._policy, self._optimization, in_background=in_background)

    def _train(self, with_save: bool, in_background: bool = False) -> None:
        for number in range(self._updates):
            self.update()
            self.manager.poll()
            if with_save and number == self._updates // 2:
                self.save(in_background)

    def _copy(self) -> None:
        target = self._folder / "copied"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for path in self.newest.iterdir():
            shutil.copyfile(path, target / path.name)
            _sync(target / path.name)
        _sync(target)

    def _read(self) -> None:
        for path in self.newest.iterdir():
            path.read_bytes()

    def _load(self, directory: Path) -> None:
        self.manager.resume(directory, self._policy, self._optimization)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def measure(bench: Bench, rounds: int) -> list[Round]:
    """Everything once untimed, then in turns."""
    for way in bench.ways.values():
        way()
        bench.manager.finish()
    results = []
    for index in range(rounds):
        seconds = {}
        for name in turn_order(list(bench.ways), index):
            started = time.perf_counter()
            bench.ways[name]()
            seconds[name] = time.perf_counter() - started
            bench.manager.finish()  # a save in the background goes on for longer than its updates
        results.append(seconds)
    return results


def summarise(rounds: Sequence[Round], size: int) -> dict[str, Any]:
    """Medians and extremes; ratios are of the same round, so that what slows a whole round cancels out.

    ``relative_speed``: 0.5 takes twice as long as what it is compared with.
    """
    columns = {name: [seconds[name] for seconds in rounds] for name in rounds[0]}
    pairs = {way: [seconds[other] / seconds[way] for seconds in rounds] for way, other in AGAINST.items()}
    stolen = {way: [seconds[way] - seconds["updates"] for seconds in rounds] for way in SAVES}
    return {
        "bytes": size,
        "seconds": {name: statistics.median(values) for name, values in columns.items()},
        "spread": {name: [min(values), max(values)] for name, values in columns.items()},
        "megabytes_per_second": {way: size / 1e6 / statistics.median(columns[way]) for way in WAYS},
        "relative_speed": {way: statistics.median(values) for way, values in pairs.items()},
        "relative_speed_spread": {way: [min(values), max(values)] for way, values in pairs.items()},
        "stolen_seconds": {way: statistics.median(values) for way, values in stolen.items()},
        "stolen_spread": {way: [min(values), max(values)] for way, values in stolen.items()},
        "rounds": list(rounds),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build a model, measure, and say where."""
    prepare()
    config = benchmark_config(arguments.shape, 64, "--use-distributed-optimizer", "--micro-batch-size=1")
    platform = current_platform()
    groups = initialize(config.parallel, platform)
    try:
        seed_everything(1)
        policy = build_model(config, platform, arguments.vocab)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            bench = Bench(config, policy, groups, Path(folder), arguments.updates)
            record = summarise(measure(bench, arguments.rounds), bench.bytes)
    finally:
        shut_down()
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "folder", "shape")}
    return {**record, "settings": {"shape": asdict(arguments.shape), **settings},
            **provenance("checkpoint")}  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; the defaults make a checkpoint of some 80 MB."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.checkpoint")
    parser.add_argument("--shape", type=Shape.parse, default=Shape(256, 6), help="hidden size x layers: 256x6")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--updates", type=int, default=6, help="optimizer steps around the save whose cost is taken")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; without it the system's temporary folder")
    parser.add_argument("--json", type=Path, help="write the record here")
    return parser.parse_args(argv)


def table(record: Mapping[str, Any]) -> str:
    """A line for each way."""
    rows = []
    for way in WAYS:
        low, high = record["spread"][way]
        speed, seconds = record["megabytes_per_second"][way], record["seconds"][way]
        row = [way, round(speed), f"{1e3 * seconds:.0f}", f"{1e3 * low:.0f} .. {1e3 * high:.0f}"]
        rows.append([*row, record["relative_speed"].get(way)])
    return format_table(["way", "MB / s", "ms", "spread", "/ copy, / read"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record."""
    arguments = parse(argv)
    record = run(arguments)
    print(table(record))
    print(f"{record['bytes'] / 1e6:.1f} MB; {torch.get_num_threads()} thread; a save takes from training:")
    for way in SAVES:
        low, high = record["stolen_spread"][way]
        print(f"  {way}: {record['stolen_seconds'][way]:.3f} s ({low:.3f} .. {high:.3f})")
    write_record(arguments.json, record)


if __name__ == "__main__":
    main()
