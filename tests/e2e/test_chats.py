"""Chat template, its variables and the system prompt in whole runs: RL, supervised, resumed."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.support.chats import STRICT, chat
from tests.support.runs import rows_of, run, run_many

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


def test_rows_that_the_template_refuses_are_skipped(workshop, flags):
    """A template like Gemma's: no system message, and roles that alternate. Of six rows of each kind it takes four."""
    rows, held = workshop.folder / "rows.jsonl", workshop.folder / "held.jsonl"
    for file, sign in ((rows, "+"), (held, "-")):
        odd = [chat("system: Be short.", f"user: 8{sign}1="), chat("user: Well,", f"user: 9{sign}1=")]
        prompts = [*(chat(f"user: {number}{sign}1=") for number in range(4)), *odd]
        file.write_text("".join(json.dumps({"q": prompt, "a": "1"}) + "\n" for prompt in prompts))
    template = workshop.folder / "strict.jinja"
    template.write_text(STRICT)

    def named(name: str, **columns: str) -> dict[str, object]:
        args = {"path": str(rows), "test_path": str(held), "reward": "exact", **columns}
        same = {"chat_template": template, "chat_template_kwargs": None, "system_prompt": None, "seq_length": 96}
        entries = [{"environment": "dataset", "args": args}]
        return flags | same | {"langrl_env_config": workshop.environments(name, entries)}

    asked = named("asked", prompt="q", answer="a")
    once = {"train_iters": 3, "save_interval": 1, "eval_interval": 3}
    rl = workshop.rl("strict_rl", **asked, **once, grpo_prompts_per_step=2)
    taught = workshop.supervised("strict_sft", **named("taught", prompt="q", completion="a"), **once)
    outcomes = run_many([rl, taught])
    alone = workshop.rl("strict_eval", **asked, eval_only=True, load=workshop.run_dir("strict_rl") / "checkpoints")
    all_odd = workshop.rl("all_odd", **asked | {"langrl_env_config": workshop.environments(
        "all_odd", [{"environment": "dataset", "args": {"path": str(rows), "system": "Be short.", "prompt": "q",
                                                        "answer": "a", "reward": "exact"}}])})  # fmt: skip
    outcomes += run_many([alone, all_odd])
    for outcome, code in zip(outcomes, (3, 0, 0, 2), strict=True):
        assert "Traceback" not in outcome.check(code).output
        assert "TemplateError: System role not supported" in outcome.output
    for name, kind in (("strict_rl", "prompts"), ("strict_sft", "demonstrations")):
        skipped = [row[f"training/skipped_{kind}"] for row in rows_of(workshop.run_dir(name)) if row["step"]]
        assert len(skipped) == 3 and sum(skipped) >= 2, skipped
    assert "dataset: the chat template cannot render train row 0 of system, user (T" in outcomes[-1].output
