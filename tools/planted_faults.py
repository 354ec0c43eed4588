#!/usr/bin/env python
"""Measure what the tests find: plant small faults in the library, one at a time, and run the tests that execute them.

    pip install coverage
    python -m tools.planted_faults record --output DIR [-- pytest arguments]   # which test file executes which line
    python -m tools.planted_faults run --output DIR --count 100 --seed 1       # goes on where it was stopped
    python -m tools.planted_faults table --output DIR

A fault is one changed comparison, constant, sign or index, or one omitted statement; at most three are in one file. For
each fault the test files that execute its line run, those that execute least first, for at most ``--seconds``.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.metrics.console import format_table

ROOT = Path(__file__).resolve().parents[1]
PER_FILE = 3
FILES_AT_ONCE = 10
OPPOSITES = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.In: ("in", "not in"),
}  # fmt: skip
SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*")}
COVERAGE = """[run]
source = {source}
data_file = {output}/coverage
parallel = true
sigterm = true
context = ${{PLANTED_FAULTS_TEST-}}
patch = subprocess, fork, _exit
concurrency = multiprocessing, thread
"""


@dataclass(frozen=True)
class Fault:
    """One change of a source file: ``source[start:end]`` becomes ``new``."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    old: str
    new: str

    def plant(self, source: str) -> str:
        """Return the source with the fault in it."""
        if source[self.start : self.end] != self.old:
            raise SystemExit(f"{self.path}:{self.line}: the file has changed since its faults were chosen")
        return source[: self.start] + self.new + source[self.end :]


def find_faults(path: str, source: str) -> list[Fault]:
    """Return every fault that could be planted in a source file, in the order of its lines."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines()

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node: ast.AST) -> tuple[int, int]:
        return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)

    found = []
    for node in _executed(ast.parse(source)):
        for kind, start, end, new in _changes(node, span, source):
            found.append(Fault(path, node.lineno, kind, start, end, source[start:end], new))
    return sorted(set(found), key=lambda fault: (fault.start, fault.kind))


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below ``tree``, without annotations and what only type checkers read."""
    skipped = {"annotation", "returns"}
    if isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING":
        return
    for name, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in skipped:
                if hasattr(child, "lineno"):
                    yield child
                yield from _executed(child)


