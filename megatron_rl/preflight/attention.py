"""The attention backend, the device and the KV cache's pages, before there is a model."""

from __future__ import annotations

from megatron_rl.config import RLConfig
from megatron_rl.errors import ConfigError

_ASKED = ("attention_backend", "rl_kv_cache_dtype", "inference_dynamic_batching_block_size", "rl_kv_overcommit")


def attention_problems(config: RLConfig) -> list[str]:
    """One line for a backend that the device lacks or that does not take the model's numbers, or for its pages.

    What is chosen automatically always runs. With --check-world-size the run is meant for other machines, whose
    devices nobody can ask.
    """
    training = config.training
    if not (any(name in config.typed for name in _ASKED) and config.model.is_complete):
        return []
    if training.check and training.check_world_size is not None:
        return []
    from megatron_rl.models import attention_of  # brings torch and megatron-core, which most runs need not wait for
    from megatron_rl.platform import current_platform

    try:
        chosen = attention_of(config, current_platform())
    except ConfigError as error:
        return error.lines
    asked, kernel = config.rollout.inference_dynamic_batching_block_size, chosen.cache
    if config.rollout.rl_kv_overcommit > 1 and kernel.layout == "slots":
        return [
            f"--rl-kv-overcommit {config.rollout.rl_kv_overcommit:g} needs a KV cache of pages, and the attention "
            f"backend {chosen.cache_name} keeps one of slots; leave it out, or use --attention-backend paged"
        ]
    if asked is None or kernel.layout == "slots" or asked % kernel.page_multiple == 0:
        return []
    higher = -(-asked // kernel.page_multiple) * kernel.page_multiple
    return [
        f"--inference-dynamic-batching-block-size {asked} is not a multiple of {kernel.page_multiple}, as the pages of "
        f"{chosen.cache_name} must be; use {higher}"
    ]
