"""Event files, and what happens without the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.metrics import writers
from megatron_rl.metrics.rollouts import TextSample
from megatron_rl.metrics.writers import TensorBoardWriter


def test_scalars_are_written_and_resumed_steps_replace_earlier_ones(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardWriter(tmp_path)
    for step in (1, 2, 3):
        first.write(step, {"actor/lr": 1.0})
    first.close()
    resumed = TensorBoardWriter(tmp_path, resume_step=2)
    resumed.write(3, {"actor/lr": 2.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/lr")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_samples_are_texts_that_markdown_leaves_alone(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter(tmp_path)
    writer.write_samples(10, [TextSample("best", 0, "toy", "7", "2+2=", "# so\n4", 1.0, True, "4", 0.5, 2)])
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    [event] = events.Tensors("samples/best/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert (event.step, text) == (
        10,
        "prompt:\n\n    2+2=\n\nanswer:\n\n    # so\n    4\n\n"
        "reward:\n\n    1, correct; right answer: 4; mean of the group's 2: 0.5",
    )


def test_missing_package_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(writers, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoardWriter(tmp_path)
