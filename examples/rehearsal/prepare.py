#!/usr/bin/env python
"""What examples/launch.sh needs for a rehearsal; overrides.yaml beside this says what is changed and why.

    prepare.py model FAMILY DIRECTORY       a tiny random model of that family, in the Hugging Face format
    prepare.py flags WORK FLAGS...          WORK/flags: the recipe's flags, changed; WORK/environments.yaml
    prepare.py table STAGES RUNS            what ran, and how long it took
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from megatron_rl.config.arguments import (  # noqa: E402
    Reading,
    read_config,
    read_flags,
)
from megatron_rl.config.rl_config import RLConfig  # noqa: E402
from megatron_rl.environments.loader import find_environment  # noqa: E402
from megatron_rl.errors import ConfigError  # noqa: E402
from megatron_rl.families import read_model  # noqa: E402
from megatron_rl.families.family import FAMILIES  # noqa: E402
from megatron_rl.metrics.console import format_table  # noqa: E402

OVERRIDES = yaml.safe_load((Path(__file__).parent / "overrides.yaml").read_text())
RANKS = 2
FILES = ("path", "test_path")
"""Options of environments."""
SHAPE = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "max_position_embeddings": 2048, "initializer_range": 0.02, "head_dim": 64,
    "moe_intermediate_size": 128,
}  # fmt: skip
"""Each of two ranks has linear layers in multiples of 128, which block-wise FP8 wants."""
END, OTHER_END, THOUGHT = "<|im_end|>", "<|endoftext|>", "</think>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONSTANT = 1.6
"""First number of every embedding. The others have a deviation of 0.1, so after the last norm it is about 14."""


def write_model(family: str, directory: Path) -> None:
    """Random weights, but that words of answers and the end are likely: something is right, and something ends."""
    import torch
    from safetensors.torch import save_file

    likely, size = _write_tokenizer(directory)
    found = FAMILIES.get(family)
    example = found.examples[0]
    shape = {**example, **{key: value for key, value in SHAPE.items() if key in example}, "vocab_size": size}
    _write_json(directory / "config.json", {"architectures": [found.class_name], "model_type": family, **shape})
    draw = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, wanted in read_model(directory).weights.tensors.items():
        is_norm = name.endswith("norm.weight")
        tensors[name] = torch.ones(wanted) if is_norm else torch.randn(wanted, generator=draw) * 0.02
    embedding = tensors["model.embed_tokens.weight"]
    embedding.mul_(5)[:, 0] = CONSTANT
    head = tensors.get("lm_head.weight", embedding)
    for token, logit in likely.items():
        head[token, 0] += logit / 14
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, directory / "model.safetensors")


def _write_tokenizer(directory: Path) -> tuple[dict[int, float], int]:
    """One token a byte, Qwen's marks, and one for each answer of the samples, in every form that graders read.

    Returns what to add to the logits of which tokens, and how many tokens there are.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    answers = sorted({gold for name in OVERRIDES["environments"] for gold in _answers(name)})
    answers = [f"{THOUGHT}\n#### {gold}\nAnswer: {gold}\n\\boxed{{{gold}}}\n" for gold in answers]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([OTHER_END, "<|im_start|>", END])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", THOUGHT, *answers)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    _write_json(directory / "tokenizer_config.json", settings)
    ends = [tokenizer.token_to_id(text) for text in (END, OTHER_END)]
    _write_json(directory / "generation_config.json", {"eos_token_id": ends})
    likely = {tokenizer.token_to_id(text): 4.0 for text in answers}
    return likely | dict.fromkeys(ends, 4.0), tokenizer.get_vocab_size()


def _rows(name: str, option: str) -> list[dict[str, Any]]:
    """Those that the option gets: a problem to learn from may not be one to be tested on."""
    start = 0 if option == "path" else OVERRIDES["rows"]
    with (ROOT / OVERRIDES["environments"][name][option]).open() as file:
        return [json.loads(line) for line in islice(file, start, start + OVERRIDES["rows"])]


def _answers(name: str) -> Iterator[str]:
    for row in (row for option in FILES if option in OVERRIDES["environments"][name] for row in _rows(name, option)):
        gold = row["reward_model"]["ground_truth"] if "reward_model" in row else row["answer"]
        gold = gold.rpartition("####")[2].strip().replace(",", "")
        yield re.sub(r"^0+(?=\d)", "", gold)  # AIME's are padded


def changed_flags(work: Path, flags: Sequence[str]) -> list[str]:
    """The recipe's flags, then what a rehearsal changes, then what stood behind --rehearse."""
    place = flags.index("--rehearse")
    own, further = [*flags[:place]], [*flags[place + 1 :]]
    reading = read_flags(own)
    changes = dict(OVERRIDES["always"])
    given = OVERRIDES["where_given"]
    changes |= {flag: given[flag] for flag in given if flag.replace("-", "_") in reading.values}
    changes |= _batches(reading.config, OVERRIDES["samples"]) | _shape(reading) | _layout(reading.config)
    environments = _write_environments(work, Path(reading.values["langrl_env_config"]), changes)
    changes["langrl-env-config"] = environments
    words = [word for flag, value in changes.items() for word in (f"--{flag}", str(value))]
    found = read_config([*own, *words, *further], RANKS)[1]
    if found:
        raise ConfigError(found)
    return [*own, *words, *further]


