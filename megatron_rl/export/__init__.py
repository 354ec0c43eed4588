"""Hugging Face checkpoints in, quantised Hugging Face checkpoints out; a tensor's rows at a time, no model built.

    source.py        what a directory holds: shards, tensors, small files
    selection.py     which tensors are converted
    target.py        the formats: names of tensors, `quantization_config`
    tensor_file.py   safetensors read and written by rows
    pieces.py        a tensor from file to file, quantised on the way
    directory.py     an output directory that is whole or absent
    conversion.py    one after the other
    command.py       the command line

Codes and scales come from the recipes of the rollouts (`megatron_rl.quantization`).
"""

from megatron_rl.export.conversion import ConversionReport, convert
from megatron_rl.export.target import target_format, target_formats

__all__ = ["ConversionReport", "convert", "target_format", "target_formats"]
