"""Concurrent sessions of OpenAI clients: requests a second, useful rows of decode steps, prefixes that are reused.

    python -m tools.benchmark.sessions --shape 64x3 --sessions 64 --turns 6 --faulty 0.1

The engine, the endpoint and the rollouter are in this process, on one thread beside the endpoint's; all clients are in
one other process, which takes a core of its own. Of the ``--faulty`` sessions one half hangs after two turns until its
deadline, the other half dies there. The contender ``whole`` has none of these.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import runpy
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_rl.endpoint.calls import Endpoint
from megatron_rl.errors import MegatronRLError
from megatron_rl.inference.engine import EngineOptions
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.metrics.table import format_table
from megatron_rl.models import build_model, rollout_mode
from megatron_rl.parallel import ParallelGroups
from megatron_rl.platform import Platform
from megatron_rl.rollout.harnesses import HarnessSettings
from megatron_rl.rollout.rollouter import Rollouter, RolloutResult
from megatron_rl.signals import StopRequest
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.types import Grade, HarnessRun, Request, SamplingParams, SourcedTask, Task
from tools.benchmark.common import benchmark_config, command_line, one_rank, record_of, write_record
from tools.benchmark.session_clients import PROMPT, REPLY

MAKE_TOKENIZER = Path(__file__).parents[2] / "examples" / "dapo_pipeline_check" / "make_tokenizer.py"


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = command_line("sessions", shape="64x3", rounds=3)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=32, help="at most, a turn")
    parser.add_argument("--faulty", type=float, default=0.1, help="share of the sessions")
    parser.add_argument("--deadline", type=float, default=8.0, help="seconds, of those that hang")
    arguments = parser.parse_args(argv)
    with one_rank(arguments.seed) as (platform, groups):
        found = _measure(arguments, platform, groups)
    columns = list(next(iter(found.values())))
    print(format_table(["sessions", *columns], [[name, *row.values()] for name, row in found.items()]))
    write_record(arguments.json, record_of("sessions", arguments, found=found))


def _measure(arguments: argparse.Namespace, platform: Platform, groups: ParallelGroups) -> dict[str, dict[str, float]]:
    tokenizer, longest = _tokenizer(), PROMPT + arguments.turns * (arguments.new_tokens + REPLY)
    config = benchmark_config(arguments.shape, longest)
    policy = build_model(config, platform, tokenizer.vocab_size)
    engine = RolloutEngine(
        policy, EngineOptions(arguments.sessions, longest), tokenizer.end_token_ids, tokenizer.decode
    )
    endpoint = Endpoint(tokenizer, max_sequence_length=longest, max_new_tokens=arguments.new_tokens)
    endpoint.start()
    found: dict[str, dict[str, float]] = {}
    try:
        for name, faulty in (("whole", 0.0), ("faulty", arguments.faulty)):
            rounds = []
            for seed in range(arguments.rounds):
                with rollout_mode(policy):
                    rounds.append(_round(arguments, engine, endpoint, tokenizer, groups, seed, faulty))
            found[name] = sorted(rounds, key=lambda row: row["requests/s"])[len(rounds) // 2]
    finally:
        endpoint.close()
    return found


def _tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        runpy.run_path(str(MAKE_TOKENIZER))["main"](Path(folder))
        return load_tokenizer(folder)


def _round(
    arguments: argparse.Namespace,
    engine: RolloutEngine,
    endpoint: Endpoint,
    tokenizer: Tokenizer,
    groups: ParallelGroups,
    seed: int,
    faulty: float,
) -> dict[str, float]:
    """A rollout of one group."""
    moments: list[float] = []

    async def run(_: str, runs: Sequence[HarnessRun]) -> list[Grade]:
        job = {"runs": [asdict(each) for each in runs], "faulty": faulty, "seed": seed}
        job |= {"turns": arguments.turns, "deadline": arguments.deadline}
        command, pipe = (sys.executable, "-m", "tools.benchmark.session_clients"), asyncio.subprocess.PIPE
        player = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        answer, _ = await player.communicate(json.dumps(job).encode())
        told = json.loads(answer)
        moments.extend(told["moments"])
        return [Grade(reward, code=code) for reward, code in told["grades"]]

    settings = HarnessSettings({"sessions"}, run, endpoint)
    rollouter = Rollouter(engine, tokenizer, groups, None, StopRequest(), harnesses=settings)
    source = SourcedTask("sessions", Task(f"{seed}", "?"))
    request = Request(
        source, tuple(tokenizer.encode("?")), arguments.sessions, SamplingParams(max_new_tokens=arguments.new_tokens)
    )
    try:
        cpu = time.process_time()
        result = rollouter.run([request], seed, 0)
        cpu = time.process_time() - cpu
    finally:
        rollouter.close()
    return _figures(result, arguments, faulty, moments, cpu)


def _figures(
    result: RolloutResult, arguments: argparse.Namespace, faulty: float, moments: Sequence[float], cpu: float
) -> dict[str, float]:
    """Raises MegatronRLError where a session is lost that nothing was wrong with."""
    rollouts, statistics = result.groups[0].rollouts, result.statistics
    whole = [r for r in rollouts if not r.grade.failed]
    lost = arguments.sessions - round(arguments.sessions * faulty) - len(whole)
    if lost or any(r.completion.num_turns != arguments.turns or r.branches for r in whole):
        raise MegatronRLError(f"{lost} sessions are lost: {Counter(r.grade.code for r in rollouts)}")
    busy = max(moments) - min(moments)
    return {
        "requests/s": (len(moments) - 1) / busy,
        "tokens/s": statistics.generated_tokens / busy,
        "useful rows": (statistics.generated_tokens - statistics.completions) / statistics.decode_rows,
        "prefix reuse": statistics.reused_tokens / (statistics.reused_tokens + statistics.prefill_tokens),
        "CPU s": cpu,
        "finished": float(len(whole)),
    }


if __name__ == "__main__":
    main()
