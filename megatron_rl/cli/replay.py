"""megatron-rl replay RUN --step N [--group G] [--sample K]: why a sample was trained on as it was.

    The run is done again from its newest checkpoint before step N up to that step, in this process and in a temporary
    directory; in RUN only the page and the report are written. Shown are prompt, answer and grade, each token with the
    log-probs of engine and trainer, correction, advantage, weight in the loss and gradient, the norm of the gradient by
    layer, and where all this differs from what the run recorded. Without --sample, the whole group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.atomic import write_text_atomic
from megatron_rl.cli.options import described, take
from megatron_rl.cli.replay_page import replay_page
from megatron_rl.config.arguments import Reading, read_flags
from megatron_rl.config.flags import Second, flag
from megatron_rl.config.rl_config import RLConfig, all_flags, all_spellings, resolve
from megatron_rl.config.rules import validate
from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.json_text import parse_json
from megatron_rl.main import CONFIGURATION_ERROR, RUN_ERROR, every_problem, refuse
from megatron_rl.metrics.console import print_table
from megatron_rl.metrics.jsonl import read_rows, write_json_atomic
from megatron_rl.metrics.logging import configure_logging
from megatron_rl.metrics.report import write_report
from megatron_rl.metrics.rollouts import shorten
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.signals import StopRequest
from megatron_rl.user_files import path_refusal

if TYPE_CHECKING:
    from megatron_rl.cli.replay_step import Replayed, TokenInLoss
    from megatron_rl.trainer.update import TrainOutcome
    from megatron_rl.types import Rollout, RolloutGroup

CLOSE = 1e-3
"""Nats by which log-probs of two machines may differ; on one machine they are equal."""
SHOWN = 1_000
"""Characters of a prompt or answer at each end."""
_NOT_TAKEN = frozenset({
    "config", "run_dir", "save", "resume", "save_interval", "keep_last", "keep_best", "async_save", "eval_interval",
    "tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_save_dir", "wandb_mode", "exit_interval",
    "exit_duration_in_mins", "callbacks", "rl_environment_port", "distributed_backend", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "sequence_parallel",
    "expert_tensor_parallel_size", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
    "rl_share_prompts",
})  # fmt: skip
"""Settings of the run that a replay does not have: it is one rank, saves, evaluates and shares nothing."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The step, group and sample that are shown."""

    step: int | None = flag(None, ge=1)
    """Step of the run."""
    group: int = flag(0, ge=0)
    """Number of the group in the step, as in the report."""
    sample: int | None = flag(None, ge=0)
    """Number of the sample in the group; all of them without it."""
    json: str | None = flag(None, path=True)
    """File for all numbers as JSON."""
    html: str | None = flag(None, path=True)
    """The page. Default: in RUN/replays, and the report of the run gets a link to it."""

    def page(self, directory: RunDirectory) -> Path:
        """Return where the page is written."""
        sample = "" if self.sample is None else f"_sample_{self.sample}"
        own = directory.replays / f"step_{self.step or 0:06d}_group_{self.group}{sample}.html"
        return own if self.html is None else Path(self.html)


USAGE = f"""usage: megatron-rl replay RUN --step N [--group G] [--sample K] [--html FILE] [--json FILE] [FLAGS]

{__doc__}
{described(Choice)}  and flags of a run for another machine, such as --load-hf, --langrl-env-config and --bf16
"""


def main(words: Sequence[str]) -> int:
    """Return the exit code: 0 shown, 1 failed, 2 wrong flags or files."""
    if {"-h", "--help"} & set(words) or not words or words[0].startswith("-"):
        sys.stdout.write(USAGE)
        return 0 if words else CONFIGURATION_ERROR
    configure_logging(rank=1)  # warnings alone
    try:
        if refusal := path_refusal(words[0]):
            raise ConfigError([f"RUN {refusal}"])
        choice, flags = take(Choice, words[1:])
        for name, file in (("--html", choice.html), ("--json", choice.json)):
            if file is not None and not Path(file).absolute().parent.is_dir():
                raise ConfigError([f"{name} {file} cannot be written; name a file in a directory that is there"])
        with tempfile.TemporaryDirectory(prefix="replay_") as folder:
            directory = RunDirectory(Path(words[0]))
            config = replayed_config(directory, choice, Path(folder), flags)
            if choice.html is None and not os.access(directory.path, os.W_OK):
                raise ConfigError([f"{directory.path} cannot be written; name a file for the page with --html FILE"])
            found, text_of = _replayed(config, choice)
        compared = _compared(directory, choice, found)
        _show(choice, found, text_of, compared)
        if choice.json is not None:
            write_json_atomic(Path(choice.json), _as_json(found, choice))
        _write_page(directory, choice, replay_page(words[0], choice, found, text_of, compared))
    except ConfigError as error:
        return refuse(error.problems)
    except MegatronRLError as error:
        sys.stderr.write(f"{error}\n")
        return RUN_ERROR
    return 0


