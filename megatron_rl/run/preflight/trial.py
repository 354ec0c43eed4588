"""One call of an extension on a batch of four tokens; what it returns is checked here and not in the steps of a run.

Run as a program it is the process in which a user's extensions are imported and called (`extensions` starts it).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from megatron_rl.algorithms import CLIPPED, Extension, StepRewards, TokenBatch
from megatron_rl.algorithms.batch import Aggregation, CriticValues, Packing, Sample
from megatron_rl.algorithms.covariance import TokenSelection
from megatron_rl.algorithms.extension import Baseline, Composed, advantage_of, correction_of, filter_of, loss_of
from megatron_rl.config.rl_config import RLConfig, all_flags
from megatron_rl.environments.child import answer_parent
from megatron_rl.environments.loader import reason_of
from megatron_rl.environments.tool_calls.parser import Parser, Unreadable
from megatron_rl.errors import ConfigError, Problem, collecting, shorten
from megatron_rl.quantization.recipe import Recipe
from megatron_rl.registry import ADVANTAGES, LOSSES, PARSERS, REASONING, RECIPES, Registry

ROWS, COLUMNS = 128, 256
"""Of a weight: whole tiles."""
_MASK = "put torch.where(batch.in_loss, ..., 0.0) around what you compute with and around what you return"


def call_own(
    report: Callable[[str, str, str], None], values: Mapping[str, Any], fields: Collection[str], skip: Collection[str]
) -> dict[str, list[str]]:
    """Return the problems of the extensions that ``fields`` name, by field, without those to ``skip``."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    config, found = RLConfig().with_values(**values), {}
    for flag in (flag for flag in all_flags() if flag.name in fields and flag.name not in skip):
        problems: list[Problem] = []
        spelling, name = f"--{flag.name.replace('_', '-')}", values[flag.name]
        who = f"{spelling} {shorten(name)}"
        for part in name.split("+") if flag.name == "rl_correction" else [name]:
            report(flag.name, who, f"{part} was imported")
            with collecting(problems, spelling):
                flag.names_of.get(part.strip())
        with collecting(problems):
            if not problems:
                report(flag.name, who, "it was called on four tokens")
                call_once(config, flag.name, "cuda" if torch.cuda.is_available() else "cpu")
        found[flag.name] = [str(problem) for problem in problems]
    return found


class _Wrong(Exception):
    """What the extension did, and what it should do where that is not what all of its kind should."""

    def __init__(self, did: str, should: str = "") -> None:
        super().__init__(did)
        self.should = should


def call_once(config: RLConfig, field: str, device: str = "cpu") -> None:
    """Calls what the flag of ``field`` names.

    Raises:
        ConfigError: it cannot be had, or it raises, or it returns something else than it should.
    """
    call, should = _CALLS[field]
    try:
        call(config, torch.device(device))
    except ConfigError:
        raise
    except Exception as error:  # whatever its author chose
        theirs = error.__traceback__.tb_next.tb_next  # without the two frames of this file
        did = str(error) if isinstance(error, _Wrong) else f"raises {reason_of(error.with_traceback(theirs))}"
        flag, name = f"--{field.replace('_', '-')}", config.value(field)
        module = sys.modules.get(name.rpartition(":")[0])  # a reference to a file names it itself
        shown = f"{flag} {shorten(name)}" + (f" ({module.__file__})" if module else "")
        raise ConfigError([Problem(flag, f"{shown} {did}; {getattr(error, 'should', '') or should}")]) from error


