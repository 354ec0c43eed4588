"""What `test_fp8_weights` runs, in a process whose Transformer Engine is the fake one."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.utils import replace_raw_data

from megatron_rl.checkpoint.hf.load import load_hf
from megatron_rl.checkpoint.hf.save import write_hf
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import RunState
from megatron_rl.checkpoint.stored import open_weights, part_of_stored
from megatron_rl.checkpoint.tensors import load, weights_fingerprint
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.families import read_model
from megatron_rl.inference.graphs import DecodeGraphs, Work, graph_sizes
from megatron_rl.loop import rl_step
from megatron_rl.models.gpt import PolicyModel, build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.run.memory.holdings import Weights
from megatron_rl.tensor_files import TensorReader
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.types import Completion
from tests.parity.transformer_engine_case import step
from tests.support.generation import generate, rollout_engine
from tests.support.hugging_face import hf_run, write_back, write_shape
from tests.support.tape import EagerRecorder, requests_of_a_step
from tests.support.tiny import VOCABULARY, single_thread, tiny_config, tiny_policy
from tests.support.toy import toy_run

BF16_WEIGHTS = {
    "transformer_impl": "transformer_engine", "bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise",
    "use_distributed_optimizer": True, "lr_decay_style": "constant", "clip_grad": 0.0,
    "hidden_size": 144, "ffn_hidden_size": 160, "init_method_std": 0.05, "rl_max_new_tokens": 12,
}  # fmt: skip
"""Widths of more than a tile that are no multiples of one. Norms of gradients are added up in another order."""
CODES = BF16_WEIGHTS | {"fp8_param_gather": True}
TENSOR = {
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "hidden_size": 160, "ffn_hidden_size": 320,
}  # fmt: skip
EXPERTS = {
    "expert_model_parallel_size": 2, "num_experts": 4, "moe_ffn_hidden_size": 80, "disable_bias_linear": True,
}  # fmt: skip
CASES = {
    "bf16": BF16_WEIGHTS, "codes": CODES, "fp8_block_pow2": CODES | {"rl_rollout_quantization": "fp8_block_pow2"},
    "int8": CODES | {"rl_rollout_quantization": "int8"},
}  # fmt: skip


def on_rank(of_two: str) -> dict[str, Any]:
    """Everything that one rank can say, as numbers; ``of_two``: where two ranks have saved."""
    single_thread()
    groups = initialize(tiny_config().parallel, current_platform())
    with tempfile.TemporaryDirectory() as folder:
        report: dict[str, Any] = {"start": {each: started(groups, each) for each in ("blockwise", "tensorwise")}}
        report["steps"] = {name: steps(groups, flags) for name, flags in CASES.items()}
        report["saved"] = saved(groups, Path(folder, "saved"))
        report["files"] = hugging_face(groups, Path(folder))
        report["replayed"] = replayed()
        report["two"] = [two_updates(groups, Path(folder, "two")), two_updates(groups, Path(of_two), reads=True)]
    shut_down()
    return report


def on_two_ranks(folder: str) -> dict[str, Any]:
    """The same updates on two ranks that share the batch, and steps of a run."""
    single_thread()
    groups = initialize(tiny_config().parallel, current_platform())
    report = {"two": two_updates(groups, Path(folder))}
    report["steps"] = steps(groups, CODES)
    shut_down()
    return report


def on_parts(folder: str, layout: str) -> dict[str, Any]:
    """Of two ranks that have a part of every linear, or other experts."""
    single_thread()
    flags = {"tensor": TENSOR, "experts": EXPERTS}[layout]
    groups = initialize(tiny_config(2, **flags).parallel, current_platform())
    report: dict[str, Any] = {name: steps(groups, CASES[name] | flags) for name in ("bf16", "codes", "fp8_block_pow2")}
    report["two"] = [two_updates(groups, Path(folder), reads, **flags) for reads in (False, True)]
    shut_down()
    return report


def two_updates(groups: ParallelGroups, folder: Path, reads: bool = False, **more: Any) -> list[str]:
    """Two updates and a checkpoint in between; if it ``reads`` the second alone, after that checkpoint."""
    policy, optimization = built(tiny_config(groups.world_size, **CODES | more), seed=2 if reads else 1)
    if reads:
        resumed(folder, policy, optimization, groups)
    else:
        step(optimization, seed=1)
        CheckpointManager(folder, 0, groups).save(RunState(step=1), policy, optimization)
    step(optimization, seed=2)
    return [digest(policy), f"{weights_fingerprint(policy, groups):x}"]


def built(config: RLConfig, seed: int = 1) -> tuple[PolicyModel, Optimization]:
    policy = tiny_policy(config, seed=seed)
    return policy, Optimization(policy, config)


def resumed(folder: Path, policy: PolicyModel, optimization: Optimization, groups: ParallelGroups) -> None:
    manager = CheckpointManager(folder, 0, groups)
    manager.resume(manager.newest(), policy, optimization)


def codes_of(policy: PolicyModel) -> dict[str, Any]:
    return {name: weight for name, weight in policy.named_parameters() if isinstance(weight, QuantizedTensor)}


def digest(policy: PolicyModel) -> str:
    """Of what is saved of the codes."""
    numbers = [policy.fp8_weights.main_values(codes) for codes in codes_of(policy).values()]
    return hashlib.sha256(b"".join(each.view(torch.uint8).numpy().tobytes() for each in numbers)).hexdigest()


def differ(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one and one.keys() == other.keys()
    return max((one[name].float() - other[name].float()).abs().max().item() for name in one)


def in_tiles(weight: torch.Tensor) -> torch.Tensor:
    """Rounded by hand: E4M3 with a power of two a tile of 128 x 128."""
    rounded = torch.empty_like(weight)
    for top in range(0, weight.shape[0], 128):
        for left in range(0, weight.shape[1], 128):
            tile = weight[top : top + 128, left : left + 128].double()
            scale = 2.0 ** torch.ceil(torch.log2(tile.abs().max() / 448))
            rounded[top : top + 128, left : left + 128] = (tile / scale).float().to(
                torch.float8_e4m3fn
            ).double() * scale
    return rounded


def started(groups: ParallelGroups, recipe: str) -> dict[str, Any]:
    """What codes and main parameters are made of."""
    config = tiny_config(**CODES | {"fp8_recipe": recipe, "dither_main_params": False, "no_dither_main_params": True})
    policy = tiny_policy(config)
    first = {name: weight.detach().clone() for name, weight in policy.named_parameters() if "linear_" in name}
    optimization = Optimization(policy, config)
    codes = codes_of(policy)
    first = {name: first[name] for name in codes}
    means = {name: weight.dequantize() for name, weight in codes.items()}
    optimization.gather_parameters()
    return {
        "kinds": sorted({type(weight).__name__ for weight in codes.values()}),
        "names": sorted(codes),
        "buffers": {
            str(b.param_dtype): b.param_data.nbytes for wrapped in optimization.wrapped for b in wrapped.buffers
        },
        "numbers": sum(weight.numel() for weight in codes.values()),
        "main": differ({name: codes[name].main_param for name in codes}, {n: w.flatten() for n, w in first.items()}),
        "rounding": differ(means, first),
        "by_hand": differ(means, {name: in_tiles(weight) for name, weight in first.items()}),
        "can_leave": Weights(optimization).can_leave,
    }


def steps(groups: ParallelGroups, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Steps of a run; which metrics are numbers, and what rollouts multiply by."""
    run = toy_run(tiny_config(groups.world_size, **flags), groups)
    try:
        metrics = [rl_step(run, number).metrics for number in (1, 2)]
        linears, codes = run.phases.quantization.linears, codes_of(run.policy)
        linears.update()
        copies = [
            (layer.recipe.dequantize(layer.weight) - layer.parameter.float()).abs().max().item()
            for layer in linears.layers
        ]
        return {
            "plain": not any(isinstance(layer.parameter, QuantizedTensor) for layer in linears.layers),
            "metrics": [
                {name: value for name, value in each.items() if not name.startswith(("timing", "perf", "memory"))}
                for each in metrics
            ],
            "copies": max(copies, default=None),
            "main": digest(run.policy) if codes else None,
        }
    finally:
        run.closing.close()


