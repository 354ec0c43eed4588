"""Checkpoints of adapters, and PEFT's files out and in, held to `peft` and transformers themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.checkpoint.dist_files import DistFiles
from megatron_rl.checkpoint.hf.peft import export_merged, export_peft
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import run_state_of
from megatron_rl.cli.export import main as export
from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import CheckpointError
from megatron_rl.families import ModelLayout, peft, read_model
from megatron_rl.families.family import FAMILIES
from megatron_rl.families.lora import Lora, adapters_of
from megatron_rl.models.gpt import PolicyModel, build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, current_groups, seed_everything
from megatron_rl.run.preflight.starts import adapter_problems, checkpoint_problems
from megatron_rl.run.weights import Start, start_weights
from megatron_rl.tensor_files import write_json
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import update
from tests.support.hugging_face import FLAGS, batch_of, packed_logits, reference_logits, write_model
from tests.support.lora import move_b
from tests.support.tiny import FLAGS as TINY
from tests.support.tiny import VOCABULARY

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
LORA = ["--lora-rank", "4", "--lora-alpha", "8"]


def sizes_of(family: str) -> dict[str, Any]:
    return SIZES if family == "llama" else {**FAMILIES.get(family).examples[0], "vocab_size": VOCABULARY}


def config_of(model: Path, *more: str, at: Path, problems: list[str] | None = None) -> RLConfig:
    flags = FLAGS | {"load-hf": str(model), "save": str(at / "checkpoints"), "run-dir": str(at), "train-iters": "10"}
    argv = [text for name, value in flags.items() for text in (f"--{name}", value)]
    config, found = read_config([*argv, *more], 1)
    if problems is None:
        assert not found, found
    else:
        problems += [problem.text for problem in found]
    return config


def started(config: RLConfig, groups: ParallelGroups) -> tuple[PolicyModel, Start, CheckpointManager]:
    seed_everything(1)
    policy = build_model(config, current_platform(), VOCABULARY)
    checkpoints = CheckpointManager(Path(config.checkpoint.save), 0, groups)
    return policy, start_weights(config, policy, checkpoints, groups), checkpoints


def train(policy: PolicyModel, start: Start) -> None:
    scorer = Scorer(policy, current_groups(), 1.0)

    def loss(output: torch.Tensor, batch: Any) -> Any:
        return -scorer.select(output, batch).current_logprobs.sum(), torch.tensor(100), {}

    update(start.optimization, [batch_of(VOCABULARY, (20, 12))], scorer.forward, loss)


def save(config: RLConfig, policy: PolicyModel, start: Start, checkpoints: CheckpointManager, step: int) -> Path:
    state = run_state_of(config, policy, [0], step=step, has_optimizer=True, origin=start.origin)
    checkpoints.save(state, policy, start.optimization)
    return Path(config.checkpoint.save) / f"step_{step:07d}"


def trained_of(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters() if ".adapter." in name}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def run(
    request: pytest.FixtureRequest, tmp_path: Path, one_rank: ParallelGroups
) -> tuple[Path, Path, torch.nn.Module, PolicyModel]:
    """The base, a checkpoint of one update after random adapters, the base in transformers, and the policy."""
    family = getattr(request, "param", "llama")
    base = write_model(tmp_path / "base", family, sizes_of(family))
    # transformers stacks experts, and PEFT adapts these by any name of their matrices.
    targets = ["--lora-targets", "attention"] if family == "qwen3_next" else []
    config = config_of(tmp_path / "base", *LORA, *targets, at=tmp_path / "run")
    policy, start, checkpoints = started(config, one_rank)
    move_b(policy, one_rank, 0.1)
    start.optimization.reload_main_parameters()
    train(policy, start)
    return tmp_path / "base", save(config, policy, start, checkpoints, 1), base, policy


def test_peft_finds_the_rank_of_an_expert_by_its_name(tmp_path: Path) -> None:
    from peft.utils.other import get_pattern_key

    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    write_model(tmp_path, "qwen3_moe", sizes)
    lora = Lora(8, 16.0, ("all",))
    parts = adapters_of(ModelLayout.of(read_model(tmp_path).architecture), lora)
    ranks = peft.config_of(lora, parts, "base")["rank_pattern"]
    for module, rank in (("mlp.experts.3.gate_proj", 4), ("mlp.experts.12.down_proj", 4), ("self_attn.q_proj", 8)):
        name = f"model.layers.0.{module}"
        assert ranks.get(get_pattern_key(ranks, name), lora.rank) == rank


@pytest.mark.parametrize("more", [[], ["--bf16", "--use-distributed-optimizer"]], ids=["fp32", "bf16"])
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, one_rank: ParallelGroups, more: list[str]) -> None:
    write_model(tmp_path / "base", "llama", SIZES)
    config = config_of(tmp_path / "base", *LORA, *more, at=tmp_path / "run")
    policy, start, checkpoints = started(config, one_rank)
    train(policy, start)
    directory = save(config, policy, start, checkpoints, 1)
    tensors = DistFiles(directory).names
    assert tensors == set(trained_of(policy)), "no weight of the base"
    start.optimization.schedule.set_step(1)
    train(policy, start)
    again, resumed, _ = started(config_of(tmp_path / "base", *LORA, *more, "--resume", at=tmp_path / "run"), one_rank)
    assert resumed.saved is not None
    assert not [name for name in trained_of(again) if torch.equal(trained_of(again)[name], trained_of(policy)[name])]
    train(again, resumed)
    assert_same(trained_of(again), trained_of(policy))


def test_another_base_is_refused(run: Any, one_rank: ParallelGroups, tmp_path: Path) -> None:
    base, directory, model, _ = run
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(base)
    with pytest.raises(CheckpointError, match="were trained on other weights than"):
        started(config_of(base, *LORA, "--resume", at=tmp_path / "run"), one_rank)
    with pytest.raises(CheckpointError, match="were trained on other weights than"):
        export_merged(directory, read_model(base), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("run", ["llama", "qwen3_next", "qwen3_5_text"], indirect=True)
def test_peft_reads_the_export_and_we_read_it_back(run: Any, one_rank: ParallelGroups, tmp_path: Path) -> None:
    from peft import PeftModel

    base, directory, model, policy = run
    assert export(["--input-dir", str(directory), "--output-dir", str(tmp_path / "out"), "--format", "peft"]) == 0
    batch = batch_of(VOCABULARY, (30, 3, 17))
    own = packed_logits(policy, batch)
    plain = reference_logits(model, batch)
    theirs = reference_logits(PeftModel.from_pretrained(model, tmp_path / "out").eval(), batch)
    # The delta rule is less well conditioned than attention.
    torch.testing.assert_close(own, theirs, rtol=0, atol=1e-3 if policy.layout.state_layers else 1e-4)
    assert (plain - theirs).abs().max() > 0.1
    config = config_of(base, "--load-lora", str(tmp_path / "out"), at=tmp_path / "new")
    assert not adapter_problems(config)
    again, *_ = started(config, one_rank)
    assert (config.lora.lora_rank, config.lora.lora_alpha) == (4, 8.0)
    assert_same(trained_of(again), trained_of(policy))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ["q_proj", "v_proj", "up_proj", "o_proj"]),
        ("qwen3_next", ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"]),
        ("qwen3_5_text", ["in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj"]),
    ],
)
def test_what_peft_has_written_is_read(
    tmp_path: Path, one_rank: ParallelGroups, family: str, targets: list[str]
) -> None:
    """Of some matrices alone, with rsLoRA's alpha / sqrt(rank)."""
    from peft import LoraConfig, get_peft_model

    model = write_model(tmp_path / "base", family, sizes_of(family))
    theirs = get_peft_model(model, LoraConfig(
        r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, use_rslora=True,
    ))  # fmt: skip
    theirs.save_pretrained(tmp_path / "adapter")
    policy, *_ = started(config_of(tmp_path / "base", "--load-lora", str(tmp_path / "adapter"), at=tmp_path), one_rank)
    batch = batch_of(VOCABULARY, (30, 3, 17))
    torch.testing.assert_close(packed_logits(policy, batch), reference_logits(theirs.eval(), batch), rtol=0, atol=2e-4)


