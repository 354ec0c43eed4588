"""Bytes of a run by phase, from its flags alone: no model, no process group, no torch.

    flags ─► ModelLayout ─► memory (bytes by use; activations are an approximation) ─► report (the table)
"""

from megatron_rl.estimate.memory import Estimate, estimate, slot_bytes
from megatron_rl.estimate.report import quantization_problems, report_text, size_problems, vocabulary

__all__ = [
    "Estimate", "estimate", "quantization_problems", "report_text", "size_problems", "slot_bytes", "vocabulary"
]  # fmt: skip
