"""Small random models of any family in the Hugging Face format, written by transformers itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_rl.algorithms import TokenBatch
from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.families import HfModel
from megatron_rl.families.family import FAMILIES
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.trainer.packing import collate
from tests.support.samples import make_sample
from tests.support.tiny import VOCABULARY

LENGTHS = (600, 3, 41)
"""Long enough for scaled frequencies to turn far, short enough for a CPU."""
EXAMPLES = [(name, index) for name in FAMILIES.names() for index in range(len(FAMILIES.get(name).examples))]

FLAGS = {
    "seq-length": "640", "tokenizer-model": "unused", "langrl-env-config": "unused", "run-dir": "unused", "lr": "1e-3",
    "train-iters": "1", "make-vocab-size-divisible-by": "8",
}  # fmt: skip


def write_model(
    directory: Path, family: str, settings: Mapping[str, Any], dtype: str = "float32", **save: Any
) -> torch.nn.Module:
    """Save a random model of ``settings`` and return it, in fp32. Biases and norms are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    generator = torch.Generator().manual_seed(17)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    # The delta rule's two ways are 3e-4 apart in transformers itself where the weights are larger.
    spread = 0.15 if any(name.endswith(".A_log") for name, _ in model.named_parameters()) else 0.3
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            centre = -4 if name.endswith(".A_log") else 1  # so that a state remembers some 40 tokens, and not one
            parameter.copy_(centre + 0.3 * noise if parameter.dim() == 1 else spread * noise)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():  # a router's bias
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    stored = getattr(torch, dtype)
    model.to(stored).save_pretrained(directory, **save)
    return model.float()


def write_shape(directory: Path, **changes: Any) -> Path:
    """The ``config.json`` of a Qwen2 that is larger than the tiny policy, of its vocabulary; no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": VOCABULARY, "hidden_size": 48,
        "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 1024, "initializer_range": 0.2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(shape | changes))
    return directory


def hf_run(directory: Path, world_size: int = 1, **changes: object) -> RLConfig:
    """The configuration of ``--load-hf DIR``; False removes a flag."""
    flags = FLAGS | {"load-hf": str(directory)}
    flags |= {name.replace("_", "-"): value for name, value in changes.items()}
    argv: list[str] = []
    for name, value in flags.items():
        if value is not False:
            argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    config, problems = read_config(argv, world_size)
    assert not problems, problems
    return config


def batch_of(vocabulary: int, lengths: Sequence[int] = LENGTHS, first: int = 0) -> TokenBatch:
    """Random sequences laid end to end, of tokens from ``first`` on."""
    draw = torch.Generator().manual_seed(3)
    drawn = [torch.randint(first, vocabulary, (length,), generator=draw) for length in lengths]
    samples = [make_sample(token_ids, 1, 0.0, 0.0) for token_ids in drawn]
    return collate(samples, "cpu", round_to=2)


@torch.no_grad()
def reference_logits(model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
    """transformers' logits of every token, ``[T, V]``, a sequence at a time; padding included."""
    sequences = batch.samples.token_ids.split(list(batch.packing.lengths))
    return torch.cat([model(ids[None]).logits[0] for ids in sequences])


class _Double(TorchFunctionMode):
    """Makes fp64 of the fp32 that transformers takes for norms, RoPE and softmax whatever the weights are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "float":
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        named = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return func(*args, **named)


def exact_logits(model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
    """Return `reference_logits` of the same weights, computed in fp64 throughout."""
    double = copy.deepcopy(model).double()
    double.config._experts_implementation = "eager"  # the grouped product takes no fp64
    with _Double():
        return reference_logits(double, batch)


@torch.no_grad()
def packed_logits(policy: PolicyModel, batch: TokenBatch) -> torch.Tensor:
    """This rank's logits by the forward pass that training uses, ``[T, V / ranks]``; none but on the last stage."""
    from megatron_rl.platform.groups import current_groups
    from megatron_rl.trainer.scoring import Scorer
    from megatron_rl.trainer.update import run_schedule

    forward = Scorer(policy, current_groups(), 1.0).forward
    found = run_schedule(policy.chunks, [batch], forward, lambda output, _: output, forward_only=True)
    return found[0] if found else torch.empty(0)


def loaded_policy(config: RLConfig, vocabulary: int) -> tuple[PolicyModel, int]:
    """The model of ``--load-hf`` and the bytes this rank has read; the groups must be initialised.

    What is not read stays NaN.
    """
    from megatron_rl.checkpoint.hf.load import load_hf
    from megatron_rl.families import read_model
    from megatron_rl.models.gpt import build_model
    from megatron_rl.platform import current_platform
    from megatron_rl.platform.groups import current_groups, seed_everything

    seed_everything(1)
    policy = build_model(config, current_platform(), vocabulary, is_filled_later=True)
    for parameter in policy.parameters():
        parameter.data.fill_(torch.nan)
    return policy, load_hf(read_model(config.checkpoint.load_hf), policy, current_groups())


def write_back(policy: PolicyModel, origin: HfModel, target: Path, dtype: torch.dtype | None = None) -> None:
    """The weights of a model on one rank as a Hugging Face directory."""
    from megatron_rl.checkpoint.hf.save import write_hf

    own = dict(policy.named_parameters())
    write_hf(origin, target, policy.layout, lambda parameter: own[parameter.name].detach(), dtype)
