"""A minute of questions to the libraries under us, before anything is tested or measured on a new kind of GPU.

    python -m tests.gpu.probe

Which attention torch picks, what a new shape costs, whether masks give NaN, what a refused capture leaves behind, and
whether our settings reached the allocator: first as torch comes, then as the platform prepares it. The exit code counts
what our settings should have mended and did not. Without a CUDA device it rehearses on small shapes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as functional

from megatron_rl.models.attention.backends import varlen
from megatron_rl.platform import current_platform
from megatron_rl.platform.cuda import ALLOCATOR_VARIABLES

PLATFORM = current_platform()
DEVICE = PLATFORM.device
HEADS, GROUPS, WIDTH = (28, 4, 128) if PLATFORM.is_cuda else (4, 2, 16)
LENGTHS = [700 + 13 * number for number in range(8)] if PLATFORM.is_cuda else [20, 33]
KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cuDNN"}
NEEDS_CUDA = "needs a CUDA device"


@contextlib.contextmanager
def as_torch_comes() -> Iterator[None]:
    """With cuDNN's attention."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)


def allocator() -> str:
    """Do its segments grow? They must, unless the user configured it."""
    if not PLATFORM.is_cuda:
        return NEEDS_CUDA
    if configured := [os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)]:
        return f"as the environment says: {configured[0]}"
    torch.zeros(1, device=DEVICE)
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    assert settings["expandable_segments"], settings
    return "segments grow"


def picked() -> str:
    """The kernel of a padded batch in bf16."""

    def choice() -> str:
        query, key = (_random(4, heads, 512, WIDTH) for heads in (HEADS, GROUPS))
        return KERNELS.get(torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=True), "another")

    with as_torch_comes():
        before = choice()
    assert choice() != "cuDNN", "cuDNN's attention is picked although it is off"
    return f"{before} as torch comes, {choice()} as prepared"


def new_shapes() -> str:
    """Milliseconds of a shape that was never seen, and of one that was, forward and both ways."""
    with as_torch_comes():
        found = [f"as torch comes {_costs(_padded)}"]
    # Lengths that the process has not seen: what torch compiles or plans it keeps.
    found.append(f"as prepared {_costs(functools.partial(_padded, longer=1))}")
    if PLATFORM.is_cuda:
        found.append(f"packed {_costs(_packed)}")
    return "; ".join(found)


def _costs(attend: Callable[[int], torch.Tensor]) -> str:
    def took(length: int) -> tuple[float, float]:
        PLATFORM.synchronize()
        started = time.perf_counter()
        output = attend(length)
        PLATFORM.synchronize()
        forward = time.perf_counter() - started
        output.sum().backward()
        PLATFORM.synchronize()
        return 1e3 * forward, 1e3 * (time.perf_counter() - started)

    took(64)  # libraries load
    rounds = [[took(length) for length in LENGTHS] for _ in range(2)]
    medians = [[statistics.median(times) for times in zip(*each, strict=True)] for each in rounds]
    (new, new_both), (seen, seen_both) = medians
    return f"new {new:.2f} and {new_both:.2f} ms, seen {seen:.2f} and {seen_both:.2f} ms"


def _padded(length: int, longer: int = 0) -> torch.Tensor:
    tensors = [_random(3, heads, length + longer, WIDTH).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    return functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)


def _packed(length: int) -> torch.Tensor:
    kernel, lengths = varlen.BACKEND.packed, (length, 2 * length // 3, length // 3)
    borders = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    positions = torch.cat([torch.arange(each, device=DEVICE) for each in lengths])
    tensors = [_random(sum(lengths), 1, heads, WIDTH).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    return kernel.attend(*tensors, kernel.prepare(lengths, borders, positions))


def masked_gradients() -> str:
    """Numbers of a gradient that are not finite, at length % 128 == 64 with a mask, as spans of sequences have it."""

    def not_finite() -> int:
        length, width = 704, 64
        torch.manual_seed(0)
        query, key, value = (_random(1, 1, length, width) * scale for scale in (0.1, 0.1, 1.0))
        query[..., 0], key[..., 0] = 1.0, -120 * math.sqrt(width)
        query.requires_grad_()
        mask = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()[None, None]
        functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
        return int((~query.grad.isfinite()).sum())

    with as_torch_comes():
        before = not_finite()
    after = not_finite()
    assert after == 0, f"{after} numbers as prepared, {before} as torch comes"
    return f"{before} as torch comes, none as prepared"


def refused_capture() -> str:
    """Does torch's generator draw after a capture that CUDA refused? After one of ours it must."""
    from megatron_rl.inference.graphs import CudaRecorder

    if not PLATFORM.is_cuda:
        return NEEDS_CUDA
    number = torch.ones(1, device=DEVICE)
    try:
        CudaRecorder(DEVICE).record(lambda: number.item())
    except RuntimeError:
        torch.rand(1, device=DEVICE)
    else:
        raise AssertionError("a host read was captured")
    return f"after torch's own {_draw_after(number)}, after ours it draws"


def _draw_after(number: torch.Tensor) -> str:
    """The last check, for it may spoil the process."""
    stream = torch.cuda.Stream()
    with contextlib.suppress(RuntimeError), torch.cuda.stream(stream):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            number.item()
    try:
        torch.rand(1, device=DEVICE)
    except RuntimeError as refusal:
        return f"it does not ({str(refusal).splitlines()[0][:80]})"
    return "it draws"


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


CHECKS: dict[str, Callable[[], str]] = {
    "allocator": allocator,
    "attention that torch picks": picked,
    "what a new shape costs": new_shapes,
    "gradients under a mask": masked_gradients,
    "generator after a refused capture": refused_capture,
}


def main() -> int:
    """The exit code: how many checks failed."""
    where = torch.cuda.get_device_name() if PLATFORM.is_cuda else "a CPU: a rehearsal"
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, on {where}", flush=True)
    failed = 0
    for name, check in CHECKS.items():
        try:
            print(f"ok    {name}: {check()}", flush=True)
        except Exception as error:  # noqa: BLE001 - whatever a library raises is an answer
            failed += 1
            print(f"FAIL  {name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}", flush=True)
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} as they should be")
    return failed


if __name__ == "__main__":
    sys.exit(main())
