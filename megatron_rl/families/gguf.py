"""GGUF files as model directories: dequantised once by transformers, kept in a cache."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from megatron_rl.atomic import cache_home, once, whole_directory
from megatron_rl.errors import CheckpointError, ConfigError, one_line, shorten
from megatron_rl.user_files import open_file

Precision = Literal["float32", "bfloat16"]
SUFFIX = ".gguf"
_VERSION = 2
"""Version of the import; version 1 omitted position scaling."""
_INSTALL = "pip install 'megatron-rl[gguf]' (the packages gguf and accelerate)"

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_KEYS = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
_LOCAL_BASE = 10000.0
"""Rotary base of Gemma's windows, and Llama's default."""
_GEMMA_27B = 62
"""Layer count of the only size for which llama.cpp scales attention scores by another width than the head's."""
_TAKE = "take the model's safetensors"

logger = logging.getLogger(__name__)


def cached_import(path: Path) -> Path:
    """Return a directory with the model of the GGUF file ``path``: weights in float32, config.json and tokenizer.

    It is in ``$HF_HOME/megatron-rl``, named by the file's name and SHA-256 sum. The first process writes it, others
    wait.

    Raises:
        ConfigError: see `import_gguf`, or the cache is not writable.
    """
    digest = _opened(path, lambda file: hashlib.file_digest(file, "sha256").hexdigest())
    target = cache_home() / f"{path.stem}-{digest[:16]}-{_VERSION}"

    def write() -> None:
        logger.warning("%s: dequantising it into %s, once", path, target)  # before the log has a level
        import_gguf(path, target)

    try:
        once(target, write)
    except OSError as error:
        raise ConfigError([
            f"{path} cannot be imported into {target} ({error.strerror}); set HF_HOME to a directory with room for its "
            "weights in float32"
        ]) from error
    return target


def import_gguf(path: Path, target: Path, precision: Precision = "float32") -> None:
    """Write the model of a GGUF file as a Hugging Face directory, which appears when complete.

    Raises:
        ConfigError: not a GGUF file, truncated, or with an unknown key or tensor; a package is missing.
        CheckpointError: ``target`` exists, or is not writable.
    """
    from megatron_rl.families.family import read_model  # which imports this module for names of files

    if (magic := _opened(path, lambda file: file.read(4))) != b"GGUF":
        raise ConfigError([f"{path} is no GGUF file: it begins with {magic!r} where that has b'GGUF'; fetch it anew"])
    try:
        import accelerate  # noqa: F401  (transformers asks for it in the midst of reading)
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError([f"{path}: to read a GGUF file, {_INSTALL}"]) from error
    with _transformers_reads(path), whole_directory(target, path) as directory:
        import transformers

        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        reader = _reader(path)
        config = transformers.AutoConfig.for_model(**_settings_of(path, reader))
        config.save_pretrained(directory)
        try:
            read_model(directory)  # refuses what is not known here before the weights are read
        except ConfigError as error:
            named = (line.replace(str(directory / "config.json"), str(path)) for line in error.lines)
            raise ConfigError(named) from error
        _check_tensors(path, reader, config)
        del reader  # a Python object for each token of the vocabulary
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=precision)
        model.hf_quantizer = None  # the weights that are written are not quantised
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(directory)
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