def replayed_config(directory: RunDirectory, choice: Choice, folder: Path, flags: Sequence[str]) -> RLConfig:
    """Return the run's configuration for one rank, which goes on from the newest checkpoint before the step.

    Raises:
        ConfigError: every reason why that step cannot be taken again.
    """
    settings = directory.read_settings()
    if fault := unrepeatable(directory, settings, choice):
        raise ConfigError([fault])
    from megatron_rl.checkpoint.layout import list_checkpoints, step_of

    save, own = settings["save"], f"{settings['run_dir']}/"
    root = directory.path / save.removeprefix(own) if save.startswith(own) else Path(save)  # it may have been moved
    earlier = [path for path in list_checkpoints(root) if step_of(path) < choice.step]
    if earlier:
        settings |= {"load": str(earlier[-1]), "finetune": False}
    elif settings["load"] == save:  # which holds later steps alone
        settings |= {"load": None}
    asked = read_flags(flags)
    kept: dict[str, Any] = {"run_dir": str(folder / "run"), "wandb_mode": "disabled"}
    for each in all_flags():
        if each.name in settings and each.name not in _NOT_TAKEN:
            value = settings[each.name]
            kept[each.name] = tuple(value) if isinstance(value, list) else value
    reading = Reading(values=kept)
    for each, _ in all_spellings().values():  # an earlier version saved second spellings as fields
        if isinstance(each, Second) and settings.get(each.name) and each.name not in _NOT_TAKEN:
            reading.take(each, settings[each.name])
    reading.finish()
    config = resolve(RLConfig().with_values(**reading.values | asked.derived | asked.values), 1)
    if problems := every_problem(config, [*asked.problems, *validate(config, 1)], 1):
        raise ConfigError(problems)
    return config


def unrepeatable(directory: RunDirectory, settings: Mapping[str, Any], choice: Choice) -> str | None:
    last = directory.last_step()
    if choice.step is None:
        return f"--step is missing: a step of {directory.path}, 1 to {last}"
    if not settings.get("perform_rl_step"):
        return f"{directory.path} is no RL run: supervised steps have no samples to look at"
    if last is None or choice.step > last:
        return f"--step {choice.step}: the last step of {directory.path} is {last}"
    if settings.get("rl_partial_rollouts") or settings.get("rl_surplus") == "keep":
        return (
            f"{directory.path} has --rl-partial-rollouts or --rl-surplus keep: which groups a step had depends on the "
            "steps before it or on the number of ranks, so none of its steps can be replayed"
        )
    size = settings["grpo_group_size"]
    if choice.sample is not None and choice.sample >= size:
        return f"--sample {choice.sample}: a group has {size} samples, 0 to {size - 1}"
    if choice.group >= settings["grpo_prompts_per_step"]:
        return f"--group {choice.group}: a step has {settings['grpo_prompts_per_step']} groups, counted from 0"
    return None


def _replayed(config: RLConfig, choice: Choice) -> tuple[Replayed, Any]:
    from megatron_rl.cli.replay_step import replay
    from megatron_rl.loop import rl_step
    from megatron_rl.platform import current_platform
    from megatron_rl.platform.groups import initialize, shut_down
    from megatron_rl.run import rl
    from megatron_rl.run.base import open_run
    from megatron_rl.run.preflight.inputs import open_tokenizer
    from megatron_rl.run.training import record_updates

    size = config.algorithm.grpo_group_size
    first = choice.group * size
    numbers = range(first, first + size) if choice.sample is None else [first + choice.sample]
    stop, platform = StopRequest().install(), current_platform()
    groups = initialize(config.parallel, platform, config.kernels)
    try:
        with open_run(config, platform, groups, open_tokenizer(config), stop, ["megatron-rl", "replay"]) as base:
            run = rl.build(base)
            stop.started()  # from now on a Ctrl-C asks for an end, and leaves nothing behind
            begin = run.progress.step

            def take_step(run: rl.RLRun, step: int) -> TrainOutcome | None:
                sys.stderr.write(f"step {step} of {begin + 1} to {choice.step}\n")
                outcome = rl_step(run, step)
                if outcome is not None:
                    record_updates(run, outcome)
                return outcome

            found = replay(run, choice.step, frozenset(numbers), take_step)
            if found is None:
                raise MegatronRLError(f"stopped ({stop.reason}) before step {choice.step} was over")
            if choice.group >= len(found.groups):
                raise ConfigError([f"--group {choice.group}: step {choice.step} trained on {len(found.groups)} groups"])
            return found, run.tokenizer.decode_raw
    finally:
        with contextlib.suppress(RuntimeError):
            shut_down()


def _write_page(directory: RunDirectory, choice: Choice, page: str) -> None:
    path = choice.page(directory)
    try:
        if choice.html is None:
            path.parent.mkdir(exist_ok=True)
        write_text_atomic(path, page)
        if choice.html is None:
            write_report(directory.path)
    except OSError as error:
        raise MegatronRLError(f"{path} cannot be written ({error.strerror}); name another with --html FILE") from error
    sys.stdout.write(f"\n{path}\n")


