"""Directories with Megatron's names, ``iter_0000100/`` and ``release/``: Megatron-LM's.

They are torch_dist (see `dist_files`), or have a file a rank and are converted into it (see `torch_format`).

Of Megatron-LM's only weights are taken. It writes in place and without checksums, so only what its pointer names is
complete for sure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.dist_files import DistFiles
from megatron_rl.checkpoint.torch_format import first_file
from megatron_rl.config.megatron_args import read_args
from megatron_rl.errors import CheckpointError, shorten
from megatron_rl.user_files import read_json

RELEASE = "release"
"""The name of weights that Megatron-LM's tools made; it has no step."""
_COMMON, _FORMAT, _PARTS = "common.pt", "metadata.json", ".metadata"
ONLY_BUILT: Mapping[str, Any] = {
    "multi_latent_attention": False, "rotary_interleaved": False, "window_size": None, "softmax_type": "vanilla",
    "qk_l2_norm": False, "no_rope_freq": None, "attention_output_gate": False, "experimental_attention_variant": None,
    "squared_relu": False, "quick_geglu": False, "openai_gelu": False, "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "moe_apply_probs_on_input": False, "mtp_num_layers": None,
}  # fmt: skip
"""Flags of Megatron-LM with the one value that is built here: with another the same weights are another model."""


def is_foreign(directory: Path) -> bool:
    """Return whether Megatron-LM itself wrote it, without checksums and the state of a run; its name says so."""
    if not (directory.name.startswith("iter_") or directory.name == RELEASE):
        return False
    return first_file(directory) is not None or any((directory / name).is_file() for name in (_FORMAT, _PARTS))


def check_files(directory: Path) -> None:
    """See whether it is in a format that is read, and all there.

    Raises:
        CheckpointError: it is not; names the format, or what is missing.
    """
    if first_file(directory) is not None:  # whoever converts them says what is missing
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


def args_of(directory: Path) -> dict[str, Any]:
    """Read Megatron-LM's flags; empty where the checkpoint does not have them.

    Raises:
        CheckpointError: they cannot be read.
    """
    path = first_file(directory) or directory / _COMMON
    return read_args(path) if path.exists() else {}  # megatron-core 0.19 writes no such file


def unbuilt(directory: Path) -> Iterator[str]:
    """Yield one line for each flag by which it is a model that is not built here, however its tensors are called."""
    args = args_of(directory)
    wrong = {name: args[name] for name, value in ONLY_BUILT.items() if args.get(name, value) not in (value, None)}
    for name, value in wrong.items():
        yield (
            f"checkpoint {str(directory)!r} was made with {name} {shorten(value)}, which is not built here; take a "
            "model without it"
        )
