"""What a run on a GPU has without a flag: the bins of its memory, of the run that it goes on from, and the line."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl import main, platform
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.platform import Platform, groups
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run import base
from megatron_rl.run.gpu_defaults import bin_size, gpu_lines, most_sequences
from megatron_rl.run.memory.estimate import estimate
from megatron_rl.signals import StopRequest
from tests.support.saves import saving_run, train_a_step
from tests.support.tiny import VOCABULARY, tiny_config, write_tokenizer

PLAIN = {"micro_batch_size": False, "seq_length": 1024, "rl_max_new_tokens": 40, "grpo_prompts_per_step": 32}
"""No flag of `FLAGS` says how long a bin is; an update has 128 sequences."""
LARGE = 80 * 10**9


class _Gpu(Platform):
    """A platform that says it is a GPU."""

    memory = LARGE


GPU = _Gpu(torch.device("cuda", 0), "nccl")


@pytest.mark.parametrize(
    ("flags", "world_size", "tokens"),
    [
        ({}, 1, 16 * 1024),
        ({"seq_length": 1000}, 1, 16 * 1000),
        ({"seq_length": 3000}, 1, 4 * 3000),
        ({"seq_length": 20_000, "max_position_embeddings": 20_000}, 1, 20_000),
        ({"grpo_prompts_per_step": 1}, 1, 4 * 1024),
        ({"global_batch_size": 8}, 1, 8 * 1024),
        ({"global_batch_size": 8}, 4, 2 * 1024),
        ({"pipeline_model_parallel_size": 2, "global_batch_size": 8}, 2, 4 * 1024),
        ({"micro_batch_size": 2}, 1, 2 * 1024),
        ({"rl_sequence_packing_bin_size": 5000}, 1, 5000),
        ({"perform_rl_step": False, "grpo_group_size": False, "grpo_prompts_per_step": False,
          "rl_max_new_tokens": False, "global_batch_size": 6}, 1, 4 * 1024),
        ({"perform_rl_step": False, "grpo_group_size": False, "grpo_prompts_per_step": False,
          "rl_max_new_tokens": False}, 1, 1024),
    ],
)  # fmt: skip
def test_bins_are_up_to_16k_tokens_of_an_update(flags: dict[str, Any], world_size: int, tokens: int) -> None:
    config = tiny_config(world_size, **PLAIN | flags)
    assert bin_size(config, world_size, VOCABULARY, LARGE) == tokens


def test_bins_are_no_longer_than_the_memory() -> None:
    """A bin of half as many tokens where the whole one does not fit into 70 % of it; at least one sequence."""
    config = tiny_config(**PLAIN)
    eight = estimate(config.with_values(rl_sequence_packing_bin_size=8 * 1024), 1, VOCABULARY)
    needed = max(eight.training - eight.for_rollouts, eight.rollout - eight.kv_cache.rollout)
    assert bin_size(config, 1, VOCABULARY, int(needed / 0.7) + 2) == 8 * 1024
    assert bin_size(config, 1, VOCABULARY, int(needed / 0.7) - 2) == 4 * 1024
    assert bin_size(config, 1, VOCABULARY, 10**6) == 1024
    assert most_sequences(config, 1, VOCABULARY, needed, 128) == (8, needed)


@pytest.mark.parametrize("how", ["resume", "load"])
def test_a_run_that_goes_on_keeps_its_bins(one_rank: ParallelGroups, tmp_path: Path, how: str) -> None:
    """Other batches would add up in another order; whoever types them has them."""
    kinds = {"perform_rl_step": False, "grpo_group_size": False, "grpo_prompts_per_step": False}
    begun = tiny_config(**kinds, micro_batch_size=3, global_batch_size=6)
    run = saving_run(begun, one_rank, tmp_path / "checkpoints")
    train_a_step(run)
    run.save(final=True)
    run.closing.close()
    places = {"resume": True, "save": tmp_path / "checkpoints"} if how == "resume" else {"load": tmp_path}
    kinds |= places | {"micro_batch_size": False, "global_batch_size": 6}
    assert bin_size(tiny_config(**kinds), 1, VOCABULARY, LARGE) == 3 * 48
    begins_anew = bin_size(tiny_config(**kinds, finetune=True), 1, VOCABULARY, LARGE)
    assert begins_anew == (3 * 48 if how == "resume" else 4 * 48)
    assert bin_size(tiny_config(**kinds | {"micro_batch_size": 2}), 1, VOCABULARY, LARGE) == 2 * 48
    assert bin_size(tiny_config(**kinds, seq_length=200), 1, VOCABULARY, LARGE) == 4 * 200, "too short for one"


def _reading(config: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` finds ``config`` on its command line, and nothing wrong with it."""
    monkeypatch.setattr(main, "read_config", lambda *_: (config, []))
    monkeypatch.setattr(main, "every_problem", lambda *_: [])
    monkeypatch.setattr(main, "configure_logging", lambda _: None)


