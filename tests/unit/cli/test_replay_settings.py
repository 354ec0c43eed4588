"""A replay takes the settings that an earlier version saved, whose second spellings were fields."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.cli import replay
from megatron_rl.config.rl_config import to_dict
from tests.support.tiny import tiny_config


def test_settings_of_an_earlier_version_keep_their_meaning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = tiny_config()
    settings = {name: value for section in to_dict(plain).values() for name, value in section.items()}
    settings |= {"save": str(tmp_path), "load": None, "train_iters": None, "lr_decay_iters": None}
    settings |= {"train_samples": 10 * plain.samples_per_step, "lr_warmup_samples": 0, "lr_warmup_iters": 3}
    settings |= {"grpo_clamp_eps_upper": 0.28, "rl_dual_clip": None, "recompute_activations": False}
    monkeypatch.setattr(replay, "unrepeatable", lambda *_: None)
    monkeypatch.setattr(replay, "every_problem", lambda config, problems, _: problems)
    run = SimpleNamespace(path=tmp_path, read_settings=lambda: settings)
    config = replay.replayed_config(run, replay.Choice(step=1), tmp_path, [])
    assert (config.training.train_iters, config.schedule.lr_decay_iters, config.schedule.lr_warmup_iters) == (10, 10, 3)
    assert config.algorithm.rl_policy_loss_args == ("clamp_eps_upper=0.28",)
