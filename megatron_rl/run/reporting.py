"""From a step's numbers to the run directory and the screen."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.algorithms import TokenBatch
from megatron_rl.atomic import Dispensable, remove
from megatron_rl.config.rl_config import RLConfig, difference_from_defaults, to_dict
from megatron_rl.environments.child import importable
from megatron_rl.metrics.alarms import AlarmWriter
from megatron_rl.metrics.console import ConsoleWriter, print_table
from megatron_rl.metrics.evaluation import by_environment, result_table, with_average
from megatron_rl.metrics.jsonl import JsonlWriter, read_rows, write_json_atomic
from megatron_rl.metrics.report import write_report
from megatron_rl.metrics.rollouts import (
    TextSample,
    rows_by_group,
    samples_of,
    training_rows,
    worst_and_best,
    write_rows,
)
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.metrics.writers import MetricLog, TensorBoardWriter, WandbWriter, wandb_mode
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.parameters import sum_over_model
from megatron_rl.platform import Platform
from megatron_rl.platform.collectives import collect_json, gather_json, gather_vectors
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.progress import Progress
from megatron_rl.types import RolloutGroup

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 60.0
NICENESS = 10
"""It may have a core that a rank wants: the rank comes first."""
PATIENCE_S = 20.0


class Reporter:
    """Owns the metric writers of rank 0; the other ranks have one that writes nowhere."""

    def __init__(
        self, config: RLConfig, groups: ParallelGroups, directory: RunDirectory, timer: PhaseTimer, platform: Platform,
        command: Sequence[str],
    ) -> None:  # fmt: skip
        self._config = config
        self._groups = groups
        self._directory = directory
        self._timer = timer
        self._platform = platform
        self._started = time.monotonic()
        self._command = command
        self._samples: list[TextSample] = []
        self._live: LiveReport | None = None
        self._logged_groups = config.logging.rl_log_rollouts
        self._dispensable = Dispensable("without its records of answers, while they do not fit")
        self.log = MetricLog()

    def open(self, progress: Progress) -> None:
        """Begin to write, after the rows of ``progress``: the program is built and takes its first step."""
        if not self._groups.is_main:
            return
        settings, config = to_dict(self._config), self._config.logging
        self._directory.create(settings, difference_from_defaults(self._config), self._command)
        displays = [
            ConsoleWriter(sys.stdout, self._config.total_steps),
            TensorBoardWriter(Path(config.tensorboard_dir), resume_step=progress.newest_row),
        ]
        if self._config.training.perform_rl_step or self._config.training.eval_only:
            past = (row for row in read_rows(self._directory.metrics) if row["step"] <= progress.newest_row)
            displays.append(AlarmWriter(past, self._directory))
        if config.wandb_project is not None and wandb_mode(config.wandb_mode) != "disabled":
            place = config.wandb_project, config.wandb_exp_name, Path(config.wandb_save_dir)
            displays.append(WandbWriter(*place, settings, config.wandb_mode, config.wandb_entity))
        self.log = MetricLog(JsonlWriter(self._directory.metrics, resume_step=progress.newest_row), displays)
        self._live = LiveReport(self._directory.path)

    def step(self, step: int, metrics: dict[str, float], policy: PolicyModel) -> None:
        """Add timings and what the user asked for, and write the row; collective."""
        self._write_row(step, self._row(metrics, policy))

    def _row(self, metrics: dict[str, float], policy: PolicyModel) -> dict[str, float]:
        row = dict(metrics)
        row |= self._timer.collect() | self._platform.memory_metrics()
        row |= self._throughput(row, policy)
        logging_config = self._config.logging
        if logging_config.log_straggler:
            row |= self._straggler(row)
        if logging_config.log_params_norm:
            row["actor/params_norm"] = parameter_norm(policy, self._groups)
        return row

    def _write_row(self, step: int, row: dict[str, float]) -> None:
        evaluated = any(name.startswith("val/") for name in row)
        due = step % self._config.logging.log_interval == 0 or step == self._config.total_steps
        if not self._groups.is_main:
            return
        if due or evaluated:
            self.log.write(step, row)
        if self._samples:
            self.log.write_samples(step, self._samples)
            self._samples = []
        self._live.offer(evaluated)

    def records(
        self, step: int, groups: Sequence[RolloutGroup], decode_raw: Callable[[Sequence[int]], str],
        numbers: Sequence[int], updates: Sequence[Sequence[TokenBatch]],
    ) -> None:  # fmt: skip
        """Write the first `--rl-log-rollouts` groups of the step as JSON lines, whichever rank has them; collective.

        ``numbers`` are those of this rank's ``groups``, ``updates`` what it trained on, with advantages. Every
        `--log-samples-interval` steps a sample of the worst and of the best group is kept for `step` to show.
        """
        config, replicas = self._config.logging, self._groups.rollout_group
        if not self._groups.leads_model:
            return
        if config.log_samples_interval and step % config.log_samples_interval == 0:
            own = [vars(sample) for sample in samples_of(groups, numbers, decode_raw)]
            everywhere = collect_json(own, replicas) or []
            self._samples = worst_and_best([TextSample(**sample) for part in everywhere for sample in part])
        wanted = self._logged_groups
        if not wanted:
            return
        trained = [
            (*numbers, update, advantage)
            for update, batches in enumerate(updates)
            for batch in batches
            for numbers, advantage in sequence_advantages(batch).items()
        ]
        everywhere = gather_json(trained, replicas)
        use = {(sample, sequence): use for part in everywhere for sample, sequence, *use in part}
        parts = collect_json(training_rows(step, groups, numbers, use, wanted, decode_raw), replicas)
        if parts is not None:
            self._write_rollouts(step, sorted((row for part in parts for row in part), key=lambda row: row["group"]))

    def _write_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._write(self._directory.rollouts_path(step), rows)

    def evaluation_records(
        self, step: int, groups: Sequence[RolloutGroup], decode_raw: Callable[[Sequence[int]], str]
    ) -> None:
        """Write `--rl-log-rollouts` tasks of each environment: sampled and greedy answers, by turns in ``groups``."""
        wanted = self._config.logging.rl_log_rollouts
        if self._groups.is_main and wanted:
            by_group = rows_by_group(step, first_of_each(groups, wanted), decode_raw)
            rows = [{**row, "greedy": index % 2 == 1} for index, rows in enumerate(by_group) for row in rows]
            self._write(self._directory.evaluation_path(step), rows)

    def _write(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._dispensable.writing(path):
            remove(path)  # what an earlier start did in this step
            write_rows(path, rows)

    def dump_batches(self, step: int, updates: Sequence[Sequence[TokenBatch]]) -> None:
        """Keep the batches of a skipped update: they hold the cause of its non-finite gradient."""
        path = self._directory.logs / f"nonfinite_step_{step:06d}_rank_{self._groups.rank}.jsonl"
        logger.warning("step %d: a non-finite gradient, update skipped; its batch is in %s", step, path)
        with self._dispensable.writing(path), path.open("w", encoding="utf-8") as stream:
            for index, update in enumerate(updates):
                for batch in update:
                    stream.write(json.dumps(_batch_record(index, batch)) + "\n")

    def finish(self, summary: dict[str, object]) -> None:
        """Close the writers, then write the summary and the report; on rank 0."""
        self.close()
        status = summary["status"]
        self._directory.set_status(status)
        write_json_atomic(self._directory.summary, summary)
        if self._config.training.eval_only and status == "finished":
            rows = read_rows(self._directory.metrics)
            results = {row["step"]: with_average(by_environment(row)) for row in rows}
            [alone, *others] = results.values()
            write_json_atomic(self._directory.path / "evaluation.json", results if others else alone)
            print_table(sys.stdout, *result_table(*rows))
        write_report(self._directory.path)

    @property
    def seconds(self) -> float:
        """Since the run was built."""
        return time.monotonic() - self._started

    def close(self) -> None:
        """Flush whatever is open, and wait for the report that is being written."""
        self.log.close()
        if self._live is not None:
            self._live.close()
        self.log = MetricLog()

    def _throughput(self, row: dict[str, float], policy: PolicyModel) -> dict[str, float]:
        """verl's tokens a second a rank; on request model FLOPs: 6 N a trained token (LoRA 4 N), 2 N a drawn one."""
        seconds, tokens = row.get("timing_s/step"), row.get("perf/total_num_tokens")
        if not seconds or not tokens:
            return {}
        rates = {"perf/throughput": tokens / seconds / self._groups.world_size}
        generated, generating = row.get("perf/generated_tokens", 0.0), row.get("timing_s/gen")
        if generated and generating:
            rates["perf/rollout_tokens_per_s"] = generated / generating
        if self._config.logging.log_throughput:
            parameters = active_parameters(policy, self._groups)
            trained = 6 if self._config.lora.lora_rank is None else 4  # frozen weights have no gradient
            flops = parameters * (trained * tokens + 2 * generated)
            rates["perf/tflops_per_rank"] = flops / seconds / self._groups.world_size / 1e12
        return rates

    def _straggler(self, row: dict[str, float]) -> dict[str, float]:
        own = torch.tensor([row.get("timing_s/update_actor", 0.0)], dtype=torch.float64)
        seconds = torch.cat(gather_vectors(own, dist.group.WORLD))
        return {
            "straggler/update_s_fastest": seconds.min().item(),
            "straggler/update_s_slowest": seconds.max().item(),
            "straggler/slowest_rank": float(seconds.argmax()),
        }


