"""What the values of a configuration must satisfy, each problem with its flag; and notes on what has no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_rl.config.algorithm import algorithm_problems, dynamic_sampling_problems, partial_rollout_problems
from megatron_rl.config.attention import delta_problems, latent_problems, latent_size_problems, rotation_problems
from megatron_rl.config.experts import expert_problems
from megatron_rl.config.flags import Finding, InUnit, flags_of
from megatron_rl.config.lora import lora_problems
from megatron_rl.config.model import ModelConfig, layer_problems, shape_problems
from megatron_rl.config.no_effect import no_effect_problems
from megatron_rl.config.parallel import (
    expert_parallel_problems,
    kernel_problems,
    parallel_problems,
    pipeline_problems,
)
from megatron_rl.config.precision import (
    QuantizationConfig,
    alignment_problems,
    cache_problems,
    code_problems,
    engine_problems,
    invariance_problems,
    moment_problems,
    precision_problems,
)
from megatron_rl.config.records import record_problems
from megatron_rl.config.rl_config import RLConfig, all_flags, resolve, section_classes
from megatron_rl.config.rollout import cache_size_problems, length_problems, sampling_problems
from megatron_rl.config.training import (
    TeacherConfig,
    batch_problems,
    critic_problems,
    optimizer_problems,
    schedule_problems,
    teacher_problems,
)
from megatron_rl.errors import Problem
from megatron_rl.families import read_model

Rule = Callable[[RLConfig, int], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    record_problems, parallel_problems, pipeline_problems, expert_parallel_problems, shape_problems,
    layer_problems, latent_size_problems, latent_problems, delta_problems, rotation_problems, expert_problems,
    batch_problems, length_problems, cache_size_problems, precision_problems, code_problems, moment_problems,
    kernel_problems, engine_problems, alignment_problems, cache_problems, invariance_problems, optimizer_problems,
    schedule_problems, sampling_problems, algorithm_problems, dynamic_sampling_problems, partial_rollout_problems,
    critic_problems, teacher_problems, lora_problems, no_effect_problems,
)  # fmt: skip
"""Each takes a resolved configuration and the number of ranks, and says nothing where a value it needs is absent."""
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
_CHANGES_NO_BYTE = ("tokenizer_model", "langrl_env_config", "lr")
_POLICYS_OWN = {
    "rl_router_replay": False, "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None,
    "recompute_modules": None,
}  # fmt: skip
"""The teacher has experts of its own, and no backward pass."""
_RULES_OF_A_TEACHER: tuple[Rule, ...] = (
    parallel_problems, pipeline_problems, expert_parallel_problems, shape_problems,
    latent_size_problems, delta_problems, expert_problems, length_problems,
)  # fmt: skip


def validate(config: RLConfig, world_size: int) -> list[Problem]:
    """Return everything that is wrong with the values. Files and devices are checked by whoever opens them."""
    out_of_bounds = list(_bounds(config))
    if out_of_bounds:  # the other rules would divide by a size of 0
        return out_of_bounds
    config = resolve(config, world_size)
    return [*_absent(config), *broken_rules(config, world_size)]


def broken_rules(config: RLConfig, world_size: int, rules: Sequence[Rule] = RULES) -> list[Problem]:
    """Return what ``rules`` say of a resolved configuration."""
    found = (finding for rule in rules for finding in rule(config, world_size))
    return [each if isinstance(each, Problem) else config.problem(*each) for each in found]


def _bounds(config: RLConfig) -> Iterator[Problem]:
    """Check choices and bounds of values that were not typed: from a directory, or built in code."""
    for flag in all_flags():
        value = config.value(flag.name)
        in_unit = InUnit in map(type, (value, config.typed.get(flag.name)))  # its spelling has bounds of its own
        why = None if value is None or flag.many or in_unit else flag.refusal(value)
        if why is not None:
            yield Problem(flag.spelling, f"{flag.spelling} {why}")


def _absent(config: RLConfig) -> Iterator[Problem]:
    """Values that are missing; an estimate needs only what changes bytes."""
    spared = _CHANGES_NO_BYTE if config.training.estimate else ()
    if all(config.value(name) is None for name in _SHAPE):  # one directory says all of it
        yield Problem(
            "--num-layers",
            "--load-hf is missing: the model to start from, a Hugging Face directory or a name on the hub; for example "
            "--load-hf Qwen/Qwen2.5-0.5B-Instruct (or give the shape of a new one: --num-layers, --hidden-size, "
            "--num-attention-heads and --tokenizer-model)",
        )
        spared += (*_SHAPE, "tokenizer_model")
    for section, cls in section_classes().items():
        for flag in flags_of(cls) if section != "algorithm" or config.training.perform_rl_step else ():
            if flag.needed is not None and config.value(flag.name) is None and flag.name not in spared:
                why, example = flag.needed
                yield config.problem(flag.name, f"is missing: {why}; for example {flag.spelling} {example}")


def teacher_of(config: RLConfig, world_size: int) -> RLConfig:
    """Put the teacher in the policy's place; ``ConfigError`` if its ``config.json`` cannot be used."""
    if config.teacher.rl_teacher_load_hf is None:  # adapters on the policy's base
        return replace(config, quantization=QuantizationConfig(), teacher=TeacherConfig())
    settings = read_model(config.teacher.rl_teacher_load_hf).architecture.settings()
    settings["group_query_attention"] = True  # megatron ignores the number of groups without it
    if settings["num_experts"] is None:  # dense layers lie on every rank that the policy's experts are shared by
        settings |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    plain = replace(config, model=ModelConfig(), quantization=QuantizationConfig(), teacher=TeacherConfig(), typed={})
    return resolve(plain.with_values(**settings | _POLICYS_OWN), world_size)


