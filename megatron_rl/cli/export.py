"""megatron-rl export: writes what a checkpoint of a run holds as a Hugging Face directory.

    megatron-rl export --input-dir RUN_DIR/checkpoints --output-dir NEW_HF_DIR

The output appears under its name only once it is complete. One process, no GPU, and no model is built.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.user_files import named_path


def main(argv: Sequence[str]) -> int:
    """0, or 2 with one line for every problem."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = _parser().parse_args(argv)
    try:
        _convert(options.input_dir, options.output_dir, options.origin_hf_dir, options.dtype)
    except ConfigError as error:
        sys.stderr.writelines(f"{line}\n" for line in error.lines)
        return 2
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
        help="of the weights; without it that of the origin's config.json, with experts in MXFP4 if it has them so",
    )  # fmt: skip
    return parser


def _convert(source: Path, target: Path, origin: Path | None, dtype: str | None) -> None:
    import torch

    from megatron_rl.checkpoint.hf.save import export_checkpoint, origin_of
    from megatron_rl.families import read_model

    model = origin_of(source, "--origin-hf-dir") if origin is None else read_model(origin)
    export_checkpoint(source, model, target, None if dtype is None else getattr(torch, dtype))