def replayed() -> dict[str, Any]:
    """Decode steps in the place of graphs; how many were captured before an update, after it, and once codes moved."""
    policy, optimization = built(tiny_config(**CODES))
    engines, requests, found = [rollout_engine(policy), rollout_engine(policy)], requests_of_a_step(), []
    runner, counts = engines[1].runner, []
    recorder = Counting()
    runner.graphs = DecodeGraphs(runner, policy, recorder, graph_sizes(8, max_sizes=4), (48,))
    for number in range(3):
        if number == 1:
            step(optimization, seed=1)
        for codes in codes_of(policy).values() if number == 2 else ():
            replace_raw_data(codes, torch.empty_like(codes.codes))
        found += [letters_of(generate(policy, engine, requests)) for engine in engines]
        counts.append(recorder.count)
    return {"tokens": found, "graphs": counts}


class Counting(EagerRecorder):
    """Counts what it is to record."""

    count = 0

    def record(self, work: Work) -> Work:
        self.count += 1
        return super().record(work)


def letters_of(completions: Sequence[Sequence[Completion]]) -> list[list[int]]:
    return [list(completion.token_ids) for group in completions for completion in group]


def saved(groups: ParallelGroups, folder: Path) -> dict[str, Any]:
    """One update, a checkpoint, and a second update with and without it; and starts from the weights alone."""
    config = tiny_config(**CODES)
    policy, optimization = built(config)
    step(optimization, seed=1)
    main = {name: weight.main_param.bfloat16() for name, weight in codes_of(policy).items()}
    report: dict[str, Any] = {}
    for name in (True, False):
        state = RunState(step=1, has_optimizer=name)
        CheckpointManager(folder / str(name), 0, groups).save(state, policy, optimization)
        read = tiny_policy(tiny_config(**BF16_WEIGHTS), seed=2)
        manager = CheckpointManager(folder / str(name), 0, groups)
        load(manager.newest(), read)
        weights = {n: weight.detach().flatten() for n, weight in read.named_parameters() if n in main}
        report[f"weights {name}"] = differ(weights, main)
    other = built(config, seed=2)
    resumed(folder / "True", *other, groups)
    report["resumed"] = compared(policy, other[0])
    alone = built(tiny_config(**CODES, no_dither_main_params=True), seed=2)
    resumed(folder / "False", *alone, groups)
    report["begun_again"] = differ({n: w.main_param for n, w in codes_of(alone[0]).items()}, main)
    for each in (optimization, other[1]):
        step(each, seed=2)
    return report | {"after": compared(policy, other[0])}


