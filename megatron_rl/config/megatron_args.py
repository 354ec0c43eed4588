"""The model's flags in a checkpoint of Megatron-LM, read without torch; nothing that a file names is imported."""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.config.flags import Flag
from megatron_rl.errors import CheckpointError, one_line
from megatron_rl.families.architecture import Architecture
from megatron_rl.user_files import open_file

_FILES = ("common.pt", "mp_rank_*/model_optim_rng.pt")
_MOST_BYTES = 2**26
"""Of the pickle in a file, which has the tensors beside it."""
_ONLY_WITH = {"num_query_groups": "group_query_attention", "rope_scaling_factor": "use_rope_scaling"}
"""Flags that mean nothing without another; those of experts neither without ``num_experts``."""


class Emptied:
    """Stands for any object but a ``Namespace``."""

    def __init__(self, *values: object) -> None:
        """Keep nothing of what it is made of, or would hold."""

    __setstate__ = append = extend = __setitem__ = __init__


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        return Namespace if (module, name) == ("argparse", "Namespace") else Emptied

    def persistent_load(self, _: object) -> None:
        """Leave tensors out."""


def model_flags(path: str, flags: tuple[Flag, ...]) -> dict[str, Any]:
    """Return the values of those of ``flags`` that describe the model; empty where no file with ``args`` can be read.

    Those that were not set are None. Latent attention is not read: `checkpoint.foreign` refuses its flags.
    """
    args: dict[str, Any] = {}
    for file in _files(Path(path)):
        with contextlib.suppress(CheckpointError):  # whoever loads it says what is wrong
            args = args or read_args(file)
    known = {flag.name: flag for flag in flags if flag.name in Architecture.__dataclass_fields__}
    found = {name: args[name] for name in known if name in args and _fits(known[name], args[name])}
    if isinstance(pattern := args.get("moe_layer_freq"), int | list):
        found["moe_layer_freq"] = str(pattern)
    wanted = {name: _ONLY_WITH.get(name, "num_experts" if name.startswith("moe_") else name) for name in found}
    found = {name: value for name, value in found.items() if wanted[name] == name or args.get(wanted[name])}
    if "num_query_groups" in found:
        found["group_query_attention"] = True
    if args.get("tokenizer_type") == "HuggingFaceTokenizer" and isinstance(args.get("tokenizer_model"), str):
        found["tokenizer_model"] = args["tokenizer_model"]
    return found


def _fits(flag: Flag, value: Any) -> bool:
    if value is None:
        return flag.default is None
    is_one = isinstance(value, (flag.kind, int)) and isinstance(value, bool) == (flag.kind is bool)
    return is_one and flag.refusal(value) is None


def _files(root: Path) -> Iterator[Path]:
    for directory in (root, root / "release", *sorted(root.glob("iter_*"), reverse=True)):
        for pattern in _FILES:
            yield from sorted(directory.glob(pattern))[:1]


def read_args(path: Path) -> dict[str, Any]:
    """Return the ``args`` in a file of ``torch.save``, objects emptied; nothing where there are none.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with open_file(path) as opened, zipfile.ZipFile(opened) as file:
            entry = next(each for each in file.infolist() if each.filename.endswith("/data.pkl"))
            if entry.file_size > _MOST_BYTES:
                raise ValueError("what it names takes more than 64 MiB")
            content = _Reader(file.open(entry)).load()
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read ({one_line(str(error), 200)})") from error
    args = content.get("args") if isinstance(content, dict) else None
    return vars(args) if isinstance(args, Namespace) else {}
