"""Attention of `--batch-invariant-mode`: a token's output and gradients, whatever computes it beside what.

The interpreter must be switched on before Triton's import, so a process of its own runs `InvariantChecks`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms.context import ContextShare
from megatron_rl.errors import ConfigError
from megatron_rl.models.attention.backend import DeviceFacts, NewTokens, Requirements
from megatron_rl.models.attention.backends import invariant, sdpa
from megatron_rl.models.attention.kv_format import FP8
from megatron_rl.models.attention.plan import prepared_for
from megatron_rl.models.attention.selection import choose, fault_of_cache, fault_of_packed, requirements_of
from tests.support.interpreter import INTERPRETED, mend, run_interpreted
from tests.support.paged import FilledPages
from tests.support.tiny import tiny_config

HOPPER = DeviceFacts("cuda", (9, 0))
NEEDED = Requirements(torch.bfloat16, torch.bfloat16, 64, invariant=True)


class InvariantChecks:
    """Everything both ways of running must get right."""

    device = "cpu"
    dtype = torch.float32
    width = 16
    heads = 2
    groups = 1
    gradients = {"rtol": 1e-4, "atol": 1e-5}

    def fill(self, window: int | None, sinks: bool) -> None:
        logits = torch.linspace(-3, 5, self.heads).tolist() if sinks else []
        self.pages = FilledPages(
            [530, 3, 70], block_size=64, heads=self.heads, groups=self.groups, width=self.width, dtype=self.dtype,
            device=self.device, window=window, sinks=logits,
        )  # fmt: skip
        self.window = window
        self.sinks = (torch.tensor(logits, device=self.device, dtype=self.dtype),) if sinks else ()
        self.queries = [self.pages.random(length, 1, self.heads, self.width) for length in self.pages.lengths]
        self.known = [[part.to(self.dtype)[:, None] for part in self.pages.known(slot)] for slot in range(3)]

    @pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
    @pytest.mark.parametrize("window", [None, 300], ids=["", "window"])
    def test_a_token_gets_the_same_bits_from_everything(self, window, sinks):
        """Tokens of three splits: packed alone and with others, extended from 520 and 529, decoded."""
        self.fill(window, sinks)
        whole = self.packed([1, 0, 2])[3:533]
        found = {"packed alone": self.packed([0]), "decoded": self.decoded()[:1]}
        for name, starts in {"extended": [520, 0, 64], "a token": [529, 2, 69]}.items():
            found[name] = self.extended(starts)[starts[0] - 530 :]
        different = {name: (own - whole[-len(own) :]).abs().max().item() for name, own in found.items()}
        assert not any(different.values()), different

    def packed(self, slots: Sequence[int]) -> torch.Tensor:
        kernel, lengths = invariant.BACKEND.packed, [self.pages.lengths[slot] for slot in slots]
        plan = prepared_for(self.window, kernel.prepare, *batch_of(lengths, self.device))
        keys, values = (torch.cat(parts) for parts in zip(*(self.known[slot] for slot in slots), strict=True))
        return kernel.attend(torch.cat([self.queries[slot] for slot in slots]), keys, values, plan, *self.sinks)

    def decoded(self) -> torch.Tensor:
        kernel, newest = invariant.BACKEND.cache, torch.cat([query[-1:] for query in self.queries])
        positions = torch.tensor(self.pages.lengths, device=self.device) - 1
        plan = prepared_for(self.window, kernel.prepare_decode, self.pages.cache, positions, 530)
        return kernel.decode(newest, self.pages.cache, 0, plan, *self.sinks)

    def extended(self, starts: Sequence[int]) -> torch.Tensor:
        """The sequences lie in reverse order, the first one last."""
        kernel, slots, lengths = invariant.BACKEND.cache, [2, 1, 0], self.pages.lengths
        parts = [self.queries[slot][starts[slot] :] for slot in slots]
        counts = [len(part) for part in parts]
        positions = [torch.arange(starts[slot], lengths[slot], device=self.device) for slot in slots]
        borders = torch.tensor([0, *counts], device=self.device).cumsum(0).int()
        new = NewTokens(torch.tensor(slots, device=self.device), counts, borders, torch.cat(positions), max(lengths))
        plan = prepared_for(self.window, kernel.prepare_extend, self.pages.cache, new)
        return kernel.extend(torch.cat(parts), self.pages.cache, 0, plan, *self.sinks)

    @pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
    @pytest.mark.parametrize("window", [None, 9], ids=["", "window"])
    @pytest.mark.parametrize("spans", [False, True], ids=["whole", "spans"])
    def test_gradients(self, window, sinks, spans):
        """Against sdpa: of queries, keys, values and sinks."""
        generator, lengths = torch.Generator().manual_seed(0), [3, 1, 70]
        share = ContextShare.of(lengths, 1, 2, device=self.device)
        sizes = (share.local.numel(), share.keys.numel()) if spans else (sum(lengths), sum(lengths))
        shapes = [(sizes[0], 1, 4, self.width), *[(sizes[1], 1, 2, self.width)] * 2, *[(4,)] * sinks]
        exact = [torch.randn(shape, generator=generator).to(self.device, self.dtype) for shape in shapes]
        results = []
        for kernel, dtype in ((invariant.BACKEND.packed, self.dtype), (sdpa.BACKEND.packed, torch.float32)):
            given = [x.to(dtype).requires_grad_() for x in exact]
            kernel, batch = (kernel.spans, (share,)) if spans else (kernel, batch_of(lengths, self.device))
            out = kernel.attend(*given[:3], prepared_for(window, kernel.prepare, *batch), *given[3:])
            found = out, *torch.autograd.grad(out.float().square().sum(), given)
            results.append([x.float() for x in found])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, **self.gradients)


def batch_of(lengths: Sequence[int], device: str) -> tuple[Sequence[int], torch.Tensor, torch.Tensor]:
    borders = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return lengths, borders, torch.cat([torch.arange(length, device=device) for length in lengths])


if INTERPRETED:
    from triton.runtime import interpreter

    from tests.support import fake_kernels

    mend()

    class TestInterpreted(InvariantChecks):
        """On the CPU."""

        @pytest.fixture(autouse=True)
        def _products(self, monkeypatch: pytest.MonkeyPatch) -> None:
            """A row of numpy's product in fp32 depends on where in the tile it lies, so products are rounded from fp64.

            A GPU's matrix instructions compute every row in the same way.
            """
            plain = interpreter.InterpreterBuilder.create_dot

            def product(builder, a, b, start, *rest):
                numbers = a.data.astype("float64") @ b.data.astype("float64")
                return interpreter.TensorHandle(numbers.astype("float32") + start.data, start.dtype.scalar)

            assert plain is not product
            monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
            monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", fake_kernels.flash_backward)

        def test_the_self_check(self, monkeypatch):
            needed, shape = Requirements(torch.float32, torch.float32, 16, True, 20, True), (4, 2, torch.device("cpu"))
            assert fault_of_packed(invariant.BACKEND.packed, needed, *shape) is None
            assert fault_of_cache(invariant.BACKEND.cache, needed, *shape) is None

else:

    @pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
    def test_the_kernels_in_tritons_interpreter():
        run_interpreted(__file__)


def test_the_mode_takes_its_own_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    config = tiny_config(bf16=True, batch_invariant_mode=True)
    assert requirements_of(config).invariant and not requirements_of(tiny_config()).invariant
    chosen = choose("auto", HOPPER, NEEDED)
    assert (chosen.packed_name, chosen.cache_name) == ("invariant", "invariant")
    assert chosen.reason.endswith("invariant over the KV cache (--batch-invariant-mode)")
    assert "multiple of 64" in chosen.block_problems(48, 1.0)[0].text and not chosen.block_problems(128, 1.0)
    assert choose("auto", HOPPER, replace(NEEDED, invariant=False)).packed_name == "varlen"
    assert choose("auto", DeviceFacts("cpu"), NEEDED).packed_name == "sdpa", "a CPU's are invariant as they are"


@pytest.mark.parametrize(
    ("asked", "needed", "faults", "line"),
    [
        ("flash", NEEDED, {}, "--attention-backend flash gives rollouts other bits than training; leave it out beside"),
        ("auto", replace(NEEDED, cache_dtype=FP8), {}, "--batch-invariant-mode reads a KV cache in the model's own"),
        ("auto", replace(NEEDED, dtype=torch.float32), {}, "--batch-invariant-mode computes in 16 bits only (--bf16)"),
        ("auto", replace(NEEDED, latents=True), {}, "--batch-invariant-mode takes values of the width of keys only"),
        ("auto", NEEDED, {"invariant": "fails here"}, "--batch-invariant-mode fails here; leave it out"),
    ],
)
def test_what_the_mode_does_not_take(asked: str, needed: Requirements, faults: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(asked, HOPPER, needed, faults)
    assert refused.value.lines[0].startswith(line)