class LiveReport:
    """Refreshes the report of ``run_dir`` once a minute at most, one process at a time."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._last = clock()
        self._process: subprocess.Popen | None = None
        self._begun = self._broken = False

    def offer(self, evaluated: bool) -> None:
        """Refresh it if it is time, which the first evaluation always is; the rows of the step are written."""
        status = 0 if self._process is None else self._process.poll()
        due = self._clock() - self._last >= REPORT_INTERVAL_S or (evaluated and not self._begun)
        if self._broken or status is None:
            return
        if status != 0:
            self._give_up(f"exit status {status}")
        elif due:
            self._begun, self._last = True, self._clock()
            try:
                self._process = start_report(self._run_dir)
            except OSError as error:
                self._give_up(str(error))

    def close(self) -> None:
        """Wait for the process that writes, so that it does not overwrite what comes after."""
        if self._process is not None:
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _give_up(self, reason: str) -> None:
        self._broken = True
        logger.warning(
            "report.html is not refreshed any more (%s); python -m megatron_rl.metrics.report %s says why",
            reason, self._run_dir,
        )  # fmt: skip


def start_report(run_dir: Path) -> subprocess.Popen:
    """Begin to write the report of ``run_dir``, from what lies there now.

    Raises:
        OSError: no process can be started.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.metrics.report", os.path.realpath(run_dir)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **importable()},
    )
    with contextlib.suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    return process


