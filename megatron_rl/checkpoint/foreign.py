"""Checkpoints that Megatron-LM itself wrote: ``iter_0000100/`` or ``release/``, in torch_dist or with a file a rank.

Only weights are taken. It writes in place and without checksums, so only what its pointer names is complete for sure.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.dist_files import DistFiles
from megatron_rl.checkpoint.torch_files import MODEL_FILE, has_rank_files, is_megatron_layout, read, split_of
from megatron_rl.errors import CheckpointError, shorten
from megatron_rl.user_files import read_json

_COMMON, _FORMAT, _PARTS = "common.pt", "metadata.json", ".metadata"
ONLY_BUILT: Mapping[str, Any] = {
    "multi_latent_attention": False, "rotary_interleaved": False, "window_size": None, "softmax_type": "vanilla",
    "qk_l2_norm": False, "no_rope_freq": None, "attention_output_gate": False, "experimental_attention_variant": None,
    "rotary_seq_len_interpolation_factor": None, "apply_layernorm_1p": False, "squared_relu": False,
    "quick_geglu": False, "openai_gelu": False, "glu_linear_offset": 0.0, "activation_func_clamp_value": None,
    "moe_router_score_function": "softmax", "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None,
    "moe_apply_probs_on_input": False, "moe_shared_expert_intermediate_size": None, "mtp_num_layers": None,
}  # fmt: skip
"""Flags of Megatron-LM with the one value that is built here: with another the same weights are another model."""


def is_foreign(directory: Path) -> bool:
    """Whether Megatron-LM itself wrote it: without checksums and the state of a run."""
    is_ours = any((directory / name).exists() for name in ("manifest.json", "run_state.json"))
    if not is_megatron_layout(directory) or is_ours:
        return False
    return has_rank_files(directory) or any((directory / name).is_file() for name in (_FORMAT, _PARTS))


def check_files(directory: Path) -> None:
    """See whether it is in a format that is read, and all there.

    Raises:
        CheckpointError: it is not; names the format, or what is missing.
    """
    if has_rank_files(directory):
        split_of(directory)
        return
    path = directory / _FORMAT
    kind = "fsdp_dtensor or torch_dcp"
    if path.is_file():
        try:
            kind = read_json(path)["sharded_backend"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read ({error})") from error
    if kind != "torch_dist":
        raise CheckpointError(
            f"checkpoint {str(directory)!r} was written by Megatron-LM in its format {shorten(kind)}, of which only "
            "torch_dist and torch are read here; save it with --ckpt-format torch_dist, or convert it to Hugging "
            "Face's format and use --load-hf"
        )
    DistFiles(directory)


def read_args(directory: Path) -> dict[str, Any]:
    """Megatron-LM's flags; empty where the checkpoint does not have them.

    Raises:
        CheckpointError: they cannot be read.
    """
    path = directory / _COMMON
    if has_rank_files(directory):
        path = directory / split_of(directory).names[0] / MODEL_FILE
    elif not path.is_file():  # of megatron-core 0.19, or written without
        return {}
    content = read(path)
    args = content.get("args") if isinstance(content, dict) else None
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def unbuilt(directory: Path) -> Iterator[str]:
    """One line for each flag by which it is a model that is not built here, however its tensors are called."""
    args = read_args(directory)
    frequency = args.get("moe_layer_freq", 1)
    has_dense_layers = any(each != 1 for each in frequency) if isinstance(frequency, list) else frequency != 1
    wrong = {name: args[name] for name, value in ONLY_BUILT.items() if args.get(name, value) not in (value, None)}
    if args.get("num_experts") and has_dense_layers:
        wrong["moe_layer_freq"] = frequency
    for name, value in wrong.items():
        yield (
            f"checkpoint {str(directory)!r} was made with {name} {shorten(value)}, which is not built here; take a "
            "model without it"
        )
