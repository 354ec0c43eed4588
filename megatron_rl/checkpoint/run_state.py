"""The part of a checkpoint that is plain numbers: a JSON file a person can read."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.checkpoint.foreign import args_of, is_foreign, unbuilt
from megatron_rl.checkpoint.stored import misfits, open_weights
from megatron_rl.config.model_directory import FILE_NAME
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import CheckpointError
from megatron_rl.families import Architecture, model_directory
from megatron_rl.families.architecture import expert_layers, layer_pattern
from megatron_rl.user_files import read_json

if TYPE_CHECKING:
    from megatron_rl.checkpoint.state import State
    from megatron_rl.models.gpt import PolicyModel

T = TypeVar("T")
_FREE = {"vocab_size", "max_position_embeddings", "norm_epsilon", "init_method_std", "rl_mla_absorb"}
_ARCHITECTURE = (
    "position_embedding_type", *(each.name for each in dataclasses.fields(Architecture) if each.name not in _FREE)
)  # fmt: skip
_FOREIGN = "Megatron-LM's"
FORMAT_VERSION = 1  # raised when code of an earlier version would misread the file; old files have none
_OF_ADAPTERS = ("lora_rank", "lora_alpha", "lora_targets")


@dataclass(frozen=True)
class StartingWeights:
    """The weights a run started from.

    Every checkpoint of the run carries this on, for the reference policy of its KL term is those very weights. A later
    start reads them again from where they lay, or from where they lie now, and compares the fingerprint.
    """

    kind: Literal["checkpoint", "hugging_face", "drawn"]
    """``drawn``: random ones, made when the model was built."""
    given: str = ""
    """The directory that a flag named, absolute."""
    path: str = ""
    """What is read: ``given``, or once it was read the checkpoint in it that was the newest then."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Number format -> fingerprint; empty before they are read."""

    @classmethod
    def at(cls, kind: Literal["checkpoint", "hugging_face"], directory: str) -> StartingWeights:
        """Refer to what a flag names, not yet read."""
        return cls(kind, os.path.abspath(directory), os.path.abspath(directory))

    def is_of(self, weights: Mapping[str, str]) -> bool:
        """Return whether ``weights`` are these, in every number format that both know."""
        both = self.weights.keys() & weights.keys()
        return bool(both) and all(self.weights[name] == weights[name] for name in both)


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model that a start from its weights need not be told."""

    architecture: dict[str, Any] = field(default_factory=dict)
    """See `architecture_of`."""
    flags: dict[str, Any] = field(default_factory=dict)
    """See `flags_of`; nothing where an earlier version saved it."""
    vocab_size: int = 0
    padded_vocab_size: int = 0
    end_token_ids: list[int] = field(default_factory=list)
    """What ended an answer."""
    hf_directory: str = ""
    """Whose config.json gave the shape, if one did."""


@dataclass(frozen=True)
class RunState:
    """A checkpoint's record of its run besides tensors. In the file the fields of ``model`` stand among the others."""

    step: int
    """Finished steps; the learning-rate schedule continues here."""
    model: ModelFacts = ModelFacts()
    seed: int = 0
    mode: str = "rl"
    """``rl`` or ``supervised``; else the checkpoint is not of a run of ours."""
    has_optimizer: bool = True
    """False when saved before the first update or with `--no-save-optim`."""
    critic_has_optimizer: bool | None = None
    """Of the critic's; None without a critic."""
    world: dict[str, int] = field(default_factory=dict)
    """Parallel sizes of the run that saved it."""
    optimizer_form: dict[str, Any] = field(default_factory=dict)
    """What decides which tensors the optimizer state consists of."""
    origin: StartingWeights | None = None
    """None where nothing says what the run started from; of a converted model the directory that it came from."""
    components: Mapping[str, State] = field(default_factory=dict)
    """By the names of `StateRegistry`; without tensors as `read_run_state` gives it."""


def run_state_of(config: RLConfig, policy: PolicyModel, end_token_ids: Sequence[int], **of_run: Any) -> RunState:
    """Return the state of a run as it is now; ``of_run`` are the fields that change from save to save."""
    named = config.checkpoint.load_hf or config.model.hf_config
    model = ModelFacts(
        architecture=architecture_of(config.architecture()),
        flags=flags_of(config),
        vocab_size=policy.vocab_size,
        padded_vocab_size=policy.padded_vocab_size,
        end_token_ids=list(end_token_ids),
        hf_directory="" if named is None else lasting(str(model_directory(named))),
    )
    sizes = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
    parallel = {f"{name}_parallel_size": getattr(config.parallel, f"{name}_parallel_size") for name in sizes}
    return RunState(
        model=model,
        seed=config.training.seed,
        mode=mode_of(config),
        world={"ranks": dist.get_world_size(), **parallel},
        optimizer_form=optimizer_form_of(config),
        **of_run,
    )


