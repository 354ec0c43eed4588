"""Starts the product as a user does: a model directory in, a run directory and a Hugging Face export out.

Runs that need as many ranks share one launch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tests.oracles.algorithm import OF_A_LOSS, Settings
from tests.oracles.compare import Outputs, differences
from tests.oracles.models import write_model
from tests.support.runs import Outcome, command, rows_of, run_many
from tests.support.tiny import write_tokenizer

TWO_UPDATES = {"global_batch_size": 8}
TWO_PASSES = {"global_batch_size": 8, "grpo_iterations": 2}
NARROW = {"grpo_clamp_eps_lower": 0.02, "grpo_clamp_eps_upper": 0.05}
"""Two updates move most tokens beyond this clip range."""
ALWAYS: Mapping[str, Any] = {
    "perform_rl_step": True, "grpo_group_size": 4, "grpo_prompts_per_step": 4, "rl_max_new_tokens": 16,
    "rl_log_rollouts": 4, "seq_length": 48, "make_vocab_size_divisible_by": 8, "micro_batch_size": 2,
    "train_iters": 1, "lr": 1e-2, "lr_decay_style": "constant", "adam_eps": 1e-3, "weight_decay": 0.1,
}  # fmt: skip
"""Four groups of four answers and one update, unless a case says otherwise.

The epsilon is of the order of the gradients: with one far below, a first update is the learning rate times a sign,
whatever the gradient. The weight decay is large enough to show.
"""


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    family: str = "qwen2"
    tied: bool = False
    ranks: int = 1
    environment: str = "Digits"
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """False for an evaluation alone."""
        return "eval_only" not in self.flags

    @property
    def settings(self) -> Settings:
        """What the oracle is told: the flags that it knows, and what goes without saying."""
        known = {setting.name for setting in fields(Settings)}
        unsaid = OF_A_LOSS.get(self.flags.get("rl_policy_loss", "clip"), {})
        if "rl_rollout_quantization" in self.flags:
            unsaid = {**unsaid, "rl_correction": "token_tis"}
        flags = {**ALWAYS, **unsaid, **self.flags}
        return Settings(**{name: value for name, value in flags.items() if name in known})

    @property
    def number_of_groups(self) -> int:
        """Of its step."""
        return {**ALWAYS, **self.flags}["grpo_prompts_per_step"]

    @property
    def number_of_steps(self) -> int:
        """Each is a rollout and its updates."""
        return {**ALWAYS, **self.flags}["train_iters"]


@dataclass(frozen=True)
class Cast:
    """One export of a bf16 model to 8 bits."""

    format: str
    powers_of_two: bool
    source: Path
    target: Path

    def command(self) -> list[str]:
        """The product's own script."""
        flags = {"input-bf16-hf-path": self.source, "output-fp8-hf-path": self.target, "format": self.format}
        flags["force-pow-2-scale"] = str(self.powers_of_two)
        return ["tools/checkpoint/bf16_cast_fp8.py", *command(flags)]


@dataclass(frozen=True)
class Run:
    """What a case left behind."""

    case: Case
    model: Path
    """It began with this."""
    export: Path
    """What it ended with, as the product's own converter writes it."""
    run_dir: Path
    outcomes: Sequence[Outcome]

    def check(self) -> Run:
        """Fails the test unless training and export ended well."""
        for outcome in self.outcomes:
            outcome.check()
        return self

    @property
    def records(self) -> list[Path]:
        """Of its steps, or of its evaluation."""
        return sorted((self.run_dir / "rollouts").glob("step_*.jsonl" if self.case.trains else "eval_*.jsonl"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Of its steps, or of its evaluation."""
        return rows_of(self.run_dir)

    def differences(self, **otherwise: Any) -> list[str]:
        """See ``compare.differences``; ``otherwise`` are settings that the oracle is told, and the run was not."""
        self.check()
        settings = replace(self.case.settings, **otherwise)
        seen = Outputs(self.model, self.export, self.records, self.metrics)
        return differences(seen, settings, "rl_rollout_quantization" in self.case.flags)


class Workshop:
    """Model directories and launches in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = write_tokenizer(folder / "tokenizer")

    def model(self, family: str, tied: bool) -> Path:
        """Made once, with its tokenizer."""
        directory = self._folder / f"{family}_{'tied' if tied else 'untied'}"
        if not directory.exists():
            write_model(directory, family, tied=tied)
            shutil.copytree(self._tokenizer, directory, dirs_exist_ok=True)
        return directory

    def run(self, cases: Sequence[Case], casts: Sequence[Cast] = ()) -> dict[str, Run]:
        """All of them, in one launch for each number of ranks."""
        found: dict[str, Run] = {}
        for ranks in sorted({case.ranks for case in cases}):
            chosen = [case for case in cases if case.ranks == ranks]
            commands = [self._train(case) for case in chosen] + [self._export(case) for case in chosen if case.trains]
            commands += [cast.command() for cast in casts] if ranks == 1 else []
            outcomes = run_many(commands, ranks, timeout=600 + 60 * len(chosen))
            exports = iter(outcomes[len(chosen) :])
            for case, outcome in zip(chosen, outcomes, strict=False):
                found[case.name] = self._result(case, [outcome, next(exports)] if case.trains else [outcome])
        return found

    def _train(self, case: Case) -> list[str]:
        environments = self._folder / f"{case.environment}.yaml"
        entry = {"environment": f"tests.support.oracle_environments:{case.environment}"}
        environments.write_text(json.dumps([entry]))  # JSON is YAML
        flags = {**ALWAYS, **case.flags, "load_hf": self.model(case.family, case.tied)}
        flags |= {"langrl_env_config": environments, "run_dir": self._run_dir(case)}
        return command({name.replace("_", "-"): value for name, value in flags.items()})

    def _export(self, case: Case) -> list[str]:
        paths = {"input-dir": self._run_dir(case), "output-dir": self._folder / "exports" / case.name}
        paths["origin-hf-dir"] = self.model(case.family, case.tied)
        return ["tools/checkpoint/convert_torch_dist_to_hf.py", *command(paths)]

    def _result(self, case: Case, outcomes: Sequence[Outcome]) -> Run:
        model, export = self.model(case.family, case.tied), self._folder / "exports" / case.name
        return Run(case, model, export, self._run_dir(case), outcomes)

    def _run_dir(self, case: Case) -> Path:
        return self._folder / "runs" / case.name