def _show(choice: Choice, found: Replayed, text_of: Any, compared: Sequence[tuple[str, str, str]]) -> None:
    group, write = found.groups[choice.group], sys.stdout.write
    write(f"step {choice.step}, group {choice.group}: {group.source.environment} {group.source.task.id}\n")
    write(f"prompt: {shorten(text_of(group.prompt_ids), SHOWN, SHOWN)}\n")
    rewards = ["failed" if each.grade.failed else f"{each.grade.reward:.4g}" for each in group.rollouts]
    write(f"rewards of the group: {', '.join(rewards)}\n")
    for number in range(len(group.rollouts)) if choice.sample is None else [choice.sample]:
        rollout = group.rollouts[number]
        grade = f"failed ({rollout.grade.code})" if rollout.grade.failed else f"{rollout.grade.reward:.4g}"
        answer = shorten(text_of(_written(rollout)), SHOWN, SHOWN)
        write(f"sample {number}: reward {grade}{rollout.grade.status and f', {rollout.grade.status}'}: {answer}\n")
    if found.update is None:
        write("\nnot in the loss: no reward variance in its group, a failed grade, or no update in this step\n")
    else:
        _show_update(found, text_of)
    write("\nagainst what the run recorded\n")
    print_table(sys.stdout, ("", "recorded", "replayed"), compared)


def _show_update(found: Replayed, text_of: Any) -> None:
    sys.stdout.write(f"\nupdate {found.update} of the step, denominator of its loss {found.denominator}\n")
    headers = ("token", "engine", "trainer", "ratio", "correction", "advantage", "d loss / d log-prob", "gradient")
    rows = [
        (
            shorten(text_of([one.token]), 40, 40), f"{one.inference:.4f}", f"{one.old:.4f}", f"{one.ratio:.4f}",
            f"{one.correction:.3f}", f"{one.advantage:.4f}", f"{one.slope:.3g}", f"{one.gradient:.3g}",
        )
        for one in found.tokens
    ]  # fmt: skip
    print_table(sys.stdout, headers, rows)
    sys.stdout.write("\nnorm of the gradient before clipping\n")
    print_table(sys.stdout, ("part", "norm"), [(part, f"{norm:.4g}") for part, norm in found.norms.items()])


def _compared(directory: RunDirectory, choice: Choice, found: Replayed) -> list[tuple[str, str, str]]:
    """Rows of metrics and, where the group was recorded, of its samples; ``differs`` marks what is another."""
    steps = [row for row in read_rows(directory.metrics) if row["step"] == choice.step]
    rows = []
    for name in ("critic/rewards/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm"):
        if steps and name in steps[-1] and name in found.metrics:
            then, now = steps[-1][name], found.metrics[name]
            mark = "" if abs(then - now) <= CLOSE * max(1.0, abs(then)) else " differs"
            rows.append((name, f"{then:.6g}", f"{now:.6g}{mark}"))
    path = directory.rollouts_path(choice.step)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    recorded = [row for row in map(parse_json, lines) if row["group"] == choice.group]
    if not recorded:
        return [*rows, ("the group's samples", "not recorded", "--rl-log-rollouts was smaller")]
    group = found.groups[choice.group]
    for row in recorded:
        if row["branch"] == 0 and choice.sample in (None, row["sample"]):
            rows.append(_compared_sample(row, group, group.rollouts[row["sample"]]))
    return rows


def _compared_sample(row: Mapping[str, Any], group: RolloutGroup, rollout: Rollout) -> tuple[str, str, str]:
    then, now = row["token_ids"], list(rollout.completion.token_ids)
    name, reward = f"sample {row['sample']}", rollout.grade.reward
    if then != now:
        at = next((n for n, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
        return name, f"{len(then)} tokens", f"differs from token {at} on: other weights, tasks, versions or hardware"
    if row["task_id"] != group.source.task.id or row["reward"] != reward:
        return name, f"reward {row['reward']} of {row['task_id']}", f"differs: {reward} of {group.source.task.id}"
    pairs = zip(row["inference_logprobs"], rollout.completion.inference_logprobs, strict=True)
    apart = max((abs(a - b) for a, b in pairs), default=0.0)
    mark = "" if apart <= CLOSE else " differs"
    return name, f"{len(then)} tokens, reward {reward}", f"the same, log-probs within {apart:.1e}{mark}"


def _written(rollout: Rollout) -> Sequence[int]:
    return [token for completion in rollout.completions for token in completion.token_ids]


def _as_json(found: Replayed, choice: Choice) -> dict[str, Any]:
    tokens: Sequence[TokenInLoss] = found.tokens
    return {
        "step": choice.step, "group": choice.group, "sample": choice.sample, "update": found.update,
        "denominator": found.denominator, "tokens": [dataclasses.asdict(one) for one in tokens],
        "gradient_norms": found.norms, "metrics": found.metrics,
    }  # fmt: skip
