"""Megatron flags that belong to no section because nothing here reads them: accepted, with a note."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class CompatibilityConfig:
    """Flags of a Megatron command line that have no meaning here."""

    use_mcore_models: bool = flag(False, note="models are always built from megatron-core")
    """Megatron's former switch to core models."""
    num_workers: int = flag(2, note="prompts are read in the training process, graders have their own")
    """Megatron's data loader workers."""
    split: str | None = flag(None, note="each environment says which of its tasks are for training")
    """Megatron's split of a dataset."""
    dataloader_type: Literal["single", "cyclic", "external"] | None = flag(
        None, note="prompts are drawn without replacement and reshuffled every epoch"
    )
    """Megatron's order of a dataset."""
    data_cache_path: str | None = flag(None, note="there is no dataset index to cache")
    """Megatron's cache of dataset indices."""
    create_attention_mask_in_dataloader: bool = flag(
        True, off="--no-create-attention-mask-in-dataloader", note="packed sequences need no mask tensor"
    )
    """Megatron's attention mask as a tensor."""
    rl_use_sequence_packing: bool = flag(
        False, note="sequences are always packed, into bins of --rl-sequence-packing-bin-size"
    )
    """Megatron's switch for packing."""
    rl_sequence_packing_algo: Literal["fifo", "round-robin"] = flag(
        "fifo", note="bins are filled best-fit and balanced over data-parallel ranks"
    )
    """Megatron's order of packed bins."""
    exit_signal_handler: bool = flag(False, note="SIGTERM always saves and stops; see --exit-grace-seconds")
    """Megatron's switch for a clean stop on SIGTERM."""
