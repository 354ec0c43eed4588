"""megatron-rl export: writes what a checkpoint of a run holds as a Hugging Face directory.

    megatron-rl export --input-dir RUN_DIR/checkpoints --output-dir NEW_HF_DIR
    megatron-rl export --input-dir RUN_DIR/checkpoints --output-dir NEW_DIR --format peft     of a LoRA run

The output appears under its name only once it is complete. One process, no GPU, and no model is built.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.user_files import named_path


def main(argv: Sequence[str]) -> int:
    """Return the exit code: 0, or 2 with one line for every problem."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = _parser().parse_args(argv)
    try:
        _convert(options)
    except (MegatronRLError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-rl export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input-dir", type=named_path, required=True, help="a run, its checkpoints, or one of them")
    parser.add_argument("--output-dir", type=named_path, required=True, help="must not exist")
    parser.add_argument(
        "--origin-hf-dir", type=named_path, help="has config.json and the tokenizer, if not the model's origin does"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="of the weights; without it each tensor's in the origin's files, with experts in MXFP4 if it has them so",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=("hf", "peft"), default="hf", help="hf: a whole model; peft: adapters of a LoRA run"
    )
    parser.add_argument(
        "--merge", action="store_true", help="of a LoRA run: a whole model, base and adapters added in fp32 and rounded"
    )
    return parser


def _convert(options: argparse.Namespace) -> None:
    import torch

    from megatron_rl.checkpoint.hf.peft import adapters_of_checkpoint, export_merged, export_peft
    from megatron_rl.checkpoint.hf.save import export_checkpoint, origin_of
    from megatron_rl.families import read_model

    source, target, origin = options.input_dir, options.output_dir, options.origin_hf_dir
    model = origin_of(source, "--origin-hf-dir") if origin is None else read_model(origin)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    if options.format == "peft" and (options.merge or dtype):
        raise ConfigError(["--format peft takes neither --merge nor --dtype: adapters stay as they are"])
    if options.format == "peft":
        export_peft(source, model, target)
    elif options.merge:
        export_merged(source, model, target, dtype)
    elif adapters_of_checkpoint(source, contents=False)[2] is not None:
        raise ConfigError([f"{source} is of a LoRA run: add --merge for a whole model, or --format peft"])
    else:
        export_checkpoint(source, model, target, dtype)
