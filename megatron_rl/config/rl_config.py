"""The whole configuration: one attribute a section, and the numbers that follow from several of them.

What was typed is resolved: defaults that follow from others are filled in. Then it is validated (`rules`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from megatron_rl.config.algorithm import AlgorithmConfig, baseline_of
from megatron_rl.config.flags import Flag, InUnit, flags_of
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.model import ModelConfig, TokenizerConfig
from megatron_rl.config.no_effect import NoEffect
from megatron_rl.config.parallel import KernelConfig, ParallelConfig
from megatron_rl.config.precision import PrecisionConfig, QuantizationConfig
from megatron_rl.config.records import CheckpointConfig, LoggingConfig
from megatron_rl.config.rollout import EnvironmentConfig, RolloutConfig
from megatron_rl.config.training import CriticConfig, OptimizerConfig, ScheduleConfig, TeacherConfig, TrainingConfig
from megatron_rl.errors import Problem
from megatron_rl.families.architecture import Architecture, ExpertShare, Stages, padded_vocabulary
from megatron_rl.families.layout import Head, ModelLayout
from megatron_rl.families.shape import DeltaRule, ExpertOptions, LatentAttention, LayerOptions, RotationOptions


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """All settings of a run. ``resolve`` turns what was typed into what is used.

    Of 64 ranks with tensor-parallel size 8 there are 8 replicas; 64 prompts of 16 completions are
    1024 samples a step; with a global batch of 512 and 1 iteration that is 2 updates a step.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    layers: LayerOptions = field(default_factory=LayerOptions)
    latent: LatentAttention = field(default_factory=LatentAttention)
    delta: DeltaRule = field(default_factory=DeltaRule)
    experts: ExpertOptions = field(default_factory=ExpertOptions)
    rotation: RotationOptions = field(default_factory=RotationOptions)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    typed: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What the user wrote, by field name."""
    no_effect: Mapping[NoEffect, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)
    """The flags without effect that the user wrote, and their values."""
    repeated: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Notes on flags that were written several times."""

    def value(self, name: str) -> Any:
        """Return the value of a field, whatever its section."""
        return getattr(getattr(self, _declared()[name][0]), name)

    def with_values(self, **values: Any) -> RLConfig:
        """Copy with other values of the fields named, whatever their sections."""
        grouped: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            grouped.setdefault(_declared()[name][0], {})[name] = value
        return replace(self, **{section: replace(getattr(self, section), **new) for section, new in grouped.items()})

    def problem(self, name: str, text: str) -> Problem:
        """Make the problem ``--min-lr 1 <text>``; of a value that the user did not give, with what it comes from."""
        flag, value, source = f"--{name.replace('_', '-')}", self.value(name), _declared()[name][1].source
        if isinstance(typed := self.typed.get(name), InUnit):
            flag, value = typed.spelling, typed.number
        shown = "" if value is None or isinstance(value, bool) else f" {value}"
        if isinstance(value, tuple):
            shown = f" {' '.join(value)}"
        elif isinstance(value, float):
            shown = f" {value:g}"
        derived = f" (from {source})" if source and name not in self.typed else ""
        return Problem(flag, f"{flag}{shown}{derived}{'' if text[0] in ':,' else ' '}{text}")

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        parallel = self.parallel
        return (
            parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
        )

    @property
    def expert_parallel_ranks(self) -> int:
        """Ranks that hold all experts of the model once."""
        parallel = self.parallel
        cut = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
        return parallel.expert_model_parallel_size * cut * parallel.pipeline_model_parallel_size

    @property
    def has_shape(self) -> bool:
        """Return whether there is an `architecture`: no width or count of the model is missing."""
        return self.model.is_complete and self.latent.is_complete

    def architecture(self, vocab_size: int = 1) -> Architecture:
        """Return the model's shape, where it has one; ``vocab_size`` as in `layout`."""
        sections = self.model, self.layers, self.latent, self.delta, self.experts, self.rotation
        given = {name: value for section in sections for name, value in vars(section).items()}
        shape = {name: value for name, value in given.items() if name in Architecture.__dataclass_fields__}
        return Architecture(**shape, vocab_size=max(vocab_size, self.tokenizer.vocab_size or 0))

    def layout(
        self, vocab_size: int = 1, stage: int = 0, expert_rank: int = 0, head: Head = "vocabulary"
    ) -> ModelLayout:
        """Return the model's structure on a rank of pipeline stage ``stage``.

        The embedding has the tokenizer's ``vocab_size`` rows, or --vocab-size if that is more, padded.
        """
        parallel, architecture = self.parallel, self.architecture(vocab_size)
        size = parallel.tensor_model_parallel_size
        padded = padded_vocabulary(architecture.vocab_size, self.tokenizer.make_vocab_size_divisible_by, size)
        experts = ExpertShare(parallel.expert_model_parallel_size, expert_rank, parallel.expert_tensor_parallel_size)
        return ModelLayout.of(architecture, size, padded, stage, self.stages, experts, head)

    @property
    def sequence_shares(self) -> int:
        """Ranks that share the tokens of a micro-batch equally."""
        parallel = self.parallel
        over_tensor_ranks = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        return parallel.context_parallel_size * over_tensor_ranks

    @property
    def padded_bin_size(self) -> int:
        """Tokens of a full micro-batch, padded to share them equally: 12,000 for 11,999 on 8 ranks."""
        return -(-(self.training.rl_sequence_packing_bin_size or 0) // self.sequence_shares) * self.sequence_shares

    @property
    def stages(self) -> Stages:
        """The layers of each pipeline stage."""
        parallel = self.parallel
        return Stages(
            parallel.pipeline_model_parallel_size,
            parallel.decoder_first_pipeline_num_layers,
            parallel.decoder_last_pipeline_num_layers,
            parallel.num_virtual_stages_per_pipeline_rank or 1,
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Count the copies of the model among ``world_size`` ranks."""
        return max(1, world_size // self.model_parallel_size)

    def rollout_replicas(self, world_size: int) -> int:
        """Count the copies of the model in rollouts: ranks that share a sequence in training have one each."""
        return self.data_parallel_size(world_size) * self.parallel.context_parallel_size

    @property
    def samples_per_step(self) -> int:
        """Samples of a step: a rollout in RL, one global batch in supervised training."""
        algorithm = self.algorithm
        if not self.training.perform_rl_step:
            return self.training.global_batch_size or 0
        return (algorithm.grpo_prompts_per_step or 0) * (algorithm.grpo_group_size or 0)

    @property
    def loads_what_it_saves(self) -> bool:
        """`--load` names `--save`: the same command starts a run and continues it, as in Megatron's scripts."""
        load, save = self.checkpoint.load, self.checkpoint.save
        return None not in (load, save) and os.path.realpath(load) == os.path.realpath(save)

    @property
    def wants_reference(self) -> bool:
        """The run needs a reference policy."""
        return self.training.perform_rl_step and self.algorithm.grpo_kl_beta > 0

    @property
    def wants_critic(self) -> bool:
        """The run trains a critic beside the policy."""
        return self.training.perform_rl_step and baseline_of(self) == "critic"

    @property
    def wants_teacher(self) -> bool:
        """The run needs a teacher."""
        return self.training.perform_rl_step and self.teacher.given is not None

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.training.train_iters or 0

    @property
    def lr_decay_steps(self) -> int:
        """Steps after which the learning rate is at its minimum."""
        return self.schedule.lr_decay_iters or self.total_steps

    @property
    def kv_cache_dtype(self) -> str:
        """``fp32``, ``bf16`` or ``fp8``: what the KV cache stores."""
        asked = self.quantization.rl_kv_cache_dtype
        return self._model_dtype if asked == "auto" else asked

    @property
    def kv_cache_is_rounded(self) -> bool:
        """The KV cache has fewer bits than the model's numbers."""
        return self.kv_cache_dtype != self._model_dtype

    def kv_cache_bytes(self, tokens: int, layout: ModelLayout | None = None) -> int:
        """Return the bytes of one sequence: keys and values, recurrent states and a snapshot, experts where recorded.

        On the stage of ``layout``; without it on the stage that keeps the most.
        """
        size = {"fp32": 4, "bf16": 2, "fp8": 1}[self.kv_cache_dtype]
        whole = layout or self.layout()
        numbers, layers = whole.slot_numbers(tokens), whole.most_layers
        if layout is not None:
            numbers, layers = layout.cache_numbers(tokens), len(layout.layers)
        held = numbers * size + whole.state_bytes(size) * (1 + self.rollout.rl_prefix_reuse)
        return held + (tokens * layers * whole.expert_bytes if self.rollout.rl_router_replay else 0)

    @property
    def _model_dtype(self) -> str:
        return "bf16" if self.precision.bf16 else "fp32"


@functools.cache
def section_classes() -> dict[str, type]:
    """Return section name -> section class, in the order of ``RLConfig``."""
    hints = get_type_hints(RLConfig)
    return {f.name: hints[f.name] for f in dataclasses.fields(RLConfig) if dataclasses.is_dataclass(hints[f.name])}


@functools.cache
def all_flags() -> tuple[Flag, ...]:
    """Return every flag of every section."""
    return tuple(flag for cls in section_classes().values() for flag in flags_of(cls))


@functools.cache
def all_spellings() -> dict[str, tuple[Flag, bool]]:
    """Return every accepted spelling, without dashes: its flag, or `Second`, and whether it switches a boolean on."""
    flags = [each for flag in all_flags() for each in (flag, *flag.seconds)]
    return {text: (each, on) for each in flags for text, on in each.spellings.items()}


@functools.cache
def _declared() -> dict[str, tuple[str, Flag]]:
    """Field name -> section name and flag."""
    return {flag.name: (section, flag) for section, cls in section_classes().items() for flag in flags_of(cls)}


def resolve(config: RLConfig, world_size: int) -> RLConfig:
    """Fill in every derived default; resolving twice changes nothing, and what the user typed is never overwritten.

    A value whose source is absent or wrong stays None: ``validate`` says so.
    """
    config = config.with_values(**_implied(config))
    if config.training.eval_only:
        config = replace(config, schedule=ScheduleConfig())  # a training command's is of another length
    for flag in all_flags():
        value = config.value(flag.name)
        if isinstance(value, InUnit):
            value = value.of(config, value.number)
        if value is None and flag.derived is not None:
            value = flag.derived(config, world_size)
        if value is not config.value(flag.name):
            config = config.with_values(**{flag.name: value})
    return config


def _implied(config: RLConfig) -> dict[str, Any]:
    """Values that others decide."""
    rollout = config.rollout
    # Megatron writes "off" as top-p 0 and top-k -1.
    values: dict[str, Any] = {"rl_top_p": rollout.rl_top_p or 1.0, "rl_top_k": max(0, rollout.rl_top_k)}
    if rollout.rl_eval_top_p == 0:
        values["rl_eval_top_p"] = 1.0
    if rollout.rl_eval_top_k == -1:
        values["rl_eval_top_k"] = 0
    if config.parallel.tensor_model_parallel_size == 1:
        values["sequence_parallel"] = False  # as Megatron does; ``notes`` tells whoever typed the flag
    precision = config.precision
    local = config.kernels.transformer_impl != "transformer_engine"  # which has fp8 products of its own
    if local and (precision.fp8_format, precision.fp8_recipe) == ("e4m3", "blockwise"):
        # Aligned training, with the tiles that Transformer Engine's blockwise recipe has.
        aligned = {"rl_rollout_quantization": "fp8_block_pow2", "rl_train_forward": "quantized"}
        unset = {name for name in aligned if name not in config.typed and config.value(name) in ("none", "plain")}
        values |= {name: value for name, value in aligned.items() if name in unset}
    if config.training.eval_only:  # it takes weights and no step: what only training needs has any value
        values |= {"perform_rl_step": False, "train_iters": 1, "eval_interval": 1}
        values |= {"rl_router_replay": False, "rl_train_forward": "plain", "rl_train_backward": "plain"}
        values |= {"finetune": True, "resume": False}
        values |= {"lr": config.optimizer.lr or 1.0}
    return values


def to_dict(config: RLConfig) -> dict[str, dict[str, Any]]:
    """Return section -> field -> value, of JSON values only."""
    return {
        section: {flag.name: _plain(config.value(flag.name)) for flag in flags_of(cls)}
        for section, cls in section_classes().items()
    }


def difference_from_defaults(config: RLConfig) -> dict[str, Any]:
    """Return field -> value, for the fields that are not at their declared default."""
    found = {flag.name: (config.value(flag.name), flag.default) for flag in all_flags()}
    return {name: _plain(value) for name, (value, default) in found.items() if value != default}


def typed_settings(config: RLConfig) -> list[str]:
    """List what the user set and is not the default, as typed: ``--lr 1e-06``."""
    found = {flag.name: flag for flag in all_flags() if config.value(flag.name) not in (flag.default, None)}
    return [found[name].typed(config.value(name)) for name in config.typed if name in found]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
