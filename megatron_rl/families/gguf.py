"""A GGUF file where a Hugging Face directory is wanted: dequantised once by transformers, kept in a cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from megatron_rl.atomic import TEMPORARY, remove, whole_directory
from megatron_rl.errors import CheckpointError, ConfigError, one_line
from megatron_rl.user_files import open_file

Precision = Literal["float32", "bfloat16"]
SUFFIX = ".gguf"
_VERSION = 2
"""Of what an import writes: version 1 left out how positions are scaled."""
_INSTALL = "pip install 'megatron-rl[gguf]' (the packages gguf and accelerate)"

logger = logging.getLogger(__name__)


def cached_import(path: Path) -> Path:
    """Return a directory with the model of the GGUF file ``path``: weights in float32, config.json and tokenizer.

    It lies in ``$HF_HOME/megatron-rl`` under the file's name and SHA-256 sum, so a changed file is another directory.
    The first process that asks for it writes it, and others wait meanwhile.

    Raises:
        ConfigError: as `import_gguf`, or the cache cannot be written.
    """
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "megatron-rl"
    target = home / f"{path.stem}-{_checksum(path)[:16]}-{_VERSION}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(target.name + ".lock")):
            if not target.is_dir():
                remove(target.with_name(target.name + TEMPORARY))  # of an import that was killed
                logger.warning("%s: dequantising it into %s, once", path, target)  # before the log has a level
                import_gguf(path, target)
    except OSError as error:
        raise ConfigError([
            f"{path} cannot be imported into {target} ({error.strerror}); set HF_HOME to a directory with room for its "
            "weights in float32"
        ]) from error
    return target


def import_gguf(path: Path, target: Path, precision: Precision = "float32") -> None:
    """Write the model of a GGUF file as a Hugging Face directory, which appears under its name once it is complete.

    Raises:
        ConfigError: the file is no GGUF, is cut, or has a key or tensor that is not read; a package is missing.
        CheckpointError: ``target`` is there, or cannot be written.
    """
    from megatron_rl.families.family import read_model  # which imports this module for names of files
    from megatron_rl.families.gguf_config import settings_of

    _check_magic(path)
    try:
        import accelerate  # noqa: F401  (transformers asks for it in the midst of reading)
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError([f"{path}: to read a GGUF file, {_INSTALL}"]) from error
    with _transformers_reads(path), whole_directory(target, path) as directory:
        import transformers

        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        reader = _reader(path)
        config = transformers.AutoConfig.for_model(**settings_of(path, reader))
        config.save_pretrained(directory)
        try:
            read_model(directory)  # refuses what is not known here before the weights are read
        except ConfigError as error:
            named = (line.replace(str(directory / "config.json"), str(path)) for line in error.lines)
            raise ConfigError(named) from error
        _check_tensors(path, reader, config)
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=precision)
        model.hf_quantizer = None  # the weights that are written are not quantised
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(directory)
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


def _reader(path: Path) -> Any:
    import gguf

    class Reader(gguf.GGUFReader):
        """Ends where the file does: the parent would read a list of 2^60 numbers on behind it."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) < count:
                raise ValueError("it is cut short")
            return found

    return Reader(path)


def _check_tensors(path: Path, reader: Any, config: Any) -> None:
    """Raise for a tensor that transformers would pass over, such as a bias, or draw at random."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = get_gguf_hf_weights_map(model, TensorProcessor()).keys()
    there = {tensor.name for tensor in reader.tensors}
    if config.model_type == "llama" and config.rope_parameters["rope_type"] != "linear":
        there.discard("rope_freqs.weight")  # it is in config.json
    if lost := wanted - there - {"output.weight"}:
        raise ConfigError([f"{path} lacks the tensor {min(lost)}, which its keys promise; fetch it anew"])
    if unread := there - wanted:
        raise ConfigError([f"{path}: tensor {min(unread)} is not read from GGUF; take the model's safetensors"])


def _checksum(path: Path) -> str:
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (ValueError, OSError) as error:
        raise ConfigError([f"{path}: {error}"]) from error


def _check_magic(path: Path) -> None:
    try:
        with open_file(path) as file:
            magic = file.read(4)
    except (ValueError, OSError) as error:
        raise ConfigError([f"{path}: {error}"]) from error
    if magic != b"GGUF":
        raise ConfigError([f"{path} is no GGUF file: it begins with {magic!r} where that has b'GGUF'; fetch it anew"])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _transformers_reads(path: Path) -> Iterator[None]:
    """Run the block, and name the file in what transformers raises."""
    try:
        yield
    except (ConfigError, CheckpointError):
        raise
    except Exception as error:  # whatever transformers and gguf raise for a file that somebody else wrote
        if isinstance(error, OSError) and error.errno is not None:  # of the disk: transformers' own have no number
            raise
        reason = one_line(str(error), 200) or type(error).__name__
        raise ConfigError([
            f"{path} cannot be read as a model ({reason}); take a whole GGUF file of a known family"
        ]) from error
