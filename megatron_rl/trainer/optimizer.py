"""Megatron's DDP wrapper, optimizer and learning-rate schedule, from flags, and one step of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.trainer.precision_aware import PrecisionAwareAdamW

_AT_ONCE = 2**24
"""Elements processed at a time, to limit memory."""
_GOLDEN = -1640531527
"""2^32 divided by the golden ratio, as int32: its multiples are evenly spread over the integers."""


@dataclass(frozen=True)
class UpdateOutcome:
    """The result of one optimizer step, equal on all ranks."""

    applied: bool
    """False if the gradient was zero or not finite: parameters and moments are unchanged."""
    grad_norm: float
    """Before clipping."""
    num_zeros: float | None
    learning_rate: float

    @property
    def is_empty(self) -> bool:
        """True if the gradient was 0, for example because the correction rejected every token."""
        return not self.applied and self.grad_norm == 0

    @property
    def skipped(self) -> bool:
        """True if the gradient was not finite."""
        return not self.applied and not self.is_empty


class Optimization:
    """The DDP-wrapped model, its optimizer and its schedule, called in the right order."""

    def __init__(self, policy: PolicyModel, config: RLConfig, copies: RolloutQuantization | None = None) -> None:
        """``copies``: quantised copies, notified of every applied update."""
        self.policy = policy
        self._copies = copies
        self._clip = config.optimizer.clip_grad
        self._count_zeros = config.logging.log_num_zeros_in_grad
        self._empty_cache_level = config.training.empty_unused_memory_level
        if policy.fp8_weights is not None:
            policy.fp8_weights.quantize()
        self.wrapped = _wrap(policy, config)
        """One per chunk of the policy, in order."""
        self.optimizer = _build_optimizer(self.wrapped, config, policy.dtype)
        if policy.fp8_weights is not None:
            policy.fp8_weights.set_optimizer(self.optimizer)
        self._dithers = config.precision.dither_main_params
        self._dither()
        self.schedule = Schedule(self.optimizer, config)
        """Advanced by the training loop."""
        self.updates_begun = 0
        """Number of updates that this process has started to write into the weights."""
        settings = policy.config
        settings.finalize_model_grads_func = finalize_model_grads
        settings.grad_scale_func = self.optimizer.scale_loss
        if config.parallel.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.wrapped]
            settings.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
            if len(no_sync) > 1:
                settings.grad_sync_func = [chunk.start_grad_sync for chunk in self.wrapped]

    def reload_main_parameters(self) -> None:
        """Recreate the main parameters from the model's, as at the start."""
        self.optimizer.reload_model_params()
        if self.policy.fp8_weights is not None:
            self.policy.fp8_weights.init_main_parameters()
        self._dither()

    def _dither(self) -> None:
        if self._dithers:
            dither_main_parameters(parameter for chunk in self.wrapped for parameter in chunk.parameters())

    def zero_grad(self) -> None:
        """Clear the gradient buffers before the first micro-batch."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def release_memory(self, level: int) -> None:
        """Free cached device memory if `--empty-unused-memory-level` is at least ``level``."""
        if self._empty_cache_level >= level and self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def step(self) -> UpdateOutcome:
        """Clip and apply the reduced gradients, unless they are all 0 or not finite.

        Megatron's ``step`` would clip by a NaN norm and write NaN into every parameter; with zero gradients weight
        decay and momentum would still move them. The norm is reduced over all ranks, so all ranks decide alike.
        """
        learning_rate = self.optimizer.param_groups[0]["lr"]
        found_inf = self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if found_inf or not math.isfinite(norm) or norm == 0:
            return UpdateOutcome(False, norm, None, learning_rate)
        self.updates_begun += 1
        if 0 < self._clip < norm:
            masters = [p for part in self.optimizer.chained_optimizers for p in part.get_parameters()]
            clip_grads_with_norm_(masters, self._clip, torch.tensor(norm), foreach=True)
        zeros = self.optimizer.count_zeros() if self._count_zeros else None
        applied = self.optimizer.step_with_ready_grads()
        if self._copies is not None:
            self._copies.weights_changed()
        return UpdateOutcome(bool(applied), norm, zeros, learning_rate)

    def gather_parameters(self) -> None:
        """Wait until every rank has the weights of the last update; collective.

        With `--overlap-param-gather` they arrive during the next forward pass: reading parameters earlier, for a
        checkpoint for example, would give old ones.
        """
        for chunk in self.wrapped:
            if chunk.use_forward_hook:
                chunk.start_param_sync(force_sync=True)

    def reduce_without_samples(self) -> None:
        """Run the collectives of forward and backward passes without samples, in the same order as the other ranks:
        zero gradients, denominator zero.
        """
        for chunk in self.wrapped:
            # In forward passes the other ranks gather the parameters of the last update: last bucket first.
            for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups) if chunk.use_forward_hook else ():
                for bucket_group in reversed(groups):
                    bucket_group.finish_param_sync()
        for chunk in reversed(self.wrapped):
            if chunk.ddp_config.overlap_grad_reduce:
                chunk.start_grad_sync()
        finalize_model_grads(self.wrapped, torch.zeros([], dtype=torch.int, device=self.policy.device))


class Schedule:
    """The learning rate of each step, the same for all its updates.

    Counted in steps, so that it ends with the run, however many updates a step has. With 4 warm-up steps to 1.0 the
    first runs at 0.25 and the fourth at 1.0. Megatron's own first step would run at `--lr-warmup-init`, by default 0: a
    wasted step.
    """

    def __init__(self, optimizer: MegatronOptimizer, config: RLConfig) -> None:
        schedule, peak, warmup = config.schedule, config.optimizer.lr, config.schedule.lr_warmup_iters
        # Megatron's inverse square root uses the step number n itself, sqrt(warm-up / n): shifting it by one, as below,
        # would make it sqrt((warm-up - 1) / (n - 1)).
        self._first = 1 if schedule.lr_decay_style == "inverse-square-root" else 0
        after_one_step = schedule.lr_warmup_init + (peak - schedule.lr_warmup_init) / max(warmup, 1)
        self._megatron = OptimizerParamScheduler(
            optimizer, init_lr=schedule.lr_warmup_init if self._first else after_one_step, max_lr=peak,
            min_lr=schedule.min_lr, lr_warmup_steps=max(warmup - 1 + self._first, 0),
            lr_decay_steps=config.lr_decay_steps, lr_decay_style=schedule.lr_decay_style,
            start_wd=config.optimizer.weight_decay, end_wd=config.optimizer.weight_decay,
            wd_incr_steps=config.lr_decay_steps, wd_incr_style="constant",
            wsd_decay_steps=schedule.lr_wsd_decay_iters or None, lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        )  # fmt: skip
        self.set_step(finished_steps=0)

    def set_step(self, finished_steps: int) -> None:
        """Set the rate of the step after ``finished_steps`` steps."""
        self._megatron.num_steps = self._first + finished_steps
        self._megatron.step(increment=0)


def _wrap(policy: PolicyModel, config: RLConfig) -> list[DistributedDataParallel]:
    parallel = config.parallel
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.precision.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
        fp8_param_gather=config.precision.fp8_param_gather,
        # Gradients are summed; the loss's global denominator divides them once, at the end.
        average_in_collective=False,
    )
    return [
        # Of several chunks only the first must start its reduction before its backward pass is over.
        DistributedDataParallel(policy.config, settings, gpt, disable_bucketing=index > 0)
        for index, gpt in enumerate(policy.chunks)
    ]


def _build_optimizer(wrapped: list[DistributedDataParallel], config: RLConfig, dtype: torch.dtype) -> MegatronOptimizer:
    settings = OptimizerConfig(
        **vars(config.optimizer),
        min_lr=config.schedule.min_lr,  # must not be None: megatron compares with it
        bf16=config.precision.bf16,
        fp8_recipe=config.precision.fp8_recipe,
        params_dtype=dtype,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
        log_num_zeros_in_grad=config.logging.log_num_zeros_in_grad,
    )
    built = get_megatron_optimizer(settings, wrapped)
    dtypes = {"exp_avg": config.precision.exp_avg_dtype, "exp_avg_sq": config.precision.exp_avg_sq_dtype}
    if set(dtypes.values()) != {"fp32"}:
        for part in (part for part in built.chained_optimizers if part.optimizer is not None):
            part.optimizer = PrecisionAwareAdamW(part.optimizer.param_groups, dtypes)
    for part in built.chained_optimizers:
        # Without Apex and Transformer Engine it is torch's Adam, a dozen calls per parameter. Its default on a GPU,
        # foreach, needs 4 more bytes per parameter, which the memory estimate does not include.
        for group in part.optimizer.param_groups if isinstance(part.optimizer, torch.optim.AdamW) else ():
            group["fused"] = True
    return built


@torch.no_grad()
def dither_main_parameters(parameters: Iterable[Tensor]) -> None:
    """Move the fp32 copy of each bf16 parameter on this rank within the interval that rounds to the parameter.

    A weight loaded in bf16 starts in the middle of its interval. Updates of a thousandth of it change only the fp32
    copy until they add up: after 3 steps at a learning rate of 2e-5, 60 at 1e-6. From random positions some weights
    change at the first step, and the mean change equals the update: dithering, as before a quantiser in signal
    processing.

    The position is a hash of the weight's bits, equal on every layout and rank.
    """
    for parameter in parameters:
        main = getattr(parameter, "main_param", None)
        if parameter.dtype == torch.bfloat16 and main is not None:
            for piece in main.data.view(-1).split(_AT_ONCE):
                piece.copy_(dithered(piece.bfloat16()))


def dithered(weights: Tensor) -> Tensor:
    """Return fp32 numbers that round to ``weights``, [...] bf16, at pseudo-random positions in their intervals."""
    exact = weights.float()
    place = (weights.view(torch.int16).int() * _GOLDEN).float() / 2**32  # -0.5 to 0.5
    step = torch.frexp(exact).exponent - 8  # a bf16 number has 8 bits of significand
    spread = exact + torch.ldexp(place, step)
    return torch.where(spread.bfloat16() == weights, spread, exact)  # zeros, and some powers of two, stay
