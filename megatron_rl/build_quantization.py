"""Quantised rollouts, aligned training and the parity gate, from flags."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import torch

from megatron_rl.attention.kv_numbers import rounded_attention
from megatron_rl.config import RLConfig
from megatron_rl.inference import Engine, RolloutEngine
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.metrics.table import format_table
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups
from megatron_rl.quantization.audit import LayerAudit, table_rows
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.rollout import Draw, PromptSource, RequestFactory
from megatron_rl.trainer import Optimization
from megatron_rl.trainer.parity import EMULATION_LIMIT, KVCacheRounding, ParityGate, ParityLimits
from megatron_rl.trainer.reference import ReferencePolicy
from megatron_rl.trainer.scoring import Scorer

logger = logging.getLogger(__name__)

CALIBRATION_PROMPTS = 16
CALIBRATION_TOKENS = 64
AUDIT_LINES = 24


def build_quantization(
    config: RLConfig,
    policy: PolicyModel,
    optimization: Optimization,
    reference: ReferencePolicy | None,
    groups: ParallelGroups,
    directory: RunDirectory,
    timer: PhaseTimer,
    stack: contextlib.ExitStack,
) -> RolloutQuantization:
    """Copies of the weights as they are now; with aligned training installed until ``stack`` closes."""
    settings = config.quantization

    def report(rows: Sequence[LayerAudit]) -> None:
        if groups.is_main:
            _report_audit(rows, directory)

    quantization = RolloutQuantization(
        policy.gpt,
        settings.rl_rollout_quantization,
        settings.rl_quantization_skip,
        policy.config.num_layers,
        report,
        timer.phase,
    )
    linears = quantization.linears
    if linears is not None and groups.is_main:
        logger.info(
            "rollouts run %d linear layers as %s, %d as they are: %.2f MiB beside %.2f MiB of their weights",
            len(linears.layers), linears.recipe.format, len(linears.plain), linears.stored_bytes / 2**20,
            linears.num_weights * policy.dtype.itemsize / 2**20,
        )
    if settings.rl_train_forward == "quantized" and linears is not None:
        stack.enter_context(linears.installed())
        optimization.on_update.append(quantization.refresh)
        if reference is not None:
            reference.on_swap.append(quantization.refresh)
    else:
        optimization.on_update.append(quantization.weights_changed)
    return quantization


def build_parity_gate(
    config: RLConfig,
    scorer: Scorer,
    quantization: RolloutQuantization,
    policy: PolicyModel,
    groups: ParallelGroups,
    engine: Engine | None,
) -> ParityGate:
    """`--rl-mismatch-...`."""
    settings = config.quantization
    # On a GPU the 8-bit products come out in bf16 whatever the model's dtype.
    dtype = torch.bfloat16 if policy.device.type == "cuda" else policy.dtype
    return ParityGate(
        scorer,
        quantization,
        ParityLimits(settings.rl_mismatch_max_kl, settings.rl_mismatch_max_gap, EMULATION_LIMIT[dtype]),
        settings.rl_mismatch_action,
        settings.rl_mismatch_interval,
        groups.data_group,
        config.algorithm.rl_correction or "none",
        _kv_cache_rounding(config, policy, engine),
    )


def _kv_cache_rounding(config: RLConfig, policy: PolicyModel, engine: Engine | None) -> KVCacheRounding | None:
    if not config.kv_cache_is_rounded or not isinstance(engine, RolloutEngine):
        return None
    numbers = engine.kv_numbers
    return KVCacheRounding(config.kv_cache_dtype, lambda: rounded_attention(policy.gpt.decoder.layers, numbers))


def calibration(
    engine: Engine, source: PromptSource | None, factory: RequestFactory, held_out: Sequence[Draw]
) -> Callable[[], None]:
    """What generates a little from the next prompts of the run, without drawing them."""

    def generate() -> None:
        draws = list(held_out[:CALIBRATION_PROMPTS])
        if source is not None:
            cursor = source.state_dict()
            draws = source.draw(CALIBRATION_PROMPTS)
            source.load_state_dict(cursor)
        engine.begin(seed=0, policy_version=0)
        for index, draw in enumerate(draws):
            engine.submit(factory.request(draw, 1, index, at_most=CALIBRATION_TOKENS))
        while engine.has_unfinished:
            engine.step()

    return generate


def _report_audit(rows: Sequence[LayerAudit], directory: RunDirectory) -> None:
    directory.write_quantization([vars(row) | {"agrees": row.agrees} for row in rows])
    shown = table_rows(rows, AUDIT_LINES)
    title = "the linear layers of the first rollout"
    if len(shown) < len(rows):
        title += f", {len(shown)} of {len(rows)} with the largest errors"
    table = format_table(("layer", "ran as", "error"), shown, unicode=False)
    logger.info("%s (all in %s):\n%s", title, directory.quantization.name, table)
