#!/usr/bin/env python
"""A Hugging Face checkpoint in bf16 -> one in FP8 or INT8 that other engines load. See docs/export.md.

bf16_cast_fp8.py --input-bf16-hf-path DIR --output-fp8-hf-path DIR --force-pow-2-scale True
"""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_rl.checkpoint.hf.quantize import FORMATS, ConversionReport, TargetFormat, convert, target_format
from megatron_rl.errors import ConfigError, MegatronRLError, one_line
from megatron_rl.families import model_directory

logger = logging.getLogger("megatron_rl.bf16_cast_fp8")

_YES, _NO = ("true", "1"), ("false", "0")
CONFIGURATION_ERROR = 2
RUN_ERROR = 1
INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """0: written; 1: could not; 2: a wrong flag; 130: interrupted. Only 0 leaves an output."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a kill cleans up like Ctrl-C
    flags = _parser().parse_args(argv)
    try:
        powers_of_two = flags.force_pow_2_scale
        target = target_format(flags.format, None if powers_of_two is None else _truth(powers_of_two))
        source = model_directory(flags.input_bf16_hf_path, weights=True)
        report = convert(source, flags.output_fp8_hf_path, target, overwrite=flags.overwrite)
        for line in summary(report, target, flags.output_fp8_hf_path):
            logger.info("%s", line)
    except ConfigError as error:
        logger.error("%s", one_line(str(error)))
        return CONFIGURATION_ERROR
    except MegatronRLError as error:
        logger.error("%s", one_line(str(error)))
        return RUN_ERROR
    except OSError as error:  # what no boundary expected: a disk that goes away while reading
        logger.error("%s: %s", error.filename or "input or output", error.strerror or error)
        return RUN_ERROR
    except KeyboardInterrupt:
        logger.error("interrupted; nothing was written")
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bf16_cast_fp8.py", description="bf16 checkpoint -> FP8 or INT8 checkpoint")
    parser.add_argument("--input-bf16-hf-path", type=Path, required=True, help="directory with *.safetensors")
    parser.add_argument("--output-fp8-hf-path", type=Path, required=True, help="written whole or not at all")
    parser.add_argument(
        "--force-pow-2-scale",
        metavar="True|False",
        help="scales of fp8_block rounded up to powers of 2, its default; other formats have none",
    )
    parser.add_argument("--format", default="fp8_block", metavar="{" + ",".join(FORMATS) + "}")
    parser.add_argument("--overwrite", action="store_true", help="replace a model in the output directory")
    return parser


def _truth(text: str) -> bool:
    if text.lower() not in _YES + _NO:
        raise ConfigError([f"--force-pow-2-scale is '{text}', which is neither True nor False; use one of them"])
    return text.lower() in _YES


def summary(report: ConversionReport, target: TargetFormat, output: Path) -> list[str]:
    """What was converted and kept, sizes, and what to know before loading it."""
    lines = [f"{target.name}{', scales powers of 2' if target.powers_of_two else ''}: {output}"]
    lines += _listed("converted", report.converted) + _listed("kept", report.kept)
    before, after = report.bytes_before, report.bytes_after
    lines.append(f"{before / 2**30:.3f} GiB -> {after / 2**30:.3f} GiB ({after / before:.0%})")
    if report.left_out:
        lines.append(f"not copied: {', '.join(report.left_out)}")
    if target.number and any(".experts." in name for name in report.converted):
        lines.append("note: transformers misreads experts in compressed-tensors formats (see docs/export.md)")
    if report.ragged:
        lines.append(
            f"note: {len(report.ragged)} weights such as {report.ragged[0]} have a dimension that 128 does not divide; "
            "transformers misreads such tiles when it dequantises (see docs/export.md)"
        )
    return lines


def _listed(what: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    return [f"{what}: {len(names)} tensors", *(f"  {count:5d} x {kind}" for kind, count in by_kind(names).items())]


def by_kind(names: Iterable[str]) -> dict[str, int]:
    """Names with ``*`` for layer and expert numbers, each with how many there are, in the order of the names."""
    counts: dict[str, int] = {}
    for name in names:
        kind = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        counts[kind] = counts.get(kind, 0) + 1
    return counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
