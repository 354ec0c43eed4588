"""The draw in chunks against its twin in plain torch: in Triton's interpreter here, compiled in tests/gpu.

The interpreter must be switched on before Triton's import, so a process of its own runs `DrawChecks`.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron_rl.inference.sampler import draw_by_columns
from tests.support.compiling import compile_for_hopper
from tests.support.interpreter import INTERPRETED, mend, run_interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
ROWS = 6


class DrawChecks:
    """What both ways of running must get right."""

    device = "cpu"

    def draw(self, logits, numbers, temperature=None, greedy=None, shard=None):
        from megatron_rl.inference.sampling_kernel import draw_by_chunks

        given = [None if x is None else x.to(self.device) for x in (logits, numbers, temperature, greedy)]
        return [result.cpu() for result in draw_by_chunks(*given, shard)]

    def check(self, logits, numbers, temperature=None, greedy=None) -> torch.Tensor:
        """Tokens as the twin's, but at a border within 1e-5 of the number; log-probs within 1e-5."""
        tokens, logprobs = self.draw(logits, numbers, temperature, greedy)
        twin, _ = draw_by_columns(logits, numbers, temperature, greedy)
        exact = (logits if temperature is None else logits / temperature[:, None]).double().log_softmax(-1)
        torch.testing.assert_close(logprobs.double(), exact.gather(-1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
        ends = exact.exp().cumsum(-1)
        for row in (tokens != twin).nonzero()[:, 0].tolist():
            border = ends[row, min(tokens[row], twin[row])]
            assert abs(border - numbers[row]) < 1e-5
        return tokens

    @pytest.mark.parametrize("columns", [1, 7, 4096, 4097, 9001, 30011])
    def test_any_vocabulary(self, columns):
        generator = torch.Generator().manual_seed(columns)
        logits = torch.randn(ROWS, columns, generator=generator) * 3
        self.check(logits, torch.rand(ROWS, generator=generator) * 0.999 + 1e-4)

    def test_rows_that_are_cut_from_longer_ones(self):
        """The padding of the vocabulary lies behind every row."""
        padded = torch.randn(ROWS, 5003, generator=torch.Generator().manual_seed(1))
        padded[:, 5000:] = 100.0
        self.check(padded[:, :5000], torch.linspace(0.05, 1.0, ROWS))

    def test_temperatures_and_greedy_rows(self):
        logits = torch.randn(ROWS, 9001, generator=torch.Generator().manual_seed(2)) * 2
        temperature = torch.tensor([1.0, 0.3, 2.0, 1.0, 0.7, 1.0])
        greedy = torch.tensor([False, False, False, True, True, False])
        tokens = self.check(logits, torch.linspace(0.1, 0.9, ROWS), temperature, greedy)
        assert tokens[3:5].tolist() == logits[3:5].argmax(-1).tolist()

    def test_what_is_excluded_is_never_drawn(self):
        """Three tokens far apart, in chunks whose neighbours are empty; the extreme numbers too."""
        logits = torch.full((ROWS, 30011), float("-inf"))
        logits[:, [5, 9000, 29000]] = torch.tensor([0.2, 0.5, 0.3]).log()
        numbers = torch.tensor([2.0**-25, 0.1999, 0.2001, 0.6999, 0.7001, 1.0])
        tokens, logprobs = self.draw(logits, numbers)
        assert tokens.tolist() == [5, 5, 9000, 9000, 29000, 29000]
        torch.testing.assert_close(logprobs.exp(), torch.tensor([0.2, 0.2, 0.5, 0.5, 0.3, 0.3]))

    def test_every_number_draws_something_that_has_a_mass(self):
        """Numbers beside every border between the chunks' sums."""
        logits = torch.randn(1, 20000, generator=torch.Generator().manual_seed(3))
        logits[:, ::2] = float("-inf")
        ends = logits.softmax(-1).cumsum(-1)[0, 4095::4096]
        numbers = torch.cat([(ends + shift).clamp(1e-8, 1.0) for shift in (-1e-7, -6e-8, 0.0, 6e-8, 1e-7)])
        tokens, logprobs = self.draw(logits.expand(len(numbers), -1), numbers)
        assert (tokens % 2 == 1).all()
        assert logprobs.isfinite().all()

    @pytest.mark.parametrize("shards", [1, 2, 4])
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("vocabulary", [1000, 32_000, 151_936])
    def test_a_log_prob_is_the_trainers_to_the_bit(self, vocabulary, temperature, shards):
        """Of the same bf16 logits, over tensor-parallel ranks too, of which the last has padding."""
        from megatron_rl.algorithms.logprob_kernels import finished, local_statistics

        real = vocabulary - 300  # padding behind them, none of it in a shard of its own
        logits = (torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(5)) * 3).bfloat16()
        of_rows = None if temperature == 1.0 else torch.full((ROWS,), temperature)
        numbers = torch.linspace(0.05, 0.95, ROWS)
        width = vocabulary // shards
        tokens, drawn = self.draw(logits.float()[:, :real], numbers, of_rows, shard=width)
        statistics = []
        for first in range(0, vocabulary, width):
            own = (tokens >= first) & (tokens < first + width)
            columns = torch.where(own, tokens - first, 0)
            given = (x.to(self.device) for x in (logits[:, first : first + width].contiguous(), columns, own))
            statistics.append(local_statistics(*given, max(0, min(real - first, width)), temperature, shards == 2))
        scored, *_ = finished(torch.stack(statistics), temperature, shards == 2)
        assert torch.equal(drawn, scored.cpu())
        exact = (logits[:, :real].double() / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(drawn.double(), exact, rtol=1e-5, atol=1e-5)

    def test_large_logits(self):
        self.check(torch.randn(ROWS, 5000, generator=torch.Generator().manual_seed(4)) * 1e4, torch.full((ROWS,), 0.5))

    def test_a_row_of_no_numbers_shows(self):
        logits = torch.zeros(2, 5000)
        logits[1, 77] = float("nan")
        tokens, logprobs = self.draw(logits, torch.tensor([0.5, 0.5]))
        assert logprobs.isnan().tolist() == [False, True]
        assert 0 <= tokens[1] < 5000


if INTERPRETED:
    mend()

    @pytest.mark.each_value
    class TestInterpreted(DrawChecks):
        """On the CPU."""

else:

    def test_the_kernels_in_tritons_interpreter():
        run_interpreted(__file__)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled")
    @pytest.mark.parametrize("tempered", [False, True])
    def test_they_compile_for_hopper_without_spills(tempered, monkeypatch, tmp_path):
        from megatron_rl.inference.sampling_kernel import CHUNK, chunks_kernel, select_kernel

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        fp32 = dict.fromkeys(("logits", "numbers", "temperature", "largest", "sums", "logprobs"), "*fp32")
        types = fp32 | {"places": "*i32", "tokens": "*i64", "greedy": "*i1"}
        constants = {"CHUNK": CHUNK} | ({} if tempered else {"temperature": None})
        plain = {"num_warps": 8, "enable_fp_fusion": False}
        made = compile_for_hopper(chunks_kernel, types, constants, **plain)
        assert made.resources.spilled == 0
        assert "fma.rn.f32" not in made.ptx, "a sum that takes in a product is rounded once less than the trainer's"
        constants |= {"CHUNKS": 64} | ({} if tempered else {"greedy": None})
        made = compile_for_hopper(select_kernel, types, constants, **plain)
        assert made.resources.spilled == 0
