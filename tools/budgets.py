"""Compare the size of code and documents with the budgets of tools/budgets.toml; exit 1 where one is exceeded.

    python -m tools.budgets              what exceeds its budget; nothing where all hold
    python -m tools.budgets --figures    every figure beside its budget

Everything is read from the sources (`ast`); nothing of the project is imported.
"""

import argparse
import ast
import gc
import re
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "megatron_rl"
TREES = ("megatron_rl", "environments", "tools", "examples", "tests")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOKED_AT = (*FUNCTIONS, ast.ClassDef, ast.Attribute, ast.Name, ast.ImportFrom, ast.Call)
WITHOUT_CHILDREN = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop, ast.Constant)
PRIVATE = re.compile(r"_[a-zA-Z]\w*")


@dataclass(frozen=True)
class Figure:
    name: str
    value: int
    budget: int


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file that something here looks at, outer ones first."""
    found, level = [], [parsed(path)]
    while level:
        found += [node for node in level if isinstance(node, LOOKED_AT)]
        level = [child for node in level for child in _children(node)]
    return tuple(found)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """As `ast.iter_child_nodes`, in a third of its time."""
    for name in node._fields:
        value = getattr(node, name, None)
        if value.__class__ is list:
            yield from (item for item in value if isinstance(item, ast.AST))
        elif isinstance(value, ast.AST) and not isinstance(value, WITHOUT_CHILDREN):
            yield value


def python_files(*trees: str) -> list[Path]:
    return sorted(path for tree in trees for path in (ROOT / tree).rglob("*.py") if "runs" not in path.parts)


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def package_of(path: Path) -> str:
    parts = path.relative_to(LIBRARY).parts
    return parts[0] if len(parts) > 1 else "."


def package_lines() -> dict[str, int]:
    """Return the lines of each package of the library; `.` stands for the modules that are in none."""
    found: dict[str, int] = {}
    for path in python_files("megatron_rl"):
        found[package_of(path)] = found.get(package_of(path), 0) + lines(path)
    return found


def record_fields() -> dict[str, int]:
    """Return the number of fields of each dataclass, `NamedTuple` and `TypedDict` of the library, by class name.

    A record that extends another one of its file has the fields of both.
    """
    found: dict[str, int] = {}
    for path in python_files("megatron_rl"):
        own: dict[str, int] = {}
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and _is_record(node):
                fields = sum(isinstance(item, ast.AnnAssign) for item in node.body)
                own[node.name] = fields + sum(own.get(ast.unparse(base), 0) for base in node.bases)
                found[node.name] = max(own[node.name], found.get(node.name, 0))
    return found


def _is_record(node: ast.ClassDef) -> bool:
    marks = [ast.unparse(mark) for mark in (*node.decorator_list, *node.bases)]
    return any(mark.split("(")[0].endswith(("dataclass", "NamedTuple", "TypedDict")) for mark in marks)


def long_files() -> dict[str, int]:
    """Return the lines of each file of the repository, by its path."""
    return {str(path.relative_to(ROOT)): lines(path) for path in python_files(*TREES)}


def long_functions() -> dict[str, int]:
    """Return the lines of each function of the repository, by `path:name`; of equal names the longest."""
    found: dict[str, int] = {}
    for path in python_files(*TREES):
        for node in nodes(path):
            if isinstance(node, FUNCTIONS):
                name = f"{path.relative_to(ROOT)}:{node.name}"
                found[name] = max(node.end_lineno - node.lineno + 1, found.get(name, 0))
    return found


def private_reaches(of_others: Collection[str]) -> list[str]:
    """Return where tests read a private name that the library defines: `path:line name`, one for each place.

    `of_others` are names that the library and another package both define, where tests mean the other's.
    """
    ours = {name for path in python_files("megatron_rl", "environments") for name in _private_definitions(path)}
    ours -= set(of_others)
    found = []
    for path in python_files("tests"):
        own = set(_private_definitions(path))
        for node in nodes(path):
            found += [f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in _reached(node) if name in ours - own]
    return sorted(found)


def _private_definitions(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = [node.attr]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        else:
            continue
        yield from (name for name in names if PRIVATE.fullmatch(name))


def _reached(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return [] if of_itself else [node.attr]
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("megatron_rl", "environments"):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
        return [str(word.value).split(".")[-1] for word in node.args if isinstance(word, ast.Constant)]
    return []


def longest_import_chain() -> list[str]:
    """Return the longest chain of modules of the library that import each other at import time."""
    modules = {_module_name(path): path for path in python_files("megatron_rl")}
    imports = {name: _imports(path, name, modules) for name, path in modules.items()}
    best: dict[str, list[str]] = {}

    def chain(name: str, above: frozenset[str]) -> list[str]:
        if name not in best:
            longest = (chain(below, above | {name}) for below in imports[name] if below not in above)
            best[name] = [name, *max(longest, key=len, default=[])]
        return best[name]

    return max((chain(name, frozenset()) for name in modules), key=len)


def _module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def _imports(path: Path, name: str, modules: dict[str, Path]) -> set[str]:
    """Return the modules that `path` imports when it is itself imported: not those in functions or for typing."""
    found: set[str] = set()
    pending: list[ast.stmt] = list(parsed(path).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return (found & modules.keys()) - {name}


def document_words() -> int:
    """Return the words of README.md and docs/*.md, without docs/flags.md, which is generated."""
    pages = {ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "flags.md"}
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def figures(budgets: dict) -> list[Figure]:
    packages = package_lines()
    limits = budgets["limits"]
    reaches = private_reaches(limits["private_names_of_others"])
    rows = [
        Figure("library: lines", sum(packages.values()), limits["library_lines"]),
        Figure("library: files", len(python_files("megatron_rl")), limits["library_files"]),
        Figure("library: packages", len(packages.keys() - {"."}), limits["library_packages"]),
        Figure("benchmarks: lines", sum(map(lines, python_files("tools/benchmark"))), limits["benchmark_lines"]),
        Figure("documents: words", document_words(), limits["document_words"]),
        Figure("tests: reaches into private names", len(reaches), limits["private_reaches"]),
        Figure("library: longest import chain", len(longest_import_chain()), limits["import_chain"]),
    ]
    for name, count in packages.items():
        rows.append(Figure(f"package {name}: lines", count, budgets["packages"].get(name, 0)))
    for kind, found in (("record", record_fields()), ("file", long_files()), ("function", long_functions())):
        own = budgets[f"{kind}s"]
        gone = own.keys() - found.keys()
        rows += [Figure(f"{kind} {name}: in {budgets['file']}, but not in the code", 1, 0) for name in sorted(gone)]
        rows += [Figure(f"{kind} {name}", count, own.get(name, limits[kind])) for name, count in found.items()
                 if count > limits[kind] or name in own]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", action="store_true", help="print every figure, not only what exceeds its budget")
    parser.add_argument("--budgets", type=Path, default=Path(__file__).with_name("budgets.toml"))
    arguments = parser.parse_args()
    gc.disable()  # millions of nodes, which all stay to the end: looking for garbage among them takes most of the time
    rows = figures({"file": arguments.budgets.name, **tomllib.loads(arguments.budgets.read_text(encoding="utf-8"))})
    over = [row for row in rows if row.value > row.budget]
    for row in rows if arguments.figures else over:
        print(f"{row.name:64} {row.value:6}  budget {row.budget:6}{'  EXCEEDED' if row in over else ''}")
    if over:
        advice = f"Shorten first; {arguments.budgets.name} is raised only with the reason in the commit."
        print(f"{len(over)} of {len(rows)} budgets are exceeded. {advice}", file=sys.stderr)
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