def first_of_each(groups: Sequence[RolloutGroup], count: int) -> list[RolloutGroup]:
    """Return the pairs of groups of the first ``count`` tasks of each environment."""
    seen: Counter[str] = Counter()
    kept: list[RolloutGroup] = []
    for sampled, greedy in zip(groups[::2], groups[1::2], strict=True):
        seen[sampled.source.environment] += 1
        if seen[sampled.source.environment] <= count:
            kept += [sampled, greedy]
    return kept


def _batch_record(update: int, batch: TokenBatch) -> dict[str, object]:
    def finite(values: torch.Tensor) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in values.tolist()]

    return {
        "update": update,
        "sample_ids": batch.samples.sample_id,
        "sequences": batch.samples.sequence.tolist()[: len(batch.samples.sample_id)],
        "lengths": batch.packing.lengths,
        "token_ids": batch.samples.token_ids.tolist(),
        "loss_mask": batch.loss_mask.tolist(),
        "advantages": finite(batch.advantages),
        "inference_logprobs": finite(batch.inference_logprobs),
    }


@torch.no_grad()
def parameter_norm(policy: PolicyModel, groups: ParallelGroups) -> float:
    """Return the L2 norm over the whole model; what several ranks hold counts once."""
    return math.sqrt(sum_over_model(policy.chunks, groups, lambda _, values: values.double().square().sum()).item())


def active_parameters(policy: PolicyModel, groups: ParallelGroups) -> float:
    """Count the parameters of the whole model that a token uses: of the experts those it is sent to; collective."""
    experts, chosen = policy.config.num_moe_experts or 1, policy.config.moe_router_topk
    met = {True: chosen / experts, False: 1.0}

    def share(name: str, values: torch.Tensor) -> torch.Tensor:
        return torch.tensor(values.numel() * met[".experts." in name], dtype=torch.float64)

    return sum_over_model(policy.chunks, groups, share).item()


def sequence_advantages(batch: TokenBatch) -> dict[tuple[int, int], float]:
    """Return the mean advantage of each sequence's tokens, by its sample's number and its own in the sample."""
    numbers = zip(batch.samples.sample_id, batch.samples.sequence.tolist(), strict=False)
    return dict(zip(numbers, batch.sequence_means(batch.advantages).tolist(), strict=False))
