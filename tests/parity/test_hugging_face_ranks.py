"""A Hugging Face checkpoint on several ranks: transformers' logits, and no rank reads what it does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.checkpoint.hf import save
from megatron_rl.checkpoint.tensors import fingerprints
from megatron_rl.families import ModelLayout, read_model
from megatron_rl.families.family import FAMILIES
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.tensor_files import INDEX_FILE, stored_tensors
from tests.support.hugging_face import EXAMPLES, batch_of, hf_run, loaded_policy, reference_logits, write_model
from tests.support.ranks import run_ranks

UNCUT = [example for example in EXAMPLES if example[0] == "gpt_oss"]
"""Of experts with biases, which no ranks cut."""
CUT = [example for example in EXAMPLES if example not in UNCUT]
EVEN = [(name, index) for name, index in EXAMPLES if FAMILIES.get(name).examples[index]["num_hidden_layers"] % 2 == 0]
"""Of layers that two stages can share equally."""
LAST_OF_EACH = {(name, max(index for other, index in EXAMPLES if other == name)) for name, _ in EXAMPLES}
"""Of a family; most of these are tied. The others go over stages and over ranks of experts with ``--long`` alone."""
CLOSE = 2e-4
"""Of logits up to 10, in fp32: with heads of 32 and YaRN 1.0e-4 was seen."""
TOPOLOGIES = {"tensor": (2, 2), "tensor+data": (4, 2)}


class Loaded:
    """Examples written in several files each, loaded on the ranks of one topology, which make a checkpoint of each."""

    def __init__(
        self,
        folder: Path,
        world_size: int,
        tensor_size: int,
        examples: Sequence[tuple[str, int]] = EXAMPLES,
        **sizes: int,
    ) -> None:
        self.folder, self.tensor_size = folder, tensor_size
        self.directories = [folder / f"{name}-{index}" for name, index in examples]
        self.references = [
            write_model(directory, name, FAMILIES.get(name).examples[index], max_shard_size="20KB")
            for directory, (name, index) in zip(self.directories, examples, strict=True)
        ]
        self.reports = run_ranks(
            "tests.parity.hugging_face_case:on_ranks",
            world_size,
            tensor_size=tensor_size,
            directories=[str(directory) for directory in self.directories],
            folder=str(folder),
            **sizes,
        )


@pytest.fixture(scope="module", params=["tensor", pytest.param("tensor+data", marks=pytest.mark.long)])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tmp_path_factory.mktemp("ranks"), *TOPOLOGIES[request.param], CUT)


each_example = pytest.mark.parametrize("index", range(len(CUT)), ids=[f"{name}-{n}" for name, n in CUT])


@each_example
class TestEachExample:
    def test_logits_are_those_of_transformers(self, loaded: Loaded, index: int) -> None:
        vocabulary = read_model(loaded.directories[index]).architecture.vocab_size
        expected = reference_logits(loaded.references[index], batch_of(vocabulary))
        ranks = len(loaded.reports)
        parts = [torch.load(loaded.folder / f"logits.{index}.{rank}.pt", weights_only=True) for rank in range(ranks)]
        for first in range(0, ranks, loaded.tensor_size):
            logits = torch.cat(parts[first : first + loaded.tensor_size], dim=-1)
            assert (logits[:, :vocabulary] - expected).abs().max() <= CLOSE

    def test_a_rank_reads_only_what_its_parameters_hold(self, loaded: Loaded, index: int) -> None:
        model = read_model(loaded.directories[index])
        stored = sum(tensor.num_bytes for tensor in stored_tensors(model.directory).values())
        parameters = ModelLayout.of(model.architecture).parameters
        replicated = 4 * sum(parameter.size for parameter in parameters if parameter.cut is None)
        reads = [report[index]["read"] for report in loaded.reports]
        rows = loaded.reports[0][index]["rows"] - model.architecture.vocab_size
        padding = 4 * rows * model.architecture.hidden_size
        tables = 1 + model.architecture.untie_embeddings_and_output_weights
        for report, read in zip((r[index] for r in loaded.reports), reads, strict=True):
            held = 4 * sum(report["parameters"].values())
            assert held - tables * padding <= read <= held
        # Each tensor-parallel group reads every number once, and what all its ranks hold once a rank.
        for first in range(0, len(reads), loaded.tensor_size):
            together = sum(reads[first : first + loaded.tensor_size])
            assert together == stored + (loaded.tensor_size - 1) * replicated

    def test_every_rank_knows_the_weights_by_the_fingerprint_of_one(self, loaded: Loaded, index: int, one_rank) -> None:
        directory = loaded.directories[index]
        config = hf_run(directory)
        policy, _ = loaded_policy(config, read_model(directory).architecture.vocab_size)
        assert [report[index]["fingerprints"] for report in loaded.reports] == (
            [fingerprints(policy, one_rank)] * len(loaded.reports)
        )

    def test_out_of_a_checkpoint_of_these_ranks_it_has_the_same_bits(
        self, loaded: Loaded, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(save, "MAX_FILE_BYTES", 20_000)
        model = read_model(loaded.directories[index])
        save.export_checkpoint(loaded.folder / f"checkpoints.{index}", model, tmp_path / "back")
        _assert_same(model.directory, tmp_path / "back")


@pytest.mark.parametrize("tensor_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_two_pipeline_stages(
    tensor_size: int, tmp_path: Path, one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch, with_long: bool
) -> None:
    """Each stage reads its own layers; what comes out of their checkpoint is the model that was read."""
    even = [example for example in EVEN if with_long or example in LAST_OF_EACH or example == ("qwen2_moe", 0)]
    examples = [example for example in even if tensor_size == 1 or example in CUT]
    loaded = Loaded(tmp_path, 2 * tensor_size, tensor_size, examples, stages=2)
    _assert_whole(loaded, range(tensor_size, 2 * tensor_size), one_rank, monkeypatch)


@pytest.mark.parametrize("tensor_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_experts_on_two_ranks(
    tensor_size: int, tmp_path: Path, one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch, with_long: bool
) -> None:
    """Each rank reads its own experts, and its part of them."""
    experts = [(name, index) for name, index in CUT if "num_experts" in FAMILIES.get(name).examples[index]]
    examples = [example for example in experts if with_long or example in LAST_OF_EACH]
    loaded = Loaded(tmp_path, 2 * tensor_size, tensor_size, examples, expert_size=2)
    for ranks in (range(tensor_size), range(tensor_size, 2 * tensor_size)):
        _assert_whole(loaded, ranks, one_rank, monkeypatch)
    for first, second in zip(*(report[0]["parameters"] for report in loaded.reports[::tensor_size]), strict=True):
        assert (first == second) == (".experts." not in first)


def test_experts_that_no_rank_cuts(
    tmp_path: Path, one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads and their sinks are cut, and each rank has some of the experts."""
    loaded = Loaded(tmp_path, 2, 2, UNCUT, expert_size=2, cut=1)
    _assert_whole(loaded, range(2), one_rank, monkeypatch)