def architecture_of(model: Architecture) -> dict[str, Any]:
    """Return the flags two runs must share to share weights."""
    own = {name: getattr(model, name) for name in _ARCHITECTURE}
    layers = expert_layers(model.moe_layer_freq, model.num_layers) if model.num_experts else (True,)
    return own | {"moe_layer_freq": layer_pattern(layers)}


def flags_of(config: RLConfig) -> dict[str, Any]:
    """Return what, besides the architecture, a run that starts from the weights need not be told."""
    model, tokenizer = config.model, config.tokenizer
    found = {"norm_epsilon": model.norm_epsilon, "tokenizer_model": lasting(tokenizer.tokenizer_model)}
    if config.lora.lora_rank is not None:
        found |= {name: getattr(config.lora, name) for name in _OF_ADAPTERS}
    if tokenizer.vocab_size is not None:
        found["vocab_size"] = tokenizer.vocab_size
    if model.max_position_embeddings > config.training.seq_length:  # else it may be no more than the flag's default
        found["max_position_embeddings"] = model.max_position_embeddings
    return found


def lasting(name: str) -> str:
    """Return a directory by its absolute path, a name on the hub as it is."""
    return os.path.abspath(name) if os.path.exists(name) else name


def optimizer_form_of(config: RLConfig) -> dict[str, Any]:
    """Return the flags two runs must share to share an optimizer state."""
    return {
        "optimizer": config.optimizer.optimizer,
        "use_distributed_optimizer": config.parallel.use_distributed_optimizer,
        "bf16": config.precision.bf16,
    }


def write_run_state(directory: Path, state: RunState) -> None:
    """Write the JSON file."""
    values = {"format_version": FORMAT_VERSION, **vars(state), **vars(state.model)}
    del values["model"]
    values["components"] = {
        name: {key: value for key, value in component.items() if not torch.is_tensor(value)}
        for name, component in state.components.items()
    }
    (directory / FILE_NAME).write_text(json.dumps(values, indent=1, default=dataclasses.asdict) + "\n")


