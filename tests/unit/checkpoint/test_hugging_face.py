"""Reading parts, writing files, and the way from a checkpoint of ours to a Hugging Face directory."""

from __future__ import annotations

import itertools
import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from megatron_rl.checkpoint.hf import save
from megatron_rl.checkpoint.hf.load import fill, import_hf, load_hf
from megatron_rl.checkpoint.hf.save import export_checkpoint, write_hf
from megatron_rl.checkpoint.layout import commit, find_checkpoint, temporary_directory
from megatron_rl.checkpoint.run_state import ModelFacts, RunState, architecture_of, read_run_state, write_run_state
from megatron_rl.checkpoint.tensors import load, save_tensors
from megatron_rl.errors import CheckpointError
from megatron_rl.families import ExpertShare, HfModel, ModelLayout, Parameter, Stages, read_model, weight_problems
from megatron_rl.families.architecture import ALL_EXPERTS
from megatron_rl.families.family import FAMILIES, SMALL
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.tensor_files import TensorEntry, TensorReader, TensorWriter, plan_files, stored_tensors
from tests.support.foreign import MODEL_FILE, Topology
from tests.support.hugging_face import hf_run, loaded_policy, write_back, write_model

SETTINGS = {
    "qwen2": SMALL,
    "qwen3": {**SMALL, "tie_word_embeddings": True, "head_dim": 16},
    "glm4_moe": FAMILIES.get("glm4_moe").examples[1],
    "deepseek_v3": FAMILIES.get("deepseek_v3").examples[1],
    "qwen3_next": FAMILIES.get("qwen3_next").examples[0],
    "qwen3_moe": {**SMALL, "num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
}


@pytest.fixture
def model(tmp_path: Path) -> HfModel:
    write_model(tmp_path / "model", "qwen2", SMALL)
    return read_model(tmp_path / "model")


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in sorted(directory.glob("*.safetensors")) for n, t in load_file(file).items()}


def _same(left: Path, right: Path) -> bool:
    one, other = _tensors(left), _tensors(right)
    assert one.keys() == other.keys()
    return all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


def test_a_reader_counts_the_bytes_of_what_it_hands_out(model: HfModel) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    whole = _tensors(model.directory)[name]
    with TensorReader(model.directory) as reader:
        part = reader.read(name, (4, 9), (16, 48))
        assert torch.equal(part, whole[4:9, 16:48])
        assert reader.bytes_read == 5 * 32 * 4
        assert torch.equal(reader.read(name, (0, 2)), whole[:2])
        assert reader.bytes_read == 5 * 32 * 4 + 2 * 48 * 4


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ({"a": 4, "b": 4, "c": 4}, 12, [["a", "b", "c"]]),
        ({"a": 4, "b": 4, "c": 4}, 11, [["a", "b"], ["c"]]),
        ({"a": 20, "b": 4, "c": 20}, 8, [["a"], ["b"], ["c"]]),
    ],
)
def test_files_hold_no_more_than_their_limit_unless_one_tensor_does(sizes, limit, expected) -> None:
    files = plan_files({name: TensorEntry("I8", (size,)) for name, size in sizes.items()}, limit)
    assert [list(entries) for entries in files.values()] == expected
    names = [f"model-{n:05d}-of-{len(expected):05d}.safetensors" for n in range(1, len(expected) + 1)]
    assert list(files) == (["model.safetensors"] if len(expected) == 1 else names)


def test_layers_that_predict_further_tokens_go_unchanged_to_the_export(one_rank: ParallelGroups, tmp_path) -> None:
    """The router's bias stays fp32 in an export in bf16, too."""
    source, target = tmp_path / "source", tmp_path / "target"
    write_model(source, "glm4_moe", {**FAMILIES.get("glm4_moe").examples[0], "num_nextn_predict_layers": 1})
    extra = {"model.layers.3.eh_proj.weight": torch.randn(8, 4, dtype=torch.bfloat16)}
    save_file(load_file(source / "model.safetensors") | extra, source / "model.safetensors", {"format": "pt"})
    model = read_model(source)
    assert weight_problems(model) == []
    policy, _ = loaded_policy(hf_run(source), model.architecture.vocab_size)
    write_back(policy, model, target)
    assert _same(source, target)
    write_back(policy, model, tmp_path / "bf16", torch.bfloat16)
    written = _tensors(tmp_path / "bf16")
    assert {name for name, tensor in written.items() if tensor.dtype == torch.float32} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)
    }
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").model.layers[2].mlp.gate.weight.shape == (8, 32)
    (line,) = weight_problems(replace(model, config={**model.config, "num_nextn_predict_layers": 0}))
    assert "tensor model.layers.3.eh_proj.weight is none that a Glm4MoeForCausalLM of this config.json has" in line


