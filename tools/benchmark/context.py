"""Memory and time of one long sequence, forward and backward, on a rank of a context-parallel group.

    torchrun --nproc-per-node 2 -m tools.benchmark.context --tokens 8192 16384

The ranks that are started share the sequence; one rank has it alone. Optimizer, gradient reduction and rollouts are
not in it. Bytes are those of the process beyond what it had with the model alone, on Linux: what the backward pass
needs, once the forward pass is through, and the most at any time.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.models.gpt import PolicyModel, build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.collectives import gather_json
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.scoring import Scorer
from tools.benchmark.common import benchmark_config, command_line, ranks_of, ranks_started, report
from tools.benchmark.update import make_samples

MIB = 2**20
M_MMAP_THRESHOLD = -3


def memory(name: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` the most since it was last set back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def one_pass(policy: PolicyModel, groups: ParallelGroups, batch: TokenBatch) -> dict[str, float]:
    """Forward and backward, without logits in memory."""
    scorer = Scorer(policy, groups, 1.0, fused=True)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
    before, wall, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
    output = scorer.forward(policy.gpt, batch)
    kept = memory("VmRSS") - before
    scorer.select(output, batch).current_logprobs.sum().backward()
    return {
        "kept MiB": kept / MIB,
        "peak MiB": (memory("VmHWM") - before) / MIB,
        "CPU s": time.process_time() - cpu,
        "wall s": time.perf_counter() - wall,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Every rank measures; the largest of each figure is shown."""
    parser = command_line("context", shape="256x4", vocab=256, rounds=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384], help="of the sequence")
    arguments = parser.parse_args(argv)
    # Freed memory goes back at once, so that what the process has is what is alive.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    size = ranks_started()
    config = benchmark_config(
        arguments.shape, max(arguments.tokens), f"--context-parallel-size={size}", world_size=size
    )
    with ranks_of(config, arguments.seed) as groups:
        policy = build_model(config, current_platform(), arguments.vocab)
        found: dict[int, list[dict[str, float]]] = {tokens: [] for tokens in arguments.tokens}
        for index in range(arguments.rounds + 1):
            for tokens in arguments.tokens if index else (256,):  # the first pass makes what stays
                (sample,) = make_samples(1, arguments.vocab, 8, tokens - 8, equal=True)
                (batch,) = BatchBuilder(tokens, size, policy.device, groups).pack([sample], seed=0)
                ranks = gather_json(one_pass(policy, groups, batch), groups.context_group)
                if index:
                    found[tokens].append({name: max(rank[name] for rank in ranks) for name in ranks[0]})
        if groups.is_main:
            rows = [
                [f"{tokens:,}", *(f"{statistics.median(row[name] for row in rounds):.1f}" for name in rounds[0])]
                for tokens, rounds in found.items()
            ]
            report("context", arguments, ["tokens", *found[arguments.tokens[0]][0]], rows, ranks=size, rounds=found)


if __name__ == "__main__":
    main()
