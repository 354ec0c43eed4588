"""A flag that nothing reads is a lie: it must have a reader, or stand in no_effect.txt."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

import megatron_rl
from megatron_rl.config.flags import Flag
from megatron_rl.config.rl_config import all_flags
from megatron_rl.config.rules import notes
from tests.support.flags import parse_config

LIBRARY = Path(megatron_rl.__file__).parent


def _words(path: Path) -> set[str]:
    """Attributes a module reads and strings it holds (`getattr`); a declaration is neither."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    words = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return words | {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


@pytest.fixture(scope="module")
def read() -> set[str]:
    """Shape, parallel sizes and the optimizer's constants go to megatron-core under their own names."""
    theirs = {field.name for cls in (TransformerConfig, OptimizerConfig) for field in fields(cls)}
    return theirs.union(*map(_words, LIBRARY.rglob("*.py")))


@pytest.mark.parametrize("flag", all_flags(), ids=lambda flag: flag.name)
def test_a_flag_has_a_reader(flag: Flag, read: set[str]) -> None:
    # An extension's options are read beside its name, as f"{field}_args".
    its_options = flag.name.endswith("_args") and {"_args", flag.name.removesuffix("_args")} <= read
    assert flag.name in read or its_options


def test_backends_and_pages_have_no_notes_but_a_rounded_cache_has_in_unquantised_evaluations() -> None:
    assert notes(parse_config(["--attention-backend", "flash", "--inference-dynamic-batching-block-size", "256"])) == []
    flags = ["--rl-evaluate-unquantized", "--rl-kv-cache-dtype"]
    (line,) = notes(parse_config([*flags, "fp8"]))
    assert line.startswith("--rl-evaluate-unquantized leaves the KV cache in fp8")
    assert notes(parse_config([*flags, "auto"])) == []


def test_graphs_are_kept_only_where_there_are_some() -> None:
    (line,) = notes(parse_config(["--rl-persist-cuda-graphs", "--no-enable-cuda-graph"]))
    assert line.startswith("--rl-persist-cuda-graphs has no effect: without CUDA graphs")
    for more in ([], ["--enable-cuda-graph"], ["--cuda-graph-impl", "local"]):
        assert notes(parse_config(["--rl-persist-cuda-graphs", *more])) == []