def teacher_layout_problems(config: RLConfig) -> list[Problem]:
    """Say why the teacher cannot have the run's layout and lengths; raises as `teacher_of`."""
    if not config.wants_teacher or config.teacher.rl_teacher_load_hf is None:
        return []
    size = config.model_parallel_size  # a fault of the number of ranks is the policy's too
    known = {problem.text for problem in broken_rules(config, size, _RULES_OF_A_TEACHER)}
    name = f"--rl-teacher-load-hf {config.teacher.rl_teacher_load_hf}"
    return [
        Problem("--rl-teacher-load-hf", f"{name}: of this teacher {problem.text}")
        for problem in broken_rules(teacher_of(config, size), size, _RULES_OF_A_TEACHER)
        if problem.text not in known
    ]


def notes(config: RLConfig) -> list[str]:
    """Write one line for each flag that the user set and that has no effect, or another than expected."""
    return [*config.repeated, *filter(None, (row.note for row in config.no_effect)), *_notes_on_values(config)]


def _notes_on_values(config: RLConfig) -> Iterator[str]:
    quantization, seed = config.quantization, config.training.seed
    if "seed" not in config.typed and seed != RLConfig().training.seed:
        yield f"--seed {seed} is that of the run that saved the weights, so the answers are drawn as they were there"
    if config.typed.get("finetune") and config.loads_what_it_saves and not config.training.eval_only:
        yield "--finetune has no effect: --load names --save, whose run goes on where it holds one"
    if config.typed.get("sequence_parallel") and config.parallel.tensor_model_parallel_size == 1:
        yield "--sequence-parallel is off: it needs --tensor-model-parallel-size above 1"
    if config.kv_cache_is_rounded and quantization.rl_evaluate_unquantized:
        yield f"--rl-evaluate-unquantized leaves the KV cache in {config.kv_cache_dtype} (--rl-kv-cache-dtype)"
    if config.algorithm.grpo_kl_beta > 0 and config.algorithm.rl_kl_estimator == "k1":
        what = "--rl-kl-estimator k1 does not hold the policy to the reference"
        yield f"{what}: the gradient of k1 is 0 in expectation; use k2 or k3"
    yield from _notes_on_graphs(config)
    if config.precision.fp8_format is not None and quantization.rl_train_forward == "quantized":
        yield (
            f"--fp8-format {config.precision.fp8_format} runs the trainer's forward pass on the "
            f"{quantization.rl_rollout_quantization} weights of the rollouts (--rl-train-forward quantized); "
            "fp8 products of Transformer Engine's own layers come with --transformer-impl transformer_engine"
        )


def _notes_on_graphs(config: RLConfig) -> Iterator[str]:
    kernels = config.kernels
    if kernels.rl_persist_cuda_graphs and kernels.graphs_after is None:
        yield "--rl-persist-cuda-graphs has no effect: without CUDA graphs there are none to keep"
    if kernels.graphs_after == 0 and (reason := why_uncaptured(config)):
        yield f"--enable-cuda-graph has no effect: {reason}"


def why_uncaptured(config: RLConfig) -> str | None:
    """Say why decode steps of this model cannot be CUDA graphs; None if they can."""
    if config.model.num_experts is None:
        return None
    if not config.model.moe_grouped_gemm:
        return "experts in a loop (--no-moe-grouped-gemm) read on the host how many tokens each of them gets"
    in_fp8 = config.precision.fp8_format is not None and config.kernels.transformer_impl == "transformer_engine"
    reason = (
        "fp8 products of Transformer Engine's experts ask the host how many tokens each has; rollouts with "
        "--rl-rollout-quantization fp8 have graphs"
    )
    return reason if in_fp8 and config.quantization.rl_rollout_quantization == "none" else None
