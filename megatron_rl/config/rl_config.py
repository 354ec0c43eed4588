"""The whole configuration: one attribute a section, and the numbers that follow from several of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.compatibility import CompatibilityConfig
from megatron_rl.config.flags import Flag, flags_of
from megatron_rl.config.model import ModelConfig, TokenizerConfig
from megatron_rl.config.parallel import KernelConfig, ParallelConfig
from megatron_rl.config.precision import PrecisionConfig, QuantizationConfig
from megatron_rl.config.records import CheckpointConfig, LoggingConfig
from megatron_rl.config.rollout import EnvironmentConfig, RolloutConfig
from megatron_rl.config.training import OptimizerConfig, ScheduleConfig, TrainingConfig
from megatron_rl.errors import Problem
from megatron_rl.families.layout import Architecture, ModelLayout, padded_vocabulary


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """Everything a run is told. ``resolve`` turns what was typed into what is used.

    Of 64 ranks with tensor-parallel size 8 there are 8 replicas; 64 prompts of 16 completions are
    1024 samples a step; with a global batch of 512 and 1 iteration that is 2 updates a step.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    compatibility: CompatibilityConfig = field(default_factory=CompatibilityConfig)
    typed: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What the user wrote, by field name: not a section, only there for ``notes``."""

    def value(self, name: str) -> Any:
        """Of the flag whose field is called ``name``, whatever its section."""
        return getattr(getattr(self, _declared()[name][0]), name)

    def with_values(self, **values: Any) -> RLConfig:
        """A copy with other values of the fields named, whatever their sections."""
        grouped: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            grouped.setdefault(_declared()[name][0], {})[name] = value
        return replace(self, **{section: replace(getattr(self, section), **new) for section, new in grouped.items()})

    def problem(self, name: str, text: str) -> Problem:
        """``--min-lr 1 <text>``; where the user did not give the value, with what it comes from."""
        flag, value, source = f"--{name.replace('_', '-')}", self.value(name), _declared()[name][1].source
        if isinstance(value, tuple):
            value = " ".join(value)
        shown = "" if isinstance(value, bool) else f" {value:g}" if isinstance(value, float) else f" {value}"
        derived = f" (from {source})" if source and name not in self.typed else ""
        return Problem(flag, f"{flag}{shown}{derived}{'' if text[0] in ':,' else ' '}{text}")

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        parallel = self.parallel
        return (
            parallel.tensor_model_parallel_size
            * parallel.pipeline_model_parallel_size
            * parallel.context_parallel_size
        )

    def layout(self, vocab_size: int = 1, stage: int = 0) -> ModelLayout:
        """The model's structure on a rank of pipeline stage ``stage``, of a resolved configuration without problems.

        ``vocab_size`` is the tokenizer's. The embedding has that many rows, or --vocab-size if that is more, padded.
        """
        shape = {name: value for name, value in vars(self.model).items() if name in Architecture.__dataclass_fields__}
        size, rows = self.parallel.tensor_model_parallel_size, max(vocab_size, self.tokenizer.vocab_size or 0)
        padded = padded_vocabulary(rows, self.tokenizer.make_vocab_size_divisible_by, size)
        architecture = Architecture(**shape, vocab_size=rows)
        return ModelLayout.of(architecture, size, padded, stage, self.parallel.pipeline_model_parallel_size)

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model among ``world_size`` ranks."""
        return max(1, world_size // self.model_parallel_size)

    @property
    def samples_per_step(self) -> int:
        """Samples that one step brings: a rollout in RL, one global batch in supervised training."""
        algorithm = self.algorithm
        if not self.training.perform_rl_step:
            return self.training.global_batch_size or 0
        return (algorithm.grpo_prompts_per_step or 0) * (algorithm.grpo_group_size or 0)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, from --train-iters or --train-samples."""
        return self._steps(self.training.train_iters, self.training.train_samples)

    @property
    def lr_warmup_steps(self) -> int:
        """Steps of learning-rate warm-up, whichever of the three flags gave it."""
        schedule = self.schedule
        if schedule.lr_warmup_fraction is not None:
            return int(schedule.lr_warmup_fraction * self.lr_decay_steps)
        return self._steps(schedule.lr_warmup_iters, schedule.lr_warmup_samples)

    @property
    def lr_decay_steps(self) -> int:
        """Steps after which the learning rate is at its minimum."""
        decay = self._steps(self.schedule.lr_decay_iters, self.schedule.lr_decay_samples)
        return decay or self.total_steps

    @property
    def lr_wsd_decay_steps(self) -> int:
        """Steps of the last phase of WSD; 0 for other styles."""
        return self._steps(self.schedule.lr_wsd_decay_iters, self.schedule.lr_wsd_decay_samples)

    @property
    def kv_cache_dtype(self) -> str:
        """``fp32``, ``bf16`` or ``fp8``: what the KV cache stores."""
        asked = self.quantization.rl_kv_cache_dtype
        return self._model_dtype if asked == "auto" else asked

    @property
    def kv_cache_is_rounded(self) -> bool:
        """The KV cache has fewer bits than the model's numbers."""
        return self.kv_cache_dtype != self._model_dtype

    def kv_cache_bytes(self, tokens: int) -> int:
        """Keys and values of one sequence of ``tokens`` on this rank."""
        return self.layout().cache_numbers(tokens) * {"fp32": 4, "bf16": 2, "fp8": 1}[self.kv_cache_dtype]

    @property
    def _model_dtype(self) -> str:
        return "bf16" if self.precision.bf16 else "fp32"

    def _steps(self, iters: int | None, samples: int | None) -> int:
        """A length given in steps or, with --train-samples, in samples."""
        return iters or (samples or 0) // (self.samples_per_step or 1)


@functools.cache
def section_classes() -> dict[str, type]:
    """Section name -> section class, in the order of ``RLConfig``."""
    hints = get_type_hints(RLConfig)
    return {f.name: hints[f.name] for f in dataclasses.fields(RLConfig) if f.name != "typed"}


@functools.cache
def all_flags() -> tuple[Flag, ...]:
    """Every flag of every section."""
    return tuple(flag for cls in section_classes().values() for flag in flags_of(cls))


@functools.cache
def _declared() -> dict[str, tuple[str, Flag]]:
    """Field name -> section name and flag."""
    return {flag.name: (section, flag) for section, cls in section_classes().items() for flag in flags_of(cls)}
