"""Chat template, its variables and the system prompt in whole runs: RL, supervised, resumed."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.support.runs import run, run_many

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if not thinking %}<no>{% endif %}"
)
DIGITS = {"environment": "tests.support.e2e_environments:Digits", "args": {"chat": True}}


@pytest.fixture(scope="module")
def flags(workshop):
    """A byte-level tokenizer with a template of its own, and a template that takes its place."""
    make = ROOT / "examples" / "dapo_pipeline_check" / "make_tokenizer.py"
    runpy.run_path(str(make))["main"](workshop.folder / "bytes")
    (workshop.folder / "run.jinja").write_text(TEMPLATE)
    (workshop.folder / "own.jinja").write_text("{{ messages[-1].content }}|")
    own = {"name": "own", "chat_template": str(workshop.folder / "own.jinja"), "system_prompt": ""}
    return {
        "tokenizer_model": workshop.folder / "bytes",
        "langrl_env_config": workshop.environments("chats", [DIGITS, DIGITS | own]),
        "chat_template": workshop.folder / "run.jinja",
        "chat_template_kwargs": '{"thinking": false}',
        "system_prompt": "Count.",
        "seq_length": 64,
    }


def prompts_of(run_dir: Path) -> set[tuple[str, str]]:
    """Environment and prompt of the first step's rollouts."""
    rows = [json.loads(line) for line in (run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    return {(row["environment"], row["prompt"]) for row in rows}


def test_a_run_is_asked_as_flags_and_entries_say_and_a_resume_compares(workshop, flags):
    began = workshop.rl("rl", **flags, train_iters=1, save_interval=1, rl_log_rollouts=64)
    supervised = workshop.supervised("supervised", **flags, train_iters=1)
    changed = workshop.rl("rl", **flags | {"system_prompt": "Add."}, train_iters=2, resume=True)
    rl, taught, other = run_many([began, supervised, changed])
    rl.check()
    taught.check()
    asked = prompts_of(workshop.run_dir("rl"))
    assert {environment for environment, _ in asked} == {"digits", "own"}
    for environment, text in asked:
        whole = ("system:Count.;user:", ";<no>") if environment == "digits" else ("", "|")
        assert text.startswith(whole[0]) and text.endswith(whole[1]), text
    other.check(1)
    assert "the chats of 'digits' have another system prompt than when the run began; use the same" in other.output
    same = workshop.rl("rl", **flags, train_iters=2, resume=True)
    run(same).check()


def test_wrong_settings_are_one_line_each_before_a_model_is_built(workshop, flags):
    broken = workshop.folder / "broken.jinja"
    broken.write_text("{% for m in messages %}\n{{ m.content }}\n{% endif %}")
    wrong = [
        ({"chat_template": broken}, f"chat template {broken} cannot render a single question (TemplateSyntaxError"),
        ({"chat_template": "none"}, "--chat-template none cannot be read (No such file or directory)"),
        ({"chat_template_kwargs": "{thinking: no}"}, "--chat-template-kwargs {thinking: no} is not JSON"),
        ({"langrl_env_config": workshop.digits}, "--system-prompt has no effect: all prompts are plain text"),
    ]
    outcomes = run_many([[*workshop.rl("wrong", **flags | change), "--check"] for change, _ in wrong])
    for (_, line), outcome in zip(wrong, outcomes, strict=True):
        assert line in outcome.check(2).output
        assert "Traceback" not in outcome.output
