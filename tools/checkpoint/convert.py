#!/usr/bin/env python
"""Converts checkpoints between the Hugging Face format and ours, with the options of Megatron's converter.

    python tools/checkpoint/convert.py --bf16 --model-type GPT --loader llama_mistral --checkpoint-type hf \\
        --model-size qwen2.5 --load-dir HF_DIR --tokenizer-model HF_DIR --saver core --save-dir OUT \\
        --target-tensor-parallel-size 8
    python tools/checkpoint/convert.py --model-type GPT --loader core --load-dir RUN_DIR/checkpoints \\
        --saver hf --save-dir NEW_HF_DIR
    python tools/checkpoint/convert.py --loader core --load-dir MEGATRON_DIR --saver core --save-dir OUT

The last one is for Megatron-LM's format torch, a file a rank, of which it makes torch_dist. A run does that on its own,
into a cache.

A checkpoint of ours holds whole tensors: any parallel layout can load it, so target sizes change only the padding
of the vocabulary. Training does not need a conversion: ``train_rl.py --load-hf HF_DIR``.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.families import HfModel, read_model, weight_problems

_LOADERS = {"llama_mistral": "hf", "hf": "hf", "core": "core", "mcore": "core"}
_SAVERS = {"core": "core", "mcore": "core", "hf": "hf"}


def main(argv: Sequence[str]) -> int:
    """0, or 2 with one line for every problem."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = _parser().parse_args(argv)
    try:
        _convert(options)
    except (MegatronRLError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-type", choices=["GPT"], default="GPT")
    parser.add_argument("--loader", choices=sorted(_LOADERS), required=True, help="what --load-dir holds")
    parser.add_argument("--saver", choices=sorted(_SAVERS), required=True, help="what --save-dir will hold")
    parser.add_argument("--load-dir", type=Path, required=True)
    parser.add_argument("--save-dir", type=Path, required=True)
    parser.add_argument("--checkpoint-type", choices=["hf"], default="hf", help="with --loader llama_mistral")
    parser.add_argument("--model-size", help="checked against config.json: qwen2.5, qwen3, llama3, with or without -7B")
    parser.add_argument("--tokenizer-model", help="a run of the new checkpoint is then held to its vocabulary")
    parser.add_argument("--hf-config", type=Path, help="with --saver hf: has config.json, if the origin has not")
    parser.add_argument("--target-tensor-parallel-size", type=_positive, default=1)
    parser.add_argument("--target-pipeline-parallel-size", type=_positive, default=1, help="changes nothing")
    parser.add_argument("--make-vocab-size-divisible-by", type=_positive, default=128)
    parser.add_argument("--bf16", action="store_true", help="numbers of the new checkpoint; fp32 without it")
    for ignored in ("--loader-transformer-impl", "--saver-transformer-impl"):
        parser.add_argument(ignored, help="changes nothing: weights are the same")
    return parser


def _convert(options: argparse.Namespace) -> None:
    source, target = _LOADERS[options.loader], _SAVERS[options.saver]
    if source == target:
        _convert_rank_files(options)
        return
    if target == "core":
        _import(options, _model(options.load_dir, options.model_size, with_weights=True))
        return
    import torch

    from megatron_rl.checkpoint.hf.save import export_checkpoint, origin_of

    directory = options.hf_config or origin_of(options.load_dir, "--hf-config").directory
    model = _model(directory, options.model_size, with_weights=False)
    export_checkpoint(options.load_dir, model, options.save_dir, torch.bfloat16 if options.bf16 else None)


def _convert_rank_files(options: argparse.Namespace) -> None:
    """From Megatron-LM's format torch, a file a rank; all else of ours and theirs is in one format already."""
    from megatron_rl.checkpoint.layout import find_checkpoint
    from megatron_rl.checkpoint.torch_format import convert, first_file

    is_core = _LOADERS[options.loader] == "core"
    directory = find_checkpoint(options.load_dir) if is_core else options.load_dir
    if not is_core or first_file(directory) is None:
        raise ConfigError([
            f"--loader {options.loader} --saver {options.saver}: both are one format, which any parallel layout loads "
            "as it is; nothing to convert"
        ])
    convert(directory, options.save_dir / directory.name)
    sys.stdout.write(f"wrote {options.save_dir / directory.name}\n")


def _import(options: argparse.Namespace, model: HfModel) -> None:
    import torch

    from megatron_rl.checkpoint.hf.load import import_hf
    from megatron_rl.tokenizer import load_tokenizer

    tokens = load_tokenizer(options.tokenizer_model).vocab_size if options.tokenizer_model else 0
    if tokens > model.architecture.vocab_size:
        raise ConfigError([
            f"--tokenizer-model {options.tokenizer_model} has {tokens} tokens, the model only "
            f"{model.architecture.vocab_size}; use the model's own tokenizer"
        ])
    multiple = options.make_vocab_size_divisible_by * options.target_tensor_parallel_size
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    import_hf(model, options.save_dir, dtype, multiple, tokens, options.tokenizer_model)


def _model(directory: Path, model_size: str | None, with_weights: bool) -> HfModel:
    model = read_model(directory, with_weights)
    problems = weight_problems(model) if with_weights else []
    if model_size is not None:
        wanted = model_size.lower().partition("-")[0].partition(".")[0]
        name = {"llama3": "llama"}.get(wanted, wanted)
        if not model.family.name.startswith(name):
            problems.append(
                f"--model-size {model_size} contradicts {directory / 'config.json'}, which is {model.family.title}; "
                "leave it out, or take another directory"
            )
    if problems:
        raise ConfigError(problems)
    return model


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
