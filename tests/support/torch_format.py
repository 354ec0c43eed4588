"""Checkpoints of ours with one file a rank, as an earlier version wrote them; see docs/checkpoints.md."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

from megatron_rl.checkpoint.foreign import MODEL_FILE, Topology
from megatron_rl.checkpoint.layout import write_manifest
from megatron_rl.checkpoint.run_state import RunState, write_run_state
from megatron_rl.checkpoint.state import save_rank_state
from megatron_rl.checkpoint.tensors import named_chunks, piece_name, sharded_state
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.optimizer import Optimization


def write_ours(root: Path, state: RunState, optimization: Optimization, groups: ParallelGroups) -> Path:
    """Of the model and its optimizer; collective."""
    directory, policy = root / f"iter_{state.step:07d}", optimization.policy
    content = {"checkpoint_version": 3.0, "iteration": state.step}
    content |= {name: gpt.state_dict() for name, gpt in named_chunks(policy).items()}
    whole = sharded_state(policy, optimization, loading=False)["optimizer"]
    pieces, content["optimizer"] = save_preprocess(whole, validate_access_integrity=False)
    content["optimizer_state"] = {piece_name(piece): piece.data for piece in nested_values(pieces)}
    topology = Topology(
        groups.tensor_group.size(), groups.pipeline_group.size(), groups.experts.parallel.size(),
        groups.experts.tensor.size() if groups.experts.parallel.size() > 1 else 1,
    )  # fmt: skip
    folder = directory / topology.name(groups.tensor_group.rank(), groups.stage, groups.experts.parallel.rank())
    if dist.get_global_rank(groups.lockstep_group, 0) == 0:  # such ranks hold all parameters between them
        folder.mkdir(parents=True)
        torch.save(content, folder / MODEL_FILE)
        save_rank_state(directory, groups.rank, state.components)
    dist.barrier()
    if groups.is_main:
        write_run_state(directory, state)
        (root / "latest_checkpointed_iteration.txt").write_text(f"{state.step}\n")
        write_manifest(directory, state.step)
    dist.barrier()
    return directory
