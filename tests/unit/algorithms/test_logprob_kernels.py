"""The log-prob pass in two kernels against its twin in plain torch, in Triton's interpreter; compiled in tests/gpu.

The interpreter must be switched on before Triton's import, so a process of its own runs `LogprobChecks`. It truncates
to bf16 where a GPU rounds, so gradients in bf16 may be a unit in the last place off.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.algorithms import logprobs as module
from megatron_rl.algorithms.logprobs import selected_logprobs
from tests.support.compiling import compile_for_hopper, kind_of_call
from tests.support.interpreter import INTERPRETED, SWITCH, mend, run_interpreted
from tests.support.ranks import run_ranks
from tests.unit.algorithms.test_selected_logprobs_parallel import on_rank

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
ROWS = 7
POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1, 2])
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def through_kernels(logits: Tensor) -> bool:
    """In the place of `runs_kernels`, on any device."""
    return logits.dtype != torch.float64


def on_rank_with_kernels() -> None:
    os.environ.update(SWITCH)
    mend()
    module.runs_kernels = through_kernels
    on_rank()


class LogprobChecks:
    """What both ways of running must get right."""

    device = "cpu"

    @pytest.fixture(autouse=True)
    def _both_ways(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._choose: Callable[[bool], None] = lambda kernels: monkeypatch.setattr(
            module, "runs_kernels", through_kernels if kernels else lambda _: False
        )

    def run(self, logits: Tensor, kernels: bool, tokens: Tensor, **settings) -> list[Tensor | None]:
        """Log-probs, entropies and the gradient of a weighted sum of both."""
        self._choose(kernels)
        to = self.device if kernels else "cpu"
        logits = logits.to(to).detach().clone().requires_grad_()
        values, entropy = selected_logprobs(logits, tokens.to(to), POSITIONS.to(to), **settings)
        weights = torch.linspace(-1.0, 2.0, ROWS, device=to)
        total = weights * torch.where(values.isfinite(), values, 0.0)
        if entropy is not None and entropy.requires_grad:
            total = total + 0.3 * weights.flip(0) * entropy
        total.sum().backward()
        return [None if x is None else x.detach().cpu() for x in (values, entropy, logits.grad)]

    def check(self, logits: Tensor, tokens: Tensor, **settings) -> list[Tensor | None]:
        """The kernels' results, which are the twin's."""
        actual = self.run(logits, True, tokens, **settings)
        expected = self.run(logits, False, tokens, **settings)
        torch.testing.assert_close(actual[:2], expected[:2], **CLOSE)
        assert actual[2].dtype == logits.dtype
        low = {"rtol": 2**-7, "atol": 1e-6} if logits.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(actual[2], expected[2], **low)
        assert actual[2].abs().max() > 0.01
        return actual

    @staticmethod
    def logits(columns: int, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return (scale * torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(columns))).to(dtype)

    @staticmethod
    def tokens(columns: int) -> Tensor:
        return torch.randint(columns, (ROWS,), generator=torch.Generator().manual_seed(3))

    @pytest.mark.parametrize("entropy", ["none", "detached", "differentiable"])
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_values_and_gradients(self, dtype, temperature, entropy):
        given = self.logits(5000, dtype=dtype), self.tokens(5000)
        self.check(*given, vocab_size=5000, temperature=temperature, entropy=entropy)

    @pytest.mark.parametrize("columns", [1, 2, 4095, 4096, 4097, 9001])
    def test_any_vocabulary(self, columns):
        _, entropy, gradient = self.run(self.logits(columns), True, self.tokens(columns), vocab_size=columns)
        if columns > 1:
            self.check(self.logits(columns), self.tokens(columns), vocab_size=columns, entropy="differentiable")
        else:
            assert not gradient.any(), "the only token has probability 1"

    @pytest.mark.parametrize("real", [4000, 4096, 4099])
    def test_padding_has_probability_and_gradient_zero(self, real):
        logits = self.logits(5008)
        logits[:, real:] = 50.0
        _, _, gradient = self.check(logits, self.tokens(real), vocab_size=real, entropy="differentiable")
        assert not gradient[:, real:].any() and gradient[:, :real].any()

    def test_logits_far_apart(self):
        """The largest one last, so that every sum is scaled anew, by a factor that is 0 in fp32."""
        logits = self.logits(9001, 300.0).sort(1).values
        self.check(logits, self.tokens(9001), vocab_size=9001, temperature=0.7, entropy="differentiable")

    def test_what_is_impossible_poisons_no_gradient(self):
        """A whole block of -inf before anything else, a token of it, and an id that is no token's."""
        logits, tokens = self.logits(9001), self.tokens(9001)
        logits[:, :5000] = -torch.inf
        tokens[1], tokens[2], tokens[3] = 17, 9001, 8000
        values, entropy, gradient = self.check(logits, tokens, vocab_size=9001, entropy="differentiable")
        assert values[1:4].isinf().tolist() == [True, True, False]
        assert entropy.isfinite().all() and gradient.isfinite().all()

    @pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
    def test_a_row_of_no_numbers_shows(self, wrong):
        logits = self.logits(5000)
        logits[1, 4500] = wrong
        values, entropy, gradient = self.run(logits, True, self.tokens(5000), vocab_size=5000, entropy="differentiable")
        assert values.isnan().tolist() == entropy.isnan().tolist() == [False, False, True, *[False] * 4]
        assert gradient[1].isnan().any() and gradient[[0, 2, 3, 4, 5, 6]].isfinite().all()

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_the_gradient_may_take_the_memory_of_the_logits(self, overwrite):
        """And only then; what would still read them is refused."""
        self._choose(True)
        leaf = self.logits(5000).to(self.device).requires_grad_()
        logits, seen = leaf * 1.0, []
        before = logits.detach().clone()
        logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
        given = self.tokens(5000).to(self.device), POSITIONS.to(self.device)
        values, _ = selected_logprobs(logits, *given, vocab_size=5000, overwrite=overwrite)
        values.sum().backward(retain_graph=True)
        assert (seen == [logits.data_ptr()]) == overwrite == (not torch.equal(logits, before))
        torch.testing.assert_close(leaf.grad.cpu(), self._gradient_of_sum(5000), rtol=1e-5, atol=1e-6)
        if overwrite:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                values.sum().backward()
        else:
            values.sum().backward()

    def _gradient_of_sum(self, columns: int) -> Tensor:
        logits = self.logits(columns).requires_grad_()
        logprobs = logits.log_softmax(1).gather(1, self.tokens(columns).roll(-1)[:, None])[:, 0].roll(1)
        return torch.autograd.grad(logprobs[POSITIONS > 0].sum(), logits)[0]

    def test_fused_with_the_output_layer(self, monkeypatch):
        """Logits a few rows at a time, and the gradient over them."""
        monkeypatch.setattr(module, "FEWEST_LOGIT_ROWS", 3)
        for name in ("PRODUCT_ELEMENTS", "CPU_PRODUCT_ELEMENTS"):
            monkeypatch.setattr(module, name, 1)
        generator, results = torch.Generator().manual_seed(5), []
        tensors = [torch.randn(size, 6, generator=generator) for size in (ROWS, 5000)]
        for kernels in (True, False):
            self._choose(kernels)
            to = self.device if kernels else "cpu"
            hidden, weight = (x.to(to).detach().clone().requires_grad_() for x in tensors)
            values, entropy = selected_logprobs(
                hidden, self.tokens(4990).to(to), POSITIONS.to(to), weight=weight, vocab_size=4990, temperature=0.7,
                entropy="differentiable",
            )  # fmt: skip
            (values + 0.3 * entropy).sum().backward()
            results.append([x.detach().cpu() for x in (values, entropy, hidden.grad, weight.grad)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


if INTERPRETED:
    mend()

    @pytest.mark.each_value
    class TestInterpreted(LogprobChecks):
        """On the CPU."""

else:
    HOPPER = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled")
    VOCABULARIES = pytest.mark.parametrize("held", [32_000, 151_936, 262_144])
    NUMBERS = dict.fromkeys(("logits", "out"), "*bf16") | {"targets": "*i64", "owned": "*i1"}
    ROW_VALUES = ("statistics", "largest", "log_sum", "entropies", "grad_logprobs", "grad_entropies")
    TYPES = NUMBERS | dict.fromkeys(ROW_VALUES, "*fp32") | {"temperature": "fp32", "scale": "fp32"}

    def test_the_kernels_in_tritons_interpreter():
        run_interpreted(__file__)

    def test_two_ranks_equal_one():
        run_ranks("tests.unit.algorithms.test_logprob_kernels:on_rank_with_kernels", 2, imported_under=SWITCH)

    class Launches(dict):
        """In the place of a kernel: the numbers that each launch reads or writes of its largest arguments."""

        def __missing__(self, grid):
            def launch(*given, **_) -> None:
                sizes = [x.numel() for x in given if isinstance(x, Tensor)]
                self[len(self)] = sum(size for size in sizes if size == max(sizes))

            return launch

    class Touched(TorchDispatchMode):
        """The most numbers that any operation of torch gives out, views and empty memory not among them."""

        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            if isinstance(output, Tensor) and not function.is_view and "empty" not in function.__name__:
                self.most = max(self.most, output.numel())
            return output

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_six_bytes_of_a_bf16_logit(overwrite, monkeypatch):
        """Read once forward, read and written once backward, and torch touches nothing of their size."""
        from megatron_rl.algorithms import logprob_kernels

        forward, backward = Launches(), Launches()
        monkeypatch.setattr(module, "runs_kernels", through_kernels)
        monkeypatch.setattr(logprob_kernels, "statistics_kernel", forward)
        monkeypatch.setattr(logprob_kernels, "finish_kernel", Launches())
        monkeypatch.setattr(logprob_kernels, "gradient_kernel", backward)
        logits = LogprobChecks.logits(5000, dtype=torch.bfloat16).requires_grad_()
        settings = {"vocab_size": 5000, "temperature": 0.7, "entropy": "differentiable", "overwrite": overwrite}
        with Touched() as touched:
            results = selected_logprobs(logits, LogprobChecks.tokens(5000), POSITIONS, **settings)
            torch.autograd.grad(results, logits, [torch.ones(ROWS)] * 2)
        assert touched.most <= 7 * ROWS, "a logit, and three numbers of each of two chunks"
        assert list(forward.values()) == [logits.numel()]
        assert list(backward.values()) == [2 * logits.numel()]

    @HOPPER
    @VOCABULARIES
    @pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
    def test_statistics_compile_for_hopper(held, entropy, monkeypatch, tmp_path):
        from megatron_rl.algorithms.logprob_kernels import statistics_kernel

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        constants = {"ENTROPY": entropy, "CHUNK": 4096}
        made = compile_for_hopper(
            statistics_kernel, TYPES, constants, aligned(held), num_warps=4, enable_fp_fusion=False
        )
        assert made.resources.spilled == 0
        assert made.programs_at_once >= 4, "loads of one overlap with the sums of the others"
        assert "ld.global.v4.b32" in made.ptx, "8 numbers at a time"

    @HOPPER
    @VOCABULARIES
    @pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
    def test_gradients_compile_for_hopper(held, entropy, monkeypatch, tmp_path):
        from megatron_rl.algorithms.logprob_kernels import gradient_kernel

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        constants = {"BLOCK": 4096} | ({} if entropy else dict.fromkeys(("entropies", "grad_entropies")))
        made = compile_for_hopper(gradient_kernel, TYPES, constants, aligned(held), num_warps=8)
        assert made.resources.spilled == 0
        assert made.programs_at_once >= 4
        assert "ld.global.v4.b32" in made.ptx and "st.global.v4.b32" in made.ptx

    def aligned(held: int) -> list[str]:
        """What Triton knows of a padded vocabulary."""
        return ["held", "stride", "out_stride"] if held % 16 == 0 else []

    @pytest.mark.parametrize("name", ["statistics_kernel", "gradient_kernel"])
    def test_a_vocabulary_of_any_size_and_a_batch_in_parts_need_no_second_kernel(name):
        """Real columns, rows, and where the vectors [T] begin."""
        from megatron_rl.algorithms import logprob_kernels

        kernel = getattr(logprob_kernels, name)
        other = {"columns": 151_665, "rows": 16} | dict.fromkeys(("targets", *ROW_VALUES), 68)
        assert kind_of_call(kernel, TYPES, other) == kind_of_call(kernel, TYPES)
        assert kind_of_call(kernel, TYPES, {"held": 32}) != kind_of_call(kernel, TYPES), "this test would see it"