def compared(one: PolicyModel, other: PolicyModel) -> list[float]:
    """Largest differences of codes, of scales, and of main parameters."""
    pairs = [(weight, codes_of(other)[name]) for name, weight in codes_of(one).items()]
    looks = (lambda w: w.codes.int(), lambda w: w.scale_inv, lambda w: w.main_param)
    return [max((look(a) - look(b)).abs().max().item() for a, b in pairs) for look in looks]


def hugging_face(groups: ParallelGroups, folder: Path) -> dict[str, Any]:
    """A directory that a run begins with, written again from a checkpoint before the first update, and after it."""
    origin = read_model(write_shape(folder / "shape", hidden_size=144, intermediate_size=160, num_hidden_layers=2))
    flags = {name: value for name, value in CODES.items() if name not in ("hidden_size", "ffn_hidden_size")}
    drawn, source = hf_run(origin.directory, transformer_impl="transformer_engine", bf16=True), folder / "source"
    write_back(build_model(drawn, current_platform(), VOCABULARY), origin, source, torch.bfloat16)
    config = hf_run(source, **flags)
    policy = build_model(config, current_platform(), VOCABULARY)
    load_hf(read_model(source), policy, groups)
    optimization = Optimization(policy, config)
    written = [exported(policy, optimization, groups, folder / "begun")]
    step(optimization, seed=1)
    written.append(exported(policy, optimization, groups, folder / "trained"))
    read = [
        {name: reader.read(name) for name in origin.weights.tensors} for reader in map(TensorReader, (source, *written))
    ]
    again = build_model(drawn, current_platform(), VOCABULARY)
    load_hf(read_model(written[1]), again, groups)
    weights = dict(again.named_parameters())
    main = {name: weight.main_param.bfloat16() for name, weight in codes_of(policy).items()}
    return {
        "begun": differ(read[0], read[1]),
        "moved": differ(read[0], read[2]),
        "trained": differ({name: weights[name].detach().flatten() for name in main}, main),
    }


def exported(policy: PolicyModel, optimization: Optimization, groups: ParallelGroups, folder: Path) -> Path:
    """A Hugging Face directory made of a checkpoint, as `export_checkpoint` does; without the optimizer's state."""
    manager, target = CheckpointManager(folder, 0, groups), folder / "exported"
    manager.save(RunState(step=1, has_optimizer=False), policy, optimization)
    stored = open_weights(manager.newest())
    write_hf(read_model(folder.parent / "source"), target, policy.layout, partial(part_of_stored, stored))
    return target