def test_a_merged_export_is_the_policy(run: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base, directory, _, policy = run
    assert export(["--input-dir", str(directory), "--output-dir", str(tmp_path / "out")]) == 2, "which of the two?"
    assert export(["--input-dir", str(directory), "--output-dir", str(tmp_path / "out"), "--merge"]) == 0
    batch, merged = batch_of(VOCABULARY, (30, 3, 17)), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(reference_logits(merged.eval(), batch), packed_logits(policy, batch), rtol=0, atol=1e-4)


def test_problems_are_one_line(run: Any, tmp_path: Path) -> None:
    base, directory, _, _ = run
    at = tmp_path / "run"

    def of_resume(*flags: str) -> list[str]:
        return [problem.text for problem in checkpoint_problems(config_of(base, *flags, "--resume", at=at), None)]

    assert "has adapters (--lora-rank 4) and no other weights" in " ".join(of_resume())
    wider = of_resume("--lora-rank", "8", "--lora-alpha", "8")
    assert "has adapters of --lora-rank 4, this run has 8" in " ".join(wider)
    assert not of_resume(*LORA)
    for flags, expected in {
        ("--lora-rank", "33"): "is above the width of o_proj of layers.0.self_attention.linear_proj; use at most 32",
        ("--lora-rank", "2", "--lora-targets", "z_proj"): "z_proj: this model has no 'z_proj'; it has all, attention",
        ("--lora-rank", "2", "--lora-targets", "experts"): "this model has no 'experts'",
        ("--lora-alpha", "2"): "--lora-alpha 2 has no effect without adapters; add --lora-rank, or leave it out",
        ("--load-lora", str(base)): "adapter_config.json is no adapter_config.json of PEFT",
    }.items():
        problems: list[str] = []
        config_of(base, *flags, at=tmp_path / "other", problems=problems)
        assert len(problems) == 1, problems
        assert expected in problems[0]


def test_an_adapter_of_another_model_is_named(run: Any, tmp_path: Path) -> None:
    base, directory, _, _ = run
    export_peft(directory, read_model(base), tmp_path / "out")
    write_model(tmp_path / "wide", "llama", SIZES | {"intermediate_size": 64})
    write_model(tmp_path / "low", "llama", SIZES | {"num_hidden_layers": 1})
    texts = {}
    for name in ("wide", "low"):
        config = config_of(tmp_path / name, "--load-lora", str(tmp_path / "out"), at=tmp_path)
        (problem,) = adapter_problems(config)
        texts[name] = problem.text
    assert "has shape" in texts["wide"]
    assert "is of no matrix of this model" in texts["low"]


def test_adapters_fit_where_a_rank_has_a_part_of_the_model(tmp_path: Path) -> None:
    """Files are of the whole model: of every stage and every expert."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    write_model(tmp_path / "base", "qwen3_moe", SIZES | sizes)
    model, lora = read_model(tmp_path / "base"), Lora(4, 8.0, ("all",))
    layout = ModelLayout.of(model.architecture)
    entries = [entry for _, entry in peft.adapter_entries(layout, lora, model.weights)]
    tensors = {name: torch.zeros(shape) for entry in entries for name, shape in entry.tensors.items()}
    (tmp_path / "out").mkdir()
    save_file(tensors, tmp_path / "out" / peft.WEIGHTS_FILE)
    write_json(tmp_path / "out" / peft.CONFIG_FILE, peft.config_of(lora, adapters_of(layout, lora), "base"))
    given = {"load-hf": str(tmp_path / "base"), "load-lora": str(tmp_path / "out"), "run-dir": str(tmp_path)}
    for way in ("pipeline", "expert"):
        flags = FLAGS | given | {f"{way}-model-parallel-size": "2"}
        config, problems = read_config([text for name, value in flags.items() for text in (f"--{name}", value)], 2)
        assert not [problem.text for problem in (*problems, *adapter_problems(config))], way


def test_every_stage_needs_an_adapter(tmp_path: Path) -> None:
    """Layer 0 is dense, layer 1 has experts."""
    experts = {"num-experts": 4, "moe-ffn-hidden-size": 24, "moe-layer-freq": "([0]*1+[1]*1)"}
    flags = TINY | experts | {"lora-rank": "4", "lora-targets": "experts", "run-dir": str(tmp_path)}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value) if word is not None]
    assert not read_config(words, 1)[1]
    (problem,) = read_config([*words, "--pipeline-model-parallel-size", "2"], 2)[1]
    assert "pipeline stage 0 has no such linear and would train nothing" in problem.text


def test_two_sources_of_adapters_are_one_line(run: Any, tmp_path: Path) -> None:
    base, directory, _, _ = run
    export_peft(directory, read_model(base), tmp_path / "out")
    flags = FLAGS | {"load": str(directory), "load-lora": str(tmp_path / "out"), "run-dir": str(tmp_path / "next")}
    words = [text for name, value in flags.items() for text in (f"--{name}", value)]
    for begins in ("--eval-only", "--finetune"):
        (problem,) = read_config([*words, begins], 1)[1]
        assert "has adapters of its own; name its base, or leave the flag out" in problem.text, begins


def test_a_run_begins_with_the_adapters_of_another(run: Any, one_rank: ParallelGroups, tmp_path: Path) -> None:
    """`--pretrained-checkpoint` of a LoRA run gives the flags, the base and the adapters."""
    base, directory, _, policy = run
    flags = FLAGS | {"pretrained-checkpoint": str(directory), "run-dir": str(tmp_path / "next")}
    config, problems = read_config([text for name, value in flags.items() for text in (f"--{name}", value)], 1)
    assert not problems, problems
    assert config.lora.lora_rank == 4
    again, start, _ = started(replace(config), one_rank)
    assert_same(trained_of(again), trained_of(policy))
    assert start.origin.kind == "hugging_face"
