"""Bytes of each rank in an update, over parallel layouts, beside those of `--estimate`.

    python -m tools.benchmark.memory [--layouts "PP2,TP2 PP2"] --json FILE

Each layout is started with as many ranks on this machine (CPU, gloo, fp32). State is weights, gradient buffers, main
parameters and moments, as they lie in memory after an update. Peak is the most that a second update allocates beside
them, as torch's profiler counts it: activations and logits, for which the estimate has a formula, and what it leaves
out, as gradients of activations. Bins are two sequences, long enough for the attention that stores no scores; norms are
LayerNorms, which keep on a CPU what they keep on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.algorithms.batch import Sample
from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import Problem
from megatron_rl.metrics.console import format_table
from megatron_rl.metrics.rundir import git_commit
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models.gpt import build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.memory.estimate import estimate
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.supervised import SupervisedTrainer
from tools.benchmark.common import ranks_of

TOKENS = 1024
VOCABULARY = 512
MICRO_BATCHES = 4
MODEL = (
    "--num-layers 8 --hidden-size 128 --ffn-hidden-size 320 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    f"--normalization LayerNorm --make-vocab-size-divisible-by 8 --seq-length {TOKENS} --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --train-iters 9 --tokenizer-model unused --langrl-env-config unused "
    "--run-dir unused --use-distributed-optimizer"
)
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 96 --moe-router-topk 2"
TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS: dict[str, tuple[int, str]] = {
    "one rank": (1, ""),
    "DP2": (2, ""),
    "TP2": (2, TP2),
    "PP2": (2, PP2),
    "PP2 recomputed": (2, f"{PP2} {FULL}"),
    "PP2 of 2 chunks": (2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
    "TP2 PP2": (4, f"{TP2} {PP2}"),
    "experts EP2": (2, f"{EXPERTS} --expert-model-parallel-size 2"),
    "experts EP2 PP2": (4, f"{EXPERTS} {PP2} --expert-model-parallel-size 2"),
    "CP2": (2, "--context-parallel-size 2"),
    "CP2 TP2": (4, f"{TP2} --context-parallel-size 2"),
}
"""Name -> ranks and flags."""


def measure(config: RLConfig, groups: ParallelGroups) -> dict[str, int]:
    """Bytes of this rank; collective."""
    optimization = Optimization(build_model(config, current_platform(), VOCABULARY), config)
    policy, count = optimization.policy, 2 * MICRO_BATCHES
    lengths = [TOKENS // 2 + (1 if number % 2 else -1) for number in range(count)]
    draw = torch.Generator().manual_seed(1)  # tokens that are all alike would go to the same experts
    ids = [torch.randint(VOCABULARY, (length,), generator=draw) for length in lengths]
    samples = [
        Sample(token_ids=each, loss_mask=torch.arange(len(each)) > 0, inference_logprobs=torch.zeros(len(each)),
               versions=torch.zeros_like(each), sample_id=number)
        for number, each in enumerate(ids)
    ]  # fmt: skip
    builder = BatchBuilder(TOKENS, config.sequence_shares, policy.device, groups, config.stages)
    scorer = Scorer(policy, groups, 1.0)
    trainer = SupervisedTrainer(optimization, scorer, PhaseTimer())
    batches = builder.pack(samples, seed=1)
    trainer.step(batches)
    gc.collect()
    optimizers = [part.optimizer for part in optimization.optimizer.chained_optimizers]
    states = [state.items() for optimizer in optimizers for state in optimizer.state.values()]
    buffers = [each for chunk in optimization.wrapped for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    found = {
        "weights": _held([parameter.data for parameter in policy.parameters()]),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": _held([value for state in states for name, value in state if name != "step"]),
    }
    with LargestHeld() as made:
        trainer.step(batches)
    return found | {"peak": made.most}


class LargestHeld(TorchDispatchMode):
    """Of the tensors that operators return in the block, the most bytes that are held at once.

    The profiler's record of allocations does not do: what a thread of gloo frees is not in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        """Bytes."""
        self._held: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, given: tuple = (), named: Any = None) -> Any:
        """Call the operator, and count."""
        inputs = {StorageWeakRef(each.untyped_storage()) for each in _tensors((given, named))}
        result = operator(*given, **(named or {}))
        outputs = {StorageWeakRef(each.untyped_storage()): each.untyped_storage().nbytes() for each in _tensors(result)}
        self._held = {reference: size for reference, size in self._held.items() if not reference.expired()}
        self._held |= {reference: size for reference, size in outputs.items() if reference not in inputs}
        self.most = max(self.most, sum(self._held.values()))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _held(tensors: Sequence[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _estimated(config: RLConfig, ranks: int, stage: int) -> dict[str, int]:
    result = estimate(config, ranks, VOCABULARY, stage)
    found = {name: getattr(result, name).update for name in ("weights", "gradients", "optimizer")}
    return found | {"peak": result.activations.update + result.training_logits.update}


def problems_of(name: str) -> list[str]:
    """Why a layout cannot run."""
    return [str(problem) for problem in _read(name)[1]]


def _read(name: str) -> tuple[RLConfig, list[Problem]]:
    ranks, flags = LAYOUTS[name]
    return read_config(f"{MODEL} {flags}".split(), ranks)


def row_of_rank(name: str) -> dict[str, Any]:
    """This rank of a layout: measured and estimated bytes by use."""
    config, _ = _read(name)
    with ranks_of(config) as groups:
        estimated = _estimated(config, groups.world_size, groups.stage)
        return {"rank": groups.rank, "stage": groups.stage, "measured": measure(config, groups), "estimated": estimated}


def measured_layout(name: str) -> list[dict[str, Any]]:
    """The rows of all its ranks, each a process."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={LAYOUTS[name][0]}"]
        own = ["-m", "tools.benchmark.memory", "--layouts", name, "--rank-folder", folder]
        subprocess.run([sys.executable, *launcher, *own], check=True)
        rows = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return sorted(rows, key=lambda row: row["rank"])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.memory")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="some of those in the file, with commas")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.rank_folder:
        row = row_of_rank(arguments.layouts)
        (arguments.rank_folder / f"{row['rank']}.json").write_text(json.dumps(row))
        return
    record, rows = {}, []
    for name in LAYOUTS:
        if name not in arguments.layouts.split(","):
            continue
        record[name] = measured_layout(name)
        rows += [_row(name, one) for one in record[name]]
        if arguments.json:  # what is measured is kept, whatever becomes of the next
            arguments.json.write_text(json.dumps({"commit": git_commit(), "layouts": record}, indent=1))
    print(format_table(("layout", "rank, stage", "state MiB", "estimate", "peak beside it", "estimate", "ratio"), rows))


def _row(name: str, one: dict[str, Any]) -> tuple[str, ...]:
    own, theirs = one["measured"], one["estimated"]
    state, expected = (sum(bytes_[use] for use in ("weights", "gradients", "optimizer")) for bytes_ in (own, theirs))
    figures = (state, expected, own["peak"], theirs["peak"])
    ratio = f"{own['peak'] / theirs['peak']:.2f}"
    return (name, f"{one['rank']}, {one['stage']}", *(f"{figure / 2**20:.2f}" for figure in figures), ratio)


if __name__ == "__main__":
    main()
