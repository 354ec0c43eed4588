"""Llama 3 to 3.3: no biases; from 3.1 on scaled low rotary frequencies."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_decoder
from megatron_rl.families.hf_config import HfConfig


def _read(config: HfConfig) -> Architecture:
    config.expect("mlp_bias", False, why="the MLP's linears have no bias")
    config.expect("pretraining_tp", 1, why="it computes each projection in slices")
    return read_decoder(config)


_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256,
    "beta_fast": 16.0, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False,
}  # fmt: skip

FAMILY = Family(
    name="llama",
    class_name="LlamaForCausalLM",
    title="Llama 3",
    read=_read,
    examples=(
        {**SMALL, "rope_theta": 500000.0},
        {**SMALL, "hidden_size": 128, "max_position_embeddings": 16384, "rope_parameters": _LLAMA3},
        {
            **SMALL,
            "tie_word_embeddings": True,
            "head_dim": 16,
            "max_position_embeddings": 16384,
            "rope_parameters": {**_LLAMA3, "factor": 32.0},
        },
        {**SMALL, "head_dim": 16, "rope_parameters": _YARN},
    ),
)
