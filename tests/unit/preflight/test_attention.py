"""Backends that the machine lacks and pages that a kernel does not take, before there is a model."""

from __future__ import annotations

import pytest

from megatron_rl import platform
from megatron_rl.models.attention import selection
from megatron_rl.models.attention.backend import DeviceFacts
from megatron_rl.run.preflight.machine import attention_problems
from tests.support.tiny import tiny_config


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if on such a GPU."""
    monkeypatch.setattr(selection, "facts_of", lambda _: DeviceFacts("cuda", (9, 0)))


@pytest.mark.parametrize("name", ["flash", "varlen", "triton_paged"])
def test_a_backend_that_needs_a_gpu(name: str) -> None:
    (problem,) = attention_problems(tiny_config(attention_backend=name))
    assert problem.text == f"--attention-backend {name} needs a CUDA device; use auto, or paged, sdpa"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_backend": "sdpa", "inference_dynamic_batching_block_size": 7},
        {"attention_backend": "paged", "inference_dynamic_batching_block_size": 7},
        {"rl_kv_cache_dtype": "fp8"},
        {"attention_backend": "flash", "check": True, "check_world_size": 1},
    ],
)
def test_what_runs_on_a_cpu(changes: dict[str, object]) -> None:
    assert attention_problems(tiny_config(**changes)) == []


@pytest.mark.parametrize(("asked", "advice"), [(8, 16), (24, 32), (65, 80)])
def test_pages_of_our_kernel(hopper: None, asked: int, advice: int) -> None:
    (problem,) = attention_problems(tiny_config(inference_dynamic_batching_block_size=asked))
    assert problem.text == (
        f"--inference-dynamic-batching-block-size {asked} is not a multiple of 16, as the pages of triton_paged "
        f"must be; use {advice}"
    )
    assert attention_problems(tiny_config(inference_dynamic_batching_block_size=advice)) == []


def test_numbers_that_a_kernel_does_not_take(hopper: None) -> None:
    (problem,) = attention_problems(tiny_config(attention_backend="varlen"))
    assert "computes in 16 bits only" in problem.text
    assert attention_problems(tiny_config(attention_backend="triton_paged", rl_kv_cache_dtype="fp8")) == []


def test_the_automatic_choice_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It always runs, and `--check` should not wait for torch."""
    monkeypatch.setattr(platform, "current_platform", None)
    assert attention_problems(tiny_config()) == []


def test_over_commit_needs_pages() -> None:
    (problem,) = attention_problems(tiny_config(rl_kv_overcommit=1.5))
    assert problem.text.startswith("--rl-kv-overcommit 1.5 needs a KV cache of pages, and the attention backend sdpa")
    assert attention_problems(tiny_config(rl_kv_overcommit=1.5, attention_backend="paged")) == []
