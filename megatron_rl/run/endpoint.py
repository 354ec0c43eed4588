"""The endpoint that a run's harnesses call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from megatron_rl.endpoint.calls import POLICY, REFERENCE, Endpoint
from megatron_rl.rollout.harnesses import HarnessSettings
from megatron_rl.run.base import Run
from megatron_rl.trainer.policy import ReferencePolicy

logger = logging.getLogger(__name__)


def serve_harnesses(run: Run, reference: ReferencePolicy | None) -> HarnessSettings | None:
    """How this rank takes part in the samples of harnesses; None where the run has none.

    The leader of each copy of the model gets an endpoint, which is closed at the end of the run. With
    `--rl-serve-reference` it serves the ``reference``, too.

    Raises:
        ConfigError: its port cannot be had.
    """
    environments, config = run.environments.harnesses, run.config
    if not environments:
        return None
    models, ask_reference = (POLICY,), None
    if reference is not None and config.environment.rl_serve_reference:

        @contextlib.contextmanager
        def ask_reference() -> Iterator[None]:
            with run.timer.phase("gen/reference"), reference.generating():
                yield

        models = (POLICY, REFERENCE)
    endpoint = None
    if run.groups.leads_model:
        rollout, port = config.rollout, config.environment.rl_endpoint_port
        endpoint = Endpoint(
            run.tokenizer,
            max_sequence_length=rollout.inference_max_seq_length,
            max_new_tokens=max(rollout.rl_max_new_tokens, rollout.rl_eval_max_new_tokens),
            models=models,
            port=port and port + run.groups.rollout_rank,
        )
        endpoint.start()
        run.closing.callback(endpoint.close)
        logger.info("harnesses (%s) call the model at %s", ", ".join(sorted(environments)), endpoint.base_url())
    masks = config.environment.rl_edited_history == "mask"
    return HarnessSettings(environments, run.environments.client.run, endpoint, masks, ask_reference)