def test_a_writer_wants_every_number_of_every_tensor_and_no_more(tmp_path: Path) -> None:
    files = {"model.safetensors": {"a": TensorEntry("F32", (2,)), "b": TensorEntry("F32", (3,))}}
    with pytest.raises(ValueError, match="more than the 'b'"):
        with TensorWriter(tmp_path, files) as writer:
            writer.append("b", torch.zeros(4))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="'b' was not written"):
        with TensorWriter(tmp_path, files) as writer:
            writer.append("a", torch.zeros(2))
            writer.append("b", torch.zeros(2))


@pytest.mark.parametrize(("stored", "asked"), [("bfloat16", None), ("float32", torch.bfloat16)])
def test_numbers_are_written_as_config_json_says_or_as_asked(
    one_rank: ParallelGroups, tmp_path: Path, stored: str, asked: torch.dtype | None
) -> None:
    """A bf16 model in an fp32 run loses nothing; asked for another format, config.json says so."""
    write_model(tmp_path / "model", "qwen2", SMALL, dtype=stored)
    model = read_model(tmp_path / "model")
    policy, _ = loaded_policy(hf_run(model.directory), SMALL["vocab_size"])
    write_back(policy, model, tmp_path / "back", asked)
    before, after = _tensors(model.directory), _tensors(tmp_path / "back")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all(torch.equal(before[name].to(torch.bfloat16), after[name]) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_bf16_run_loads_bf16(one_rank: ParallelGroups, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen2", SMALL, dtype="bfloat16")
    policy, read = loaded_policy(hf_run(tmp_path / "model", bf16=True), SMALL["vocab_size"])
    write_back(policy, read_model(tmp_path / "model"), tmp_path / "back")
    assert _same(tmp_path / "model", tmp_path / "back")
    assert read == sum(tensor.num_bytes for tensor in stored_tensors(tmp_path / "model").values())


def test_what_is_not_weights_is_copied_and_nothing_is_overwritten(
    one_rank: ParallelGroups, model: HfModel, tmp_path: Path
) -> None:
    (model.directory / "tokenizer.json").write_text("{}")
    (model.directory / "notes.txt").write_text("private")
    (model.directory / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    policy, _ = loaded_policy(hf_run(model.directory), SMALL["vocab_size"])
    write_back(policy, model, tmp_path / "back")
    names = sorted(path.name for path in (tmp_path / "back").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "back" / "generation_config.json").read_text() == '{"eos_token_id": [7, 5]}'
    with pytest.raises(CheckpointError, match="exists; choose another"):
        export_checkpoint(tmp_path / "nowhere", model, tmp_path / "back")


def test_a_failed_save_leaves_nothing_in_place(model: HfModel, tmp_path: Path) -> None:
    def fails(parameter: Parameter) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hf(model, tmp_path / "back", ModelLayout.of(model.architecture), fails)
    assert not (tmp_path / "back").exists()


def _checkpoint(groups: ParallelGroups, model: HfModel, root: Path) -> Path:
    config = hf_run(model.directory)
    policy, _ = loaded_policy(config, model.architecture.vocab_size)
    target = temporary_directory(root, 1)
    target.mkdir(parents=True)
    save_tensors(target, policy, None)
    state = RunState(step=1, model=ModelFacts(architecture_of(config.architecture())))
    write_run_state(target, state)
    return commit(root, 1)


@pytest.mark.parametrize("family", SETTINGS)
def test_a_checkpoint_of_ours_becomes_the_same_directory(
    one_rank: ParallelGroups, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model", family, SETTINGS[family])
    model = read_model(tmp_path / "model")
    _checkpoint(one_rank, model, tmp_path / "checkpoints")
    monkeypatch.setattr(save, "MAX_FILE_BYTES", 20_000)
    export_checkpoint(tmp_path / "checkpoints", model, tmp_path / "back")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert _same(tmp_path / "model", tmp_path / "back")


@pytest.mark.parametrize("family", SETTINGS)
def test_the_other_way_writes_what_a_run_would_have_saved(
    one_rank: ParallelGroups, tmp_path: Path, family: str
) -> None:
    write_model(tmp_path / "model", family, SETTINGS[family])
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    model = read_model(tmp_path / "model")
    saved = _checkpoint(one_rank, model, tmp_path / "saved")
    converted = import_hf(model, tmp_path / "converted", torch.float32, vocab_divisible_by=8)
    assert {7, 5} <= set(read_run_state(converted).model.end_token_ids)
    assert _described(saved) == _described(converted)
    assert read_run_state(saved).model.architecture == read_run_state(converted).model.architecture
    policy, _ = loaded_policy(hf_run(model.directory), model.architecture.vocab_size)
    loaded = {name: parameter.clone() for name, parameter in policy.gpt.named_parameters()}
    with torch.no_grad():
        for parameter in policy.gpt.parameters():
            parameter.zero_()
    load(find_checkpoint(tmp_path / "converted"), policy)
    assert [name for name, p in policy.gpt.named_parameters() if not torch.equal(p, loaded[name])] == []
    with pytest.raises(CheckpointError, match="exists; choose another"):
        import_hf(model, tmp_path / "converted", torch.float32, vocab_divisible_by=8)


def _described(directory: Path) -> dict[str, object]:
    """Names, sizes and number formats of all tensors, and the names of what is not a tensor."""
    described = FileSystemReader(directory).read_metadata().state_dict_metadata
    described = {name: entry for name, entry in described.items() if not name.startswith("common_state/")}  # 0.19
    return {
        name: (tuple(entry.size), entry.properties.dtype) if hasattr(entry, "size") else None
        for name, entry in described.items()
    }


def test_a_checkpoint_of_another_model_is_refused(one_rank: ParallelGroups, model: HfModel, tmp_path: Path) -> None:
    _checkpoint(one_rank, model, tmp_path / "checkpoints")
    shutil.copytree(model.directory, tmp_path / "other")
    for change, message in (
        ({"num_hidden_layers": 3, "layer_types": None}, "num_layers 2.*means 3"),
        ({"vocab_size": 100}, "64 rows.*too few for a vocabulary of 100"),
    ):
        (tmp_path / "other" / "config.json").write_text(json.dumps(model.config | change))
        with pytest.raises(CheckpointError, match=message):
            export_checkpoint(tmp_path / "checkpoints", read_model(tmp_path / "other"), tmp_path / "back")


def test_files_of_another_model_fill_no_model(one_rank: ParallelGroups, model: HfModel, tmp_path: Path) -> None:
    policy, _ = loaded_policy(hf_run(model.directory), model.architecture.vocab_size)
    deeper = replace(model, architecture=replace(model.architecture, num_layers=3))
    with pytest.raises(CheckpointError, match=r"of another model: only one of the two has decoder\.layers\.2\."):
        load_hf(deeper, policy, one_rank)


def test_memory_of_a_conversion_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """140 MB of weights in one file, there and back."""
    settings = {**SMALL, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 1024}
    write_model(tmp_path / "model", "qwen2", settings)
    model = read_model(tmp_path / "model")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    before = _peak_after_reset()
    import_hf(model, tmp_path / "checkpoints", torch.float32, vocab_divisible_by=8)
    there = _peak() - before
    before = _peak_after_reset()
    export_checkpoint(tmp_path / "checkpoints", model, tmp_path / "back")
    back = _peak() - before
    assert _same(tmp_path / "model", tmp_path / "back")
    assert size > 100e6
    # What is read is mapped, and counts until the file is closed, which the reader does now and then.
    assert there < 0.8 * size, f"{there / 1e6:.0f} MB for a file of {size / 1e6:.0f} MB"
    assert back < 0.5 * size, f"{back / 1e6:.0f} MB for a file of {size / 1e6:.0f} MB"


def _peak_after_reset() -> int:
    """Bytes resident now, from where the peak is counted anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of resident memory cannot be reset here")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.each_value
@pytest.mark.parametrize("family", SETTINGS)
@pytest.mark.parametrize(
    "stages", [Stages(), Stages(2), Stages(2, first=1), Stages(2, chunks=2)], ids=["one", "two", "uneven", "virtual"]
)
def test_files_of_tensor_parallel_ranks_and_stages_become_a_hugging_face_directory(
    tmp_path: Path, family: str, stages: Stages
) -> None:
    write_model(tmp_path / "model", family, SETTINGS[family] | {"num_hidden_layers": 4})
    model, padded = read_model(tmp_path / "model"), 128
    target = tmp_path / "run" / "iter_0000004"
    topology = Topology(2, stages.count)
    for rank, stage in itertools.product(range(2), range(stages.count)):
        chunks = _chunks_of_a_rank(model, rank, padded, stage, stages)
        folder = target / topology.name(rank, stage)
        folder.mkdir(parents=True)
        torch.save(chunks | {"args": Namespace(**topology.args)}, folder / MODEL_FILE)
    export_checkpoint(target, model, tmp_path / "out")
    assert _same(model.directory, tmp_path / "out")


@pytest.mark.parametrize(
    "topology",
    [Topology(1, 1, 2), Topology(2, 1, 2, 2), Topology(2, 1, 4, 1), Topology(2, 2, 2, 1), Topology(4, 2, 2, 1)],
    ids=str,
)
def test_files_of_ranks_that_share_experts_become_one_too(tmp_path: Path, topology: Topology) -> None:
    """Each file has all of a rank's dense parameters, and its own experts, counted from 0."""
    family, stages = "qwen3_moe", Stages(topology.stages)
    settings = SETTINGS[family] | {"num_hidden_layers": 4, "num_key_value_heads": 4}
    write_model(tmp_path / "model", family, settings)
    model, padded = read_model(tmp_path / "model"), 128
    target = tmp_path / "run" / "iter_0000004"
    for (rank, expert_rank, part), stage in itertools.product(topology.places, range(topology.stages)):
        share = ExpertShare(topology.experts, expert_rank, topology.cut)
        folder = target / topology.name(rank, stage, expert_rank)
        folder.mkdir(parents=True)
        chunks = _chunks_of_a_rank(model, rank, padded, stage, stages, topology.tensor, share, part)
        torch.save(chunks | {"args": Namespace(**topology.args)}, folder / MODEL_FILE)
    export_checkpoint(target, model, tmp_path / "out")
    assert _same(model.directory, tmp_path / "out")


def _chunks_of_a_rank(
    model: HfModel, rank: int, padded: int, stage: int, stages: Stages, tensor: int = 2,
    share: ExpertShare = ALL_EXPERTS, part: int = 0,
) -> dict[str, dict[str, torch.Tensor]]:  # fmt: skip
    """As Megatron's format torch has them: layers are counted from 0 in each chunk; a tied last stage has a copy."""
    layers = stages.layers_of(stage, model.architecture.num_layers)
    found: list[dict[str, torch.Tensor]] = [{} for _ in layers]
    with TensorReader(model.directory) as reader:
        for parameter in ModelLayout.of(model.architecture, tensor, padded, stage, stages, share).parameters:
            values, words = torch.empty(parameter.local_shape), parameter.name.split(".")
            of_shared = parameter.is_of_an_expert and share.ranks > 1
            fill(values, model.weights[parameter.name].pieces(parameter, part if of_shared else rank), reader)
            if of_shared:
                words[6] = str(int(words[6]) - share.of(model.architecture.num_experts).start)
            chunk = 0 if words[0] == "embedding" else len(layers) - 1
            if words[1] == "layers":
                chunk = next(index for index, chunk in enumerate(layers) if int(words[2]) in chunk)
                words[2] = str(int(words[2]) - layers[chunk].start)
            is_copy = words[0] == "embedding" and stage > 0
            found[-1 if is_copy else chunk]["output_layer.weight" if is_copy else ".".join(words)] = values
    return {"model": found[0]} if len(found) == 1 else {f"model{index}": chunk for index, chunk in enumerate(found)}
