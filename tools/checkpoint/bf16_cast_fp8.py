"""A Hugging Face checkpoint in bf16 -> one in FP8 or INT8 that other engines load. See docs/export.md.

bf16_cast_fp8.py --input-bf16-hf-path DIR --output-fp8-hf-path DIR --force-pow-2-scale True
"""

from __future__ import annotations

import sys

from megatron_rl.export.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
