"""Bytes of a run by phase, from its flags alone: no model, no process group, no torch.

    flags ─► parameters (of one rank) ─► memory (bytes by use) ─► report (the table)
                                             ▲
                                 activations (an approximation)
"""

from megatron_rl.estimate.limits import size_problems
from megatron_rl.estimate.memory import Estimate, estimate, slot_bytes
from megatron_rl.estimate.report import estimate_problems, report_text, vocabulary

__all__ = ["Estimate", "estimate", "estimate_problems", "report_text", "size_problems", "slot_bytes", "vocabulary"]
