"""The endpoint that a run's harnesses call."""

from __future__ import annotations

import logging

from megatron_rl.endpoint.calls import Endpoint
from megatron_rl.rollout.harnesses import HarnessSettings
from megatron_rl.run.base import Run

logger = logging.getLogger(__name__)


def serve_harnesses(run: Run) -> HarnessSettings | None:
    """How this rank takes part in the samples of harnesses; None where the run has none.

    The leader of each copy of the model gets an endpoint, which is closed at the end of the run.

    Raises:
        ConfigError: its port cannot be had.
    """
    environments, config = run.environments.harnesses, run.config
    if not environments:
        return None
    endpoint = None
    if run.groups.leads_model:
        rollout, port = config.rollout, config.environment.rl_endpoint_port
        endpoint = Endpoint(
            run.tokenizer,
            max_sequence_length=rollout.inference_max_seq_length,
            max_new_tokens=max(rollout.rl_max_new_tokens, rollout.rl_eval_max_new_tokens),
            port=port and port + run.groups.rollout_rank,
        )
        endpoint.start()
        run.closing.callback(endpoint.close)
        logger.info("harnesses (%s) call the model at %s", ", ".join(sorted(environments)), endpoint.base_url())
    masks = config.environment.rl_edited_history == "mask"
    return HarnessSettings(environments, run.environments.client.run, endpoint, masks)
