"""A whole run with compiled rollouts: one compilation, whatever the optimizer does to the weights."""

from __future__ import annotations

import pytest

from megatron_rl.inference.compiled import compiler_problem
from tests.support.runs import facts_of, rows_of, run_many


@pytest.mark.skipif(compiler_problem() is not None, reason="no C++ compiler")
@pytest.mark.long
def test_rollouts_stay_within_rounding_of_the_trainer(workshop, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    flags = {"rl_compile_rollout": True, "train_iters": 3, "eval_interval": 1, "rl_prompts_per_eval": 2}
    (outcome,) = run_many([workshop.rl("compiled", **flags)], timeout=600.0)
    output = outcome.check().output
    assert output.count("decode step compiled in") == 1
    assert "decode runs eager" not in output
    assert facts_of(workshop.run_dir("compiled"))["status"] == "finished"
    rows = [row for row in rows_of(workshop.run_dir("compiled")) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["training/rollout_logprob_gap_max"] for row in rows) < 1e-5