def _changes(node: ast.AST, span, source: str) -> Iterator[tuple[str, int, int, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPPOSITES:
        yield from _operator("comparison", *OPPOSITES[type(node.ops[0])], node.left, node.comparators[0], span, source)
    elif isinstance(node, ast.BinOp) and type(node.op) in SIGNS and not _is_text(node):
        yield from _operator("sign", *SIGNS[type(node.op)], node.left, node.right, span, source)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        start, end = span(node)
        if isinstance(node.value, bool):
            new = str(not node.value)
        else:
            new = str(node.value + 1) if isinstance(node.value, int) else repr(node.value * 1.5 or 1.0)
        yield "constant", start, end, new
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        for bound in (node.slice.lower, node.slice.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                start, end = span(bound)
                yield "index", start, end, f"({source[start:end]}) + 1"
    elif _can_be_omitted(node):
        yield "omitted", *span(node), "pass"


def _operator(kind: str, old: str, new: str, left: ast.AST, right: ast.AST, span, source: str):
    start, end = span(left)[1], span(right)[0]
    place = source.find(old, start, end)
    if place >= 0 and "#" not in source[start:place]:
        yield kind, place, place + len(old), new


def _can_be_omitted(node: ast.AST) -> bool:
    """A call for its effect, or an assignment to something that exists already."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(s, ast.JoinedStr | ast.Constant) and not _is_number(s) for s in sides)


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def choose(root: Path, count: int, seed: int) -> list[Fault]:
    """Return ``count`` faults of the library: kinds in turn, at most `PER_FILE` in a file, drawn with ``seed``."""
    by_kind = collections.defaultdict(list)
    for path in sorted((root / "megatron_rl").rglob("*.py")):
        name = str(path.relative_to(root))
        for fault in find_faults(name, path.read_text()):
            by_kind[fault.kind].append(fault)
    draw = random.Random(seed)
    for faults in by_kind.values():
        draw.shuffle(faults)
    chosen, used = [], collections.Counter()
    while len(chosen) < count and any(by_kind.values()):
        for kind in sorted(by_kind):
            while by_kind[kind]:
                fault = by_kind[kind].pop()
                if used[fault.path] < PER_FILE:
                    used[fault.path] += 1
                    chosen.append(fault)
                    break
    return chosen[:count]


def switch_context() -> None:
    """Tell coverage which test file runs; processes that tests start know it by their environment."""
    import coverage

    if (current := coverage.Coverage.current()) is not None:
        current.switch_context(os.environ["PLANTED_FAULTS_TEST"])


class TestFiles:
    """A pytest plugin: tells coverage, here and in child processes, which test file runs, and adds up its seconds."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._files: dict[str, dict[str, float]] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Switch to the context of the test's file."""
        os.environ["PLANTED_FAULTS_TEST"] = nodeid.split("::")[0]
        switch_context()

    def pytest_runtest_logreport(self, report) -> None:
        """Add a phase of a test to its file."""
        file = self._files.setdefault(report.nodeid.split("::")[0], {"seconds": 0.0, "failed": 0})
        file["seconds"] += report.duration
        file["failed"] += report.failed

    def pytest_sessionfinish(self, session) -> None:
        """Write the table of files, in the process that hands out the tests."""
        if not hasattr(session.config, "workerinput"):
            (self._output / "files.json").write_text(json.dumps(self._files, indent=0))


def pytest_configure(config) -> None:
    """Register the plugin where ``-p tools.planted_faults`` loads this module."""
    config.pluginmanager.register(TestFiles(Path(os.environ["PLANTED_FAULTS_OUTPUT"])))


def record(output: Path, arguments: list[str]) -> int:
    """Run the tests under coverage."""
    output.mkdir(parents=True, exist_ok=True)
    settings = output / "coveragerc"
    settings.write_text(COVERAGE.format(output=output, source=ROOT / "megatron_rl"))
    environment = os.environ | {"PLANTED_FAULTS_OUTPUT": str(output), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    coverage, rcfile = [sys.executable, "-m", "coverage"], f"--rcfile={settings}"
    pytest = ["-m", "pytest", "-p", "tools.planted_faults", *arguments]
    code = subprocess.call([*coverage, "run", rcfile, *pytest], cwd=ROOT, env=environment)
    subprocess.check_call([*coverage, "combine", rcfile], cwd=ROOT)
    return code


def run(output: Path, count: int, seed: int, seconds: float) -> int:
    """Plant each fault in a copy of the tree and run the tests that execute its line."""
    import coverage

    data = coverage.CoverageData(str(output / "coverage"))
    data.read()
    files = json.loads((output / "files.json").read_text())
    breadth = collections.Counter()
    for path in data.measured_files():
        for contexts in data.contexts_by_lineno(path).values():
            breadth.update(contexts)
    results = output / f"faults_{seed}.jsonl"
    done = {_place(json.loads(line)) for line in results.read_text().splitlines()} if results.exists() else set()
    tree = output / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.check_call(["git", "clone", "-q", str(ROOT), str(tree)])
    for fault in choose(tree, count, seed):
        if _place(asdict(fault)) in done:
            continue
        contexts = data.contexts_by_lineno(str(ROOT / fault.path)).get(fault.line, [])
        tests = [name for name in {c.split("|")[0] or c.split("|")[-1] for c in contexts} if name in files]
        tests = sorted((t for t in tests if not files[t]["failed"]), key=lambda t: (breadth[t], t))
        outcome = _try(tree, fault, tests, files, seconds)
        with results.open("a") as stream:
            stream.write(json.dumps(asdict(fault) | {"tests": len(tests), "outcome": outcome}) + "\n")
        print(f"{outcome:10} {fault.path}:{fault.line} {fault.kind}: {fault.old!r} -> {fault.new!r}", flush=True)
    return 0


def _place(fault: dict) -> tuple[str, int]:
    return fault["path"], fault["start"]


def _try(tree: Path, fault: Fault, tests: list[str], files: dict, seconds: float) -> str:
    """Return ``found``, ``missed``, or ``not run`` where no test executes the line."""
    if not tests:
        return "not run"
    path = tree / fault.path
    source = path.read_text()
    path.write_text(fault.plant(source))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(tree)}
    try:
        while tests and seconds > 0:
            some, tests = tests[:FILES_AT_ONCE], tests[FILES_AT_ONCE:]
            expected = sum(files[name]["seconds"] for name in some)
            command = [sys.executable, "-m", "pytest", "-x", *some]
            # A fault that makes the tests five times as slow, or hang, is found.
            code = subprocess.run(
                command, cwd=tree, env=environment, timeout=60 + 5 * expected, stdout=subprocess.DEVNULL
            ).returncode
            if code:
                return "found"
            seconds -= expected
    except subprocess.TimeoutExpired:
        return "found"
    finally:
        path.write_text(source)
    return "missed"


def table(output: Path) -> int:
    """Print how many faults of each kind were found, and the missed ones."""
    for path in sorted(output.glob("faults_*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        counts = collections.Counter((row["kind"], row["outcome"]) for row in rows)
        outcomes = ("found", "missed", "not run")
        kinds = sorted({kind for kind, _ in counts})
        total = ("all", *(sum(counts[kind, outcome] for kind in kinds) for outcome in outcomes))
        print(path.name)
        print(format_table(("kind", *outcomes), [(k, *(counts[k, o] for o in outcomes)) for k in kinds] + [total]))
        for row in rows:
            if row["outcome"] == "missed":
                print(f"missed: {row['path']}:{row['line']} {row['kind']}: {row['old']!r} -> {row['new']!r}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "run", "table"))
    parser.add_argument("--output", type=lambda name: Path(name).resolve(), required=True)
    parser.add_argument("--count", type=int, default=100, help="faults to plant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=240.0, help="of tests, as recorded, for a fault")
    own, _, of_pytest = (" ".join(sys.argv[1:])).partition(" -- ")
    arguments = parser.parse_args(own.split())
    if arguments.action == "record":
        return record(arguments.output, of_pytest.split())
    if arguments.action == "run":
        return run(arguments.output, arguments.count, arguments.seed, arguments.seconds)
    return table(arguments.output)


if __name__ == "__main__":
    sys.exit(main())
