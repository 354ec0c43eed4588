"""A minute of checks of what the rest stands on, each in a process of its own: a kernel that fails spoils the GPU.

    python -m tests.gpu.smoke            all of them, four at a time
    python -m tests.gpu.smoke NAME       one, with its traceback

Without a CUDA device they run on the CPU, which rehearses the checks and says nothing about a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
LIMIT = 90.0 if torch.cuda.is_available() else 600.0
"""Seconds a check may take: kernels compile; a rehearsal may have few and busy cores."""
AT_ONCE = 4
CUBLAS = {"CUBLASLT_LOG_LEVEL": "5", "CUBLASLT_LOG_FILE": "/dev/stderr"}
"""cuBLAS says why it refuses a product."""


def device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().to(device())


def product(recipe_name: str, tokens: int) -> str:
    """A quantised linear of a 7B's shape against the product of the dequantised numbers."""
    from megatron_rl.registry import RECIPES

    recipe = RECIPES.get(recipe_name)
    rows, columns = (4608, 3584) if torch.cuda.is_available() else (200, 264)
    q, x = recipe.quantize(_random(rows, columns)), _random(tokens, columns)
    twin = recipe.round_trip(x.float(), q) @ recipe.dequantize(q).t()
    off = ((recipe.matmul(x, q).float() - twin).norm() / twin.norm()).item()
    assert off < 1e-2, f"{off:.2g} off the product of the dequantised numbers"
    return f"{off:.1e} off"


def attention(stored: str) -> str:
    """The kernels over pages against sums in fp64: one new token a row, and several."""
    from megatron_rl.models.attention.backend import BACKENDS
    from megatron_rl.models.attention.kv_format import FP8
    from megatron_rl.models.attention.selection import facts_of
    from tests.support.paged import FilledPages

    backend, lengths = BACKENDS.get("triton_paged"), [700, 1, 64, 257]
    problem = backend.problem(facts_of(device()))
    if not torch.cuda.is_available():
        return problem or "the tests of the interpreter check it"
    assert problem is None, problem
    pages = FilledPages(
        lengths, block_size=64, heads=28, groups=4, width=128, dtype=torch.bfloat16, device="cuda",
        stored=FP8 if stored == "fp8" else None, max_length=16384,
    )  # fmt: skip
    for results in (pages.decoded(backend.cache), pages.extended(backend.cache, [690, 0, 60, 250])):
        torch.testing.assert_close(*results, rtol=0.03, atol=0.02)
    return "as the sums in fp64"


def draws() -> str:
    """The draw of a decode step against a CPU's."""
    from megatron_rl.arithmetic import uniform
    from megatron_rl.inference.sampler import SamplingTensors, draw

    rows, columns, drawn = 32, 151665, []
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 3
    for where in (torch.device("cpu"), device()):
        seeds = torch.arange(rows, device=where)
        params = SamplingTensors(seeds, torch.full((rows,), 0.7, device=where))
        drawn.append([result.cpu() for result in draw(logits.to(where), uniform(seeds, seeds), params)])
    same = drawn[0][0] == drawn[1][0]
    assert same.sum() >= rows - 1, f"{int(same.sum())} of {rows} tokens agree"
    torch.testing.assert_close(drawn[0][1][same], drawn[1][1][same], rtol=1e-5, atol=1e-5)
    return f"{int(same.sum())} of {rows} tokens agree"


def capture() -> str:
    """A capture that CUDA refuses leaves an allocator and a generator that work, and the next capture a graph."""
    from megatron_rl.inference.graphs import CudaRecorder

    if not torch.cuda.is_available():
        return "needs a CUDA device"
    recorder, number = CudaRecorder(device()), torch.zeros(1, device=device())

    def adds() -> None:
        number.add_(torch.ones(1 << 20, device=device())[:1])

    def reads() -> None:
        adds()
        number.item()

    for _ in range(2):
        try:
            recorder.record(reads)
        except RuntimeError as refusal:
            said = str(refusal).strip().splitlines()[0]
        else:
            raise AssertionError("a host read was captured")
        torch.cuda.empty_cache()
        torch.rand(1, device=device())
        recorder.warm_up(adds)
        replay = recorder.record(adds)
        before = number.item()
        replay()
        assert number.item() == before + 1
    return f"refused with: {said[:80]}"


def training() -> str:
    """Fused AdamW, its state on pinned host memory and back, loaded step counters."""
    from megatron_rl.platform import current_platform
    from megatron_rl.platform.groups import initialize, shut_down
    from megatron_rl.run.memory.holdings import OptimizerState
    from tests.support.samples import tiny_optimization, weights_of
    from tests.support.tiny import tiny_config

    initialize(tiny_config().parallel, current_platform())
    plain, moved = tiny_optimization(bf16=True), tiny_optimization(bf16=True)
    state = OptimizerState(moved)
    for _ in range(3):
        state.leave()
        state.come_home()
        for optimization in (plain, moved):
            optimization.zero_grad()
            for buffer in optimization.wrapped[0].buffers:
                buffer.grad_data.fill_(1e-2)
            assert optimization.step().applied
    assert all(torch.equal(a, b) for a, b in zip(weights_of(plain.policy), weights_of(moved.policy), strict=True))
    groups = moved.optimizer.chained_optimizers[0].optimizer.param_groups
    shut_down()
    return f"fused {groups[0].get('fused')}"


CHECKS: dict[str, tuple[Callable[[], str], dict[str, str]]] = {
    **{f"rowwise fp8, {m} tokens": (partial(product, "fp8", m), CUBLAS) for m in (1, 4, 5)},
    **{f"blockwise fp8, {m} tokens": (partial(product, "fp8_block", m), CUBLAS) for m in (4, 5, 8)},
    **{f"int8, {m} tokens": (partial(product, "int8", m), {}) for m in (1, 17)},
    "attention over pages, bf16": (partial(attention, "bf16"), {}),
    "attention over pages, fp8": (partial(attention, "fp8"), {}),
    "draws": (draws, {}),
    "a capture that fails": (capture, {}),
    "optimizer and offload": (training, {}),
}


def _in_a_process(name: str) -> tuple[str, bool, float, str]:
    """The check's name, whether it passed, its seconds, and what it said."""
    started = time.monotonic()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | CHECKS[name][1] | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.gpu.smoke", name]
    try:
        run = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return name, False, time.monotonic() - started, f"still running after {LIMIT:.0f} s"
    lines = [line for line in (run.stdout if run.returncode == 0 else run.stderr).splitlines() if line.strip()]
    logged = (run.stdout + run.stderr).splitlines() if run.returncode else []
    reasons = [line[:300] for line in logged if "cublasLt" in line and "[Error]" in line][-3:]
    said = "\n    ".join([*reasons, *(line[:300] for line in lines[-1:])]) or "nothing"
    return name, run.returncode == 0, time.monotonic() - started, said


def main(names: list[str]) -> int:
    """The exit code: how many failed."""
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        sys.exit(f"there is no check {unknown[0]!r}; use one of {', '.join(CHECKS)}")
    if names:
        for name in names:
            print(CHECKS[name][0]())
        return 0
    print(f"on {torch.cuda.get_device_name() if torch.cuda.is_available() else 'a CPU: a rehearsal'}", flush=True)
    failed = 0
    with ThreadPoolExecutor(AT_ONCE if torch.cuda.is_available() else 1) as pool:
        for name, passed, seconds, said in pool.map(_in_a_process, CHECKS):
            failed += not passed
            print(f"{'ok  ' if passed else 'FAIL'}  {name}, {seconds:.0f} s: {said}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