def _built_with(config: RLConfig, on: Platform, job: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> RLConfig:
    """The configuration of which `main` builds a run on ``on``."""
    found: list[RLConfig] = []
    _reading(config, monkeypatch)
    monkeypatch.setattr(platform, "current_platform", lambda: on)
    monkeypatch.setattr(groups, "initialize", lambda *_: job)
    monkeypatch.setattr(groups, "shut_down", lambda: None)

    @contextlib.contextmanager
    def open_run(config: RLConfig, *_: Any) -> Iterator[None]:
        found.append(config)
        raise KeyError
        yield

    monkeypatch.setattr(base, "open_run", open_run)
    with pytest.raises(KeyError):
        main.main(["train"], stop=StopRequest())
    return found[0]


def test_a_run_begins_with_a_line(
    one_rank: ParallelGroups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU nothing changes, and nothing is said."""
    monkeypatch.setattr(logging.getLogger("megatron_rl"), "propagate", True)
    caplog.set_level(logging.INFO)
    write_tokenizer(tmp_path / "tokenizer")
    config = tiny_config(**PLAIN, tokenizer_model=tmp_path / "tokenizer", run_dir=tmp_path / "run", bf16=True)
    assert _built_with(config, Platform(torch.device("cpu"), "gloo"), one_rank, monkeypatch) == config
    assert "GPU" not in caplog.text
    built = _built_with(config, GPU, one_rank, monkeypatch)
    assert built == config.with_values(rl_sequence_packing_bin_size=16_384)
    assert "on this GPU: CUDA graphs after 128 decode steps, bins of 16,384 tokens, bf16" in caplog.messages


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({}, "CUDA graphs after 128 decode steps, bins of 16,384 tokens, bf16"),
        ({"enable_cuda_graph": True, "micro_batch_size": 2}, "CUDA graphs, bins of 2,048 tokens, bf16"),
        ({"no_enable_cuda_graph": True}, "no CUDA graphs, bins of 16,384 tokens, bf16"),
        ({"num_experts": 4, "add_qkv_bias": False, "no_moe_grouped_gemm": True},
         "no CUDA graphs, bins of 16,384 tokens, bf16"),
        ({"perform_rl_step": False, "grpo_group_size": False, "grpo_prompts_per_step": False,
          "rl_max_new_tokens": False}, "bins of 1,024 tokens, bf16"),
        ({"bf16": False}, "CUDA graphs after 128 decode steps, bins of 16,384 tokens, fp32"),
    ],
)  # fmt: skip
def test_check_says_it_too(
    flags: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(**PLAIN | {"bf16": True, "check": True} | flags, estimate_vocab_size=VOCABULARY)
    _reading(config, monkeypatch)
    assert main.main(["check"]) == 0
    assert capsys.readouterr().out == "configuration is valid\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=LARGE))
    assert main.main(["check"]) == 0
    first, *notes, last = capsys.readouterr().out.splitlines()
    assert (first, last) == (f"on this GPU: {line}", "configuration is valid")
    _reading(config.with_values(check_world_size=1), monkeypatch)
    assert main.main(["check"]) == 0
    assert capsys.readouterr().out == "configuration is valid\n", "the GPUs of a cluster are not those of this machine"
    assert notes == [*gpu_lines(config, 1)][1:] and ("tensor cores" in str(notes)) == (not config.precision.bf16)