def four_tokens(config: RLConfig, device: torch.device, **further: Any) -> TokenBatch:
    """Return two samples of one group, a prompt token and an answer token each; the first is the better one.

    The prompts' log-probs are NaN: P0 is masked, A0 counts, Q0 is masked, B0 counts.
    """
    old, both = torch.tensor([torch.nan, -1.0, torch.nan, -1.0], device=device), torch.ones(2, dtype=torch.bool)
    first, zeros = torch.tensor([1.0, 0.0], device=device), torch.zeros(4, dtype=torch.int64, device=device)
    first = first + further.pop("lowest_reward", 0.0)
    is_answer, positions, parts = ~old.isnan(), torch.arange(4, device=device) % 2, further.pop("parts", None)
    packing = Packing(
        lengths=(2, 2), cu_seqlens=torch.tensor([0, 2, 4], dtype=torch.int32, device=device), position_ids=positions,
        sequence_index=torch.arange(4, device=device) // 2,
    )  # fmt: skip
    step = StepRewards(first.cpu(), both, zeros[:2].cpu(), both[:1], both, torch.ones(2, dtype=torch.int64), parts)
    drawn = old.nan_to_num(0.0)
    samples = Sample(
        token_ids=zeros, loss_mask=is_answer, inference_logprobs=drawn, versions=zeros, reward=first, sample_id=(0, 1),
        sequence=zeros[:2], first_sequence=zeros[:2], tokens_elsewhere=zeros[:2], truncated=first < first.max(),
    )  # fmt: skip
    given = {
        "old_logprobs": old, "entropy": -old, "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0], device=device),
        "ref_logprobs": old if config.wants_reference else None,
        "teacher_logprobs": old if config.wants_teacher else None,
        "critic": CriticValues(-drawn, both.to(device).float()) if config.wants_critic else None,
    }  # fmt: skip
    return TokenBatch(
        packing=packing, loss_mask=is_answer.float(), inference_logprobs=drawn, samples=samples,
        rewards=torch.where(is_answer, first[packing.sequence_index], 0.0), step=step, **given | further,
    )  # fmt: skip


def _loss(config: RLConfig, device: torch.device) -> None:
    loss, current = loss_of(config), torch.tensor([torch.nan, -1.01, torch.nan, -0.99], device=device)
    _constant(LOSSES, config.algorithm.rl_policy_loss, loss, "AGGREGATION", get_args(Aggregation))
    selected = torch.tensor([False, True, False, False], device=device) if isinstance(loss, TokenSelection) else None
    batch = four_tokens(config, device, current_logprobs=current.requires_grad_(), selected=selected)
    per_token, gradient = _values(loss(batch), batch, "loss"), None
    if per_token.requires_grad:
        (gradient,) = torch.autograd.grad(per_token.sum(), batch.current_logprobs, allow_unused=True)
    if gradient is None or not gradient[batch.in_loss].any():
        did = "returned a loss without a gradient of batch.current_logprobs, so nothing would be learnt"
        raise _Wrong(did, "compute it from them, without .detach(), .item() and torch.no_grad()")
    _zero_where_masked(per_token, batch, "loss")
    _zero_where_masked(gradient, batch, "gradient")


def _correction(config: RLConfig, device: torch.device) -> None:
    correction, batch = correction_of(config), four_tokens(config, device)
    for part in correction.parts if isinstance(correction, Composed) else (correction,):
        returned = part(batch)
        _zero_where_masked(_values(returned, batch, "weight"), batch, "weight")
        clipped = returned[1].get(CLIPPED, batch.in_loss)
        if clipped.shape != (4,) or clipped.dtype != torch.bool:
            raise _Wrong(f"returned {_described(clipped)} as {CLIPPED}", "return which tokens it has cut, [T] bool")


def _advantage(config: RLConfig, device: torch.device) -> None:
    advantage = advantage_of(config)
    _constant(ADVANTAGES, config.algorithm.rl_advantage, advantage, "BASELINE", get_args(Baseline))
    names = getattr(advantage, "reward_names", ())
    parts = torch.eye(2)[:, :1].repeat(1, len(names)) if names else None
    lowest = getattr(advantage, "lowest_reward", 0.0)
    batch = four_tokens(config, device, advantages=None, parts=parts, lowest_reward=lowest)
    values = _values(advantage(batch), batch, "advantage")
    if config.wants_critic:
        _values((advantage.returns(batch, values), {}), batch, "return")


def _filter(config: RLConfig, device: torch.device) -> None:
    counts = filter_of(config)
    for rewards in ([1.0, 0.0], []):
        value = counts(torch.tensor(rewards))
        if not isinstance(value, bool) and getattr(value, "shape", None) != ():
            raise _Wrong(f"returned {_described(value)} for the rewards {rewards}")


def _recipe(config: RLConfig, device: torch.device) -> None:
    recipe = RECIPES.get(config.quantization.rl_rollout_quantization)
    if not isinstance(recipe, Recipe):
        raise _Wrong(f"is {shorten(recipe)}")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if recipe.device_problem(capability) or recipe.shape_problem(ROWS, COLUMNS, None):
        return  # `machine` says so
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(device)
    x, q = weight[:4], recipe.quantize(weight, weight.new_ones(COLUMNS) if recipe.needs_calibration else None)
    wanted = {"matmul": (4, ROWS), "round_trip": (4, COLUMNS)}
    for name, shape in wanted.items():
        value = getattr(recipe, name)(x, q)
        if not isinstance(value, Tensor) or value.shape != shape or not value.isfinite().all():
            did = f"({recipe.name}: {recipe.format}) returned {_described(value)} from {name}"
            raise _Wrong(did, f"return finite numbers of shape {list(shape)}")