def _reader(path: Path) -> Any:
    import gguf

    class Reader(gguf.GGUFReader):
        """Raises at the end of the file; the parent class would read on, for example a list of 2^60 numbers."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) < count:
                raise ValueError("it is cut short")
            return found

    return Reader(path)


def _settings_of(path: Path, reader: Any) -> dict[str, Any]:
    """Return ``config.json`` of the GGUF model that ``reader`` has open.

    llama.cpp uses every key of the architecture; transformers ignores unknown ones.

    Raises:
        ConfigError: the architecture or a key is not supported.
    """
    name, tensors = reader.fields["general.architecture"].contents(), {each.name: each for each in reader.tensors}
    if name not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise ConfigError([f"{path}: architecture {shorten(name)} is not read from GGUF, only {known}; {_TAKE}"])
    values = {key: each.contents() for key, each in reader.fields.items() if key.startswith(f"{name}.")}

    def take(key: str, default: Any = None) -> Any:
        value = values.pop(f"{name}.{key}", default)
        if value is None or isinstance(value, list):
            what = f"{name}.{key} must be one value for all layers, got {shorten(value)}"
            raise ConfigError([f"{path}: {what}; {_TAKE}"])
        return value

    found = {theirs: take(key) for key, theirs in _KEYS.items()}
    layers, width = found["num_hidden_layers"], found["hidden_size"] // found["num_attention_heads"]
    if layers > len(tensors):
        raise ConfigError([f"{path} has {len(tensors)} tensors for {layers} layers; fetch it anew"])
    rows, head = tensors["token_embd.weight"].shape[-1], take("attention.key_length", width)
    rope = {"rope_type": "default", "rope_theta": take("rope.freq_base", _LOCAL_BASE if name == "llama" else None)}
    if values.get(f"{name}.rope.scaling.type") in ("none", "linear"):
        kind, factor = take("rope.scaling.type"), take("rope.scaling.factor", 1)
        rope |= {"rope_type": "linear", "factor": factor} if kind == "linear" and factor not in (0, 1) else {}
    if name == "llama" and rope["rope_type"] == "default" and "rope_freqs.weight" in tensors:
        rope |= _llama3(path, tensors["rope_freqs.weight"].data, rope["rope_theta"], head)
    if name == "gemma3":
        found |= {"sliding_window": take("attention.sliding_window")}
        found |= {"query_pre_attn_scalar": width if layers == _GEMMA_27B else head}
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_BASE}}
    built = {
        "attention.value_length": head, "rope.dimension_count": head, "vocab_size": rows, "attention.causal": True,
        "attention.sliding_window_pattern": 6, "rope.freq_base_swa": _LOCAL_BASE, "rope.scaling.finetuned": False,
    }  # fmt: skip
    for key, value in values.items():
        if value != built.get(key.removeprefix(f"{name}."), math.nan):  # which nothing equals
            raise ConfigError([f"{path}: {key} {shorten(value)} is not read from GGUF; {_TAKE}"])
    ids = {theirs: reader.fields.get(f"tokenizer.ggml.{key}") for key, theirs in _IDS.items()}
    return found | {key: each.contents() for key, each in ids.items() if each is not None} | {
        "model_type": _MODEL_TYPES[name], "vocab_size": int(rows), "head_dim": head, "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
    }  # fmt: skip


def _llama3(path: Path, divisors: Any, base: float, head: int) -> dict[str, Any]:
    """Return the frequency scaling of ``divisors`` [head / 2], if it is that of Llama 3.1 to 3.3."""
    import numpy as np

    from megatron_rl.families.rotation import LLAMA3  # which imports the reader of config.json, and that this module

    factor, (low, high, length) = float(divisors.max()), LLAMA3.values()
    turns = length / (2 * math.pi) * base ** (-np.arange(0, head, 2) / head)
    smooth = ((turns - low) / (high - low)).clip(0, 1)
    wanted = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != wanted.shape or not np.allclose(divisors, wanted, rtol=1e-4):
        raise ConfigError([f"{path}: rope_freqs.weight is not the scaling of Llama 3.1; {_TAKE}"])
    return {} if factor == 1 else {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _check_tensors(path: Path, reader: Any, config: Any) -> None:
    """Raise for a tensor that transformers would ignore, such as a bias, or initialise randomly."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = get_gguf_hf_weights_map(model, TensorProcessor()).keys()
    there = {tensor.name for tensor in reader.tensors}
    if config.model_type == "llama" and config.rope_parameters["rope_type"] != "linear":
        there.discard("rope_freqs.weight")  # it is in config.json
    for name in sorted((wanted ^ there) - {"output.weight"}):  # without it the head is tied
        what = "is missing" if name in wanted else "is not read from GGUF"
        raise ConfigError([f"{path}: tensor {name} {what}; take the model's safetensors"])


def _opened(path: Path, read: Callable[[Any], Any]) -> Any:
    try:
        with open_file(path) as file:
            return read(file)
    except (ValueError, OSError) as error:
        raise ConfigError([f"{path}: {error}"]) from error


@contextlib.contextmanager
def _transformers_reads(path: Path) -> Iterator[None]:
    """Name the file in transformers' errors, inside the context."""
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