def _batches(config: RLConfig, samples: int) -> dict[str, int]:
    """Groups no larger than the recipe's, as many updates a step, and as many prompts in flight for one that counts."""
    algorithm, batch = config.algorithm, config.training.global_batch_size
    group = min(algorithm.grpo_group_size, 8)
    updates = config.samples_per_step // batch if batch else 1
    least = RANKS * updates // math.gcd(RANKS * updates, group)  # prompts, so that each rank has as much of each update
    prompts = max(samples // group // least, 1) * least
    found = {"grpo-group-size": group, "grpo-prompts-per-step": prompts}
    if batch:
        found["global-batch-size"] = prompts * group // updates
    if algorithm.rl_oversampling:
        found["rl-oversampling"] = algorithm.rl_oversampling * prompts // algorithm.grpo_prompts_per_step
    return found


def _shape(reading: Reading) -> dict[str, Any]:
    """Flags of the recipe that say the model's shape say the tiny one's."""
    directory = reading.values.get("load_hf") or reading.values.get("hf_config")
    settings = read_model(directory).architecture.settings() if directory else {}
    return {
        name.replace("_", "-"): value
        for name, value in settings.items()
        if name in reading.values and not isinstance(value, bool) and name != "init_method_std"
    }


def _layout(config: RLConfig) -> dict[str, int]:
    """Two ranks share what most of the recipe's ranks share; without such a thing they are replicas."""
    sizes = {
        name: getattr(config.parallel, f"{name.replace('-', '_')}_size")
        for name in ("expert-model-parallel", "tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
    }
    largest = max(sizes, key=lambda name: sizes[name])
    return {f"{name}-size": RANKS if name == largest and size > 1 else 1 for name, size in sizes.items()}


def _write_environments(work: Path, path: Path, changes: dict[str, Any]) -> Path:
    """The recipe's list over the first rows of the samples that environments ship."""
    (work / "data").mkdir(parents=True, exist_ok=True)
    entries = yaml.safe_load(path.read_text())
    for entry in entries:
        name = find_environment(entry.get("environment", entry.get("agent_type"))).name
        options = entry.setdefault("args", entry.pop("agent_args", None) or {})
        options.update(OVERRIDES["environments"].get(name, {}))
        for option in FILES:
            if option in OVERRIDES["environments"].get(name, {}):
                options[option] = str(work / "data" / f"{name}.{option}.jsonl")
                Path(options[option]).write_text("".join(json.dumps(row) + "\n" for row in _rows(name, option)))
        if options.get("overlong_buffer"):
            options.update(overlong_buffer=8, max_response_tokens=changes["rl-max-new-tokens"])
        for option in ("config", "test_split", "exclude_path"):  # of data sets on the hub, and files that are not here
            options.pop(option, None)
        entry.update({key: OVERRIDES["rows"] for key in ("eval_prompts", "eval_samples") if key in entry})
    target = work / "environments.yaml"
    target.write_text(yaml.safe_dump(entries, sort_keys=False))
    return target


def print_table(stages: Path, runs: Path) -> None:
    """A line for each of ``stages``: script, name, seconds. A script's run is ``runs/SCRIPT``."""
    rows, seconds = [], 0
    for line in stages.read_text().splitlines():
        script, name, took = line.split("\t")
        told = {"train": _told_of_training, "evaluate": _told_of_evaluation}.get(name, lambda _: "done")
        rows.append((script, name, took, told(runs / script)))
        seconds += int(took)
    rows.append(("all", "", str(seconds), f"{RANKS} CPU ranks, a random model"))
    sys.stdout.write(format_table(("script", "stage", "seconds", "result"), rows) + "\n")


def _told_of_training(run_dir: Path) -> str:
    steps = [row for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if row["step"]]
    algorithm = yaml.safe_load((run_dir / "config.yaml").read_text())["algorithm"]
    answers, right = 0, 0.0
    for row in steps:
        groups = row.get("training/groups_answered", algorithm["grpo_prompts_per_step"])
        share = next(value for name, value in row.items() if re.fullmatch(r"grade/.*/correct", name))
        answers += round(groups) * algorithm["grpo_group_size"]
        right += groups * algorithm["grpo_group_size"] * share
    return f"{len(steps)} steps, {answers} answers graded, {round(right)} of them right"


def _told_of_evaluation(run_dir: Path) -> str:
    found = json.loads((run_dir.with_suffix(".rehearsal") / "evaluation" / "evaluation.json").read_text())
    return ", ".join(f"{name} pass@1 {values['pass@1']:.3f}" for name, values in found.items())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(argv: Sequence[str]) -> int:
    """0, or 2 with one line for every problem."""
    task, *rest = argv
    try:
        if task == "model":
            write_model(rest[0], Path(rest[1]))
        elif task == "flags":
            words = changed_flags(Path(rest[0]), rest[1:])
            Path(rest[0], "flags").write_text("".join(f"{word}\0" for word in words))
        else:
            print_table(Path(rest[0]), Path(rest[1]))
    except ConfigError as error:
        sys.stderr.writelines(f"{line}\n" for line in error.lines)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