def read_run_state(directory: Path) -> RunState:
    """Read the JSON file; of a checkpoint that Megatron-LM wrote, make it of the flags it holds.

    Raises:
        CheckpointError: it is absent or not what `write_run_state` writes.
    """
    if is_foreign(directory):
        return _foreign_state(directory)
    path = directory / FILE_NAME
    try:
        values = read_json(path)
        if (written := values.get("format_version", FORMAT_VERSION)) > FORMAT_VERSION:
            raise ValueError(f"a later version of megatron-rl wrote it, in format {written}; update megatron-rl")
        values |= {"model": _made_of(ModelFacts, values), "components": values["components"]}
        if values.get("origin"):
            values["origin"] = _made_of(StartingWeights, values["origin"])
        return _made_of(RunState, values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read ({error})") from error


def _made_of(kind: type[T], values: Mapping[str, Any]) -> T:
    """Without what a later version wrote besides."""
    return kind(**{entry.name: values[entry.name] for entry in dataclasses.fields(kind) if entry.name in values})


def _foreign_state(directory: Path) -> RunState:
    args = args_of(directory)  # the model's flags are compared where they are read, see `config.megatron_args`
    return RunState(
        step=0,
        model=ModelFacts(padded_vocab_size=args.get("padded_vocab_size") or 0),
        mode=_FOREIGN,
        has_optimizer=False,
        origin=_origin_of(args),
    )


def _origin_of(args: Mapping[str, Any]) -> StartingWeights | None:
    """Megatron-LM does not say where a model came from, but its tokenizer is mostly that model's directory."""
    name = args.get("tokenizer_model")
    if args.get("tokenizer_type") != "HuggingFaceTokenizer" or not isinstance(name, str):
        return None
    return StartingWeights("hugging_face", name, lasting(name))


def differences(directory: Path, state: RunState, model: Architecture, other: str) -> list[str]:
    """Return one line for each flag in which the checkpoint's model differs from ``model``: ``other``, "this run"."""
    saved = state.model.architecture
    return [
        f"checkpoint {str(directory)!r} was made with {name} {saved[name]!r}, {other} {value!r}; use the checkpoint's "
        "value or another checkpoint"
        for name, value in architecture_of(model).items()
        if name in saved and saved[name] != value
    ]


def architecture_problems(config: RLConfig, directory: Path, vocab_size: int | None = None) -> list[str]:
    """Return one line for every way in which the checkpoint's model differs from the configured one.

    Args:
        vocab_size: the tokenizer's; None when it could not be loaded, which is reported elsewhere.
    """
    state = read_run_state(directory)
    problems = differences(directory, state, config.architecture(), "this run has") if config.has_shape else []
    problems += adapter_problems(config, directory, state)
    if is_foreign(directory) and config.has_shape:
        problems = [*unbuilt(directory), *problems]
        if not problems:
            tokens = vocab_size or 1
            problems += misfits(directory, open_weights(directory), config.architecture(tokens), tokens)
    if vocab_size is not None and state.model.vocab_size not in (0, vocab_size):
        problems.append(
            f"checkpoint {str(directory)!r} was made with a vocabulary of {state.model.vocab_size} tokens, "
            f"--tokenizer-model has {vocab_size}; use the tokenizer it was trained with"
        )
    return problems


def has_adapters(state: RunState) -> bool:
    """Return whether the checkpoint has adapters, and no other weights of the policy."""
    return "lora_rank" in state.model.flags


def adapter_problems(config: RLConfig, directory: Path, state: RunState) -> list[str]:
    """Return why adapters of the checkpoint, if it has some, are not those of the flags."""
    saved, what = state.model.flags, f"checkpoint {str(directory)!r}"
    if not has_adapters(state):
        return []
    if config.lora.lora_rank is None:
        return [
            f"{what} has adapters (--lora-rank {saved['lora_rank']}) and no other weights; add the --lora flags it was "
            "trained with, or make a whole model of it with megatron-rl export --merge"
        ]
    own = {name: getattr(config.lora, name) for name in _OF_ADAPTERS}
    return [
        f"{what} has adapters of --{name.replace('_', '-')} {_in_words(saved[name])}, this run has "
        f"{_in_words(value)}; use the same"
        for name, value in own.items()
        if _in_words(saved[name]) != _in_words(value)
    ]


def _in_words(value: Any) -> str:
    return " ".join(value) if isinstance(value, list | tuple) else f"{value:g}"


def mode_of(config: RLConfig) -> str:
    """Return how the run trains: ``rl`` or ``supervised``."""
    return "rl" if config.training.perform_rl_step else "supervised"


def continuation_problems(config: RLConfig, directory: Path) -> list[str]:
    """Return why the run saved in ``directory`` cannot be gone on with, although its weights fit."""
    state, problems = read_run_state(directory), []
    if state.mode == _FOREIGN:
        return [
            f"checkpoint {str(directory)!r} was written by Megatron-LM, whose run cannot be gone on with; take its "
            "weights with --finetune or --pretrained-checkpoint"
        ]
    if state.mode != mode_of(config):  # steps and cursor would mean something else
        switch = "add" if state.mode == "rl" else "leave out"
        starts = [f"--{name.replace('_', '-')}" for name in ("resume", "load", "load_hf") if name in config.typed]
        problems.append(
            f"checkpoint {str(directory)!r} is of a run in mode {state.mode}, which cannot go on in mode "
            f"{mode_of(config)}; to begin with its weights write --pretrained-checkpoint {directory} in place of "
            f"{' and '.join(starts)}, with another --run-dir; to go on with it {switch} --perform-rl-step"
        )
    if config.lora.lora_rank is not None and not has_adapters(state):
        problems.append(
            f"checkpoint {str(directory)!r} is of a run that trained all weights, which cannot go on with --lora-rank "
            f"{config.lora.lora_rank}; leave it out, or begin a new run with --pretrained-checkpoint {directory}"
        )
    if config.wants_critic and state.critic_has_optimizer is None:
        problems.append(
            f"checkpoint {str(directory)!r} is of a run without a critic; start a new run from its weights with "
            "--pretrained-checkpoint, or use the --rl-advantage it was trained with"
        )
    if state.has_optimizer and not config.checkpoint.no_load_optim:
        wanted = optimizer_form_of(config)
        problems += [
            f"checkpoint {str(directory)!r} has the optimizer state of a run with {name} {value}, this run has "
            f"{wanted[name]}; use the same, or start with a fresh optimizer with --no-load-optim"
            for name, value in state.optimizer_form.items()
            if name in wanted and wanted[name] != value
        ]
    return problems