def _parser(config: RLConfig, device: torch.device) -> None:
    parser, calls = PARSERS.get(config.tokenizer.rl_tool_call_parser), [("add", {"a": 1}), ("now", {})]
    if not isinstance(parser, Parser):
        raise _Wrong(f"is {shorten(parser)}")
    text = parser.write(calls)
    pieces = parser.read(text, {name: {"type": "object"} for name, _ in calls})
    read = [(piece[0], dict(piece[1])) for piece in pieces if not isinstance(piece, str | Unreadable)]
    if read != calls:
        did = f"writes {calls} as {shorten(text)}, from which it reads {shorten(read)}"
        raise _Wrong(did, "`read` must yield the calls that `write` wrote")


def _reasoning(config: RLConfig, device: torch.device) -> None:
    parser = REASONING.get(config.tokenizer.rl_reasoning_parser)
    if (read := parser.split(f"{parser.begin}a{parser.end}b", is_begun=False, is_whole=True)) != ("a", "b"):
        raise _Wrong(f"reads {shorten(read)}", "`split` must find the thought 'a' and the answer 'b' between its marks")


def _values(returned: Any, batch: TokenBatch, what: str) -> Tensor:
    """The first of the pair ``returned``, one number a token, where all of it is as it should be."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise _Wrong(f"returned {_described(returned)}, which is no pair")
    values, sums = returned
    if not isinstance(values, Tensor) or values.shape != (4,) or not values.is_floating_point():
        raise _Wrong(f"returned {_described(values)} as the {what} of four tokens")
    if not values[batch.in_loss].isfinite().all():
        raise _Wrong(f"returned the {what} {values.tolist()}", "return finite numbers where batch.in_loss is true")
    for name, value in sums.items() if isinstance(sums, dict) else (("", sums),):
        if not name or not isinstance(value, Tensor) or value.shape not in ((), (4,)):
            raise _Wrong(f"returned {_described(value)} as metrics {name}", "return a dict of tensors, [] or [T]")
    return values


def _zero_where_masked(values: Tensor, batch: TokenBatch, what: str) -> None:
    if values[~batch.in_loss].any():  # true of NaN
        where = "and must return 0 for the first and third token, which are masked: their log-probs are NaN"
        raise _Wrong(f"returned the {what} {values.tolist()} {where}", _MASK)


def _constant(registry: Registry, name: str, extension: Any, constant: str, choices: Sequence[str]) -> None:
    """The run reads it from the file, without running it, and does not see what a class inherits."""
    value = getattr(extension, constant, None)
    if value is not None and value not in choices:
        raise _Wrong(f"has {constant} = {shorten(value)}", f"use one of {', '.join(choices)}")
    if value not in (None, registry.stated(name, constant) or getattr(Extension, constant)):
        raise _Wrong(f"inherits {constant} = {value!r}", f"write {constant} into the class, else a run does not see it")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return "None" if value is None else f"a {type(value).__name__}"


_PAIR = "return a pair: the {} of each token, [T] floats, and a dict of metrics, which may be empty: `return {}, {{}}`"
_CALLS: dict[str, tuple[Callable[[RLConfig, torch.device], None], str]] = {
    "rl_advantage": (_advantage, _PAIR.format("advantage", "batch.of_samples(advantages)")),
    "rl_policy_loss": (_loss, _PAIR.format("loss", "loss")),
    "rl_correction": (_correction, _PAIR.format("weight", "weights")),
    "rl_group_filter": (_filter, "return True where the group counts, else False; there may be no rewards"),
    "rl_rollout_quantization": (_recipe, "name an instance of a subclass of megatron_rl.quantization.recipe.Recipe"),
    "rl_reasoning_parser": (_reasoning, "name an instance of megatron_rl.endpoint.reasoning.Reasoning"),
    "rl_tool_call_parser": (
        _parser, "name an instance of a subclass of megatron_rl.environments.tool_calls.parser.Parser"
    ),
}

if __name__ == "__main__":
    answer_parent({"call_own": call_own})
