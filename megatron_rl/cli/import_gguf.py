"""megatron-rl import: writes the model of a GGUF file as a Hugging Face directory.

    megatron-rl import FILE.gguf NEW_HF_DIR [--dtype bfloat16]

Its quantised weights are dequantised. `--load-hf FILE.gguf` does the same on its own, into a cache, in float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from megatron_rl.errors import MegatronRLError
from megatron_rl.families.gguf import Precision, import_gguf
from megatron_rl.user_files import named_path


def main(argv: Sequence[str]) -> int:
    """Return 0, or 2 with one line that says what is wrong."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl import", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=named_path, help="a GGUF file")
    parser.add_argument("output", type=named_path, help="must not exist")
    parser.add_argument("--dtype", choices=get_args(Precision), default="float32", help="of the weights (float32)")
    options = parser.parse_args(argv)
    try:
        import_gguf(options.file, options.output, options.dtype)
    except (MegatronRLError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0