def _assert_whole(
    loaded: Loaded, last: Sequence[int], one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks ``last``, which have the logits, give those of transformers, and the model is the one on disk."""
    tmp_path = loaded.folder
    monkeypatch.setattr(save, "MAX_FILE_BYTES", 20_000)
    for index, directory in enumerate(loaded.directories):
        model = read_model(directory)
        vocabulary = model.architecture.vocab_size
        expected = reference_logits(loaded.references[index], batch_of(vocabulary))
        parts = [tmp_path / f"logits.{index}.{rank}.pt" for rank in last]
        logits = torch.cat([torch.load(path, weights_only=True) for path in parts], dim=-1)
        assert (logits[:, :vocabulary] - expected).abs().max() <= CLOSE
        policy, _ = loaded_policy(hf_run(directory), vocabulary)
        reports = [report[index] for report in loaded.reports]
        assert [report["fingerprints"] for report in reports] == [fingerprints(policy, one_rank)] * len(reports)
        for report in reports:
            assert report["read"] <= 4 * sum(report["parameters"].values())
        back = tmp_path / f"back.{index}.{last[0]}"
        save.export_checkpoint(tmp_path / f"checkpoints.{index}", model, back)
        _assert_same(directory, back)


def _assert_same(before: Path, after: Path) -> None:
    found = {}
    for directory in (before, after):
        files = sorted(directory.glob("*.safetensors"))
        assert len(files) > 2 and (directory / INDEX_FILE).exists()
        found[directory] = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert set(stored_tensors(directory)) == set(found[directory])
    assert found[before].keys() == found[after].keys()
    assert [n for n in found[before] if not torch.equal(found[before][n], found[after][n])] == []
