"""Author's modules in a process of their own: imported, set up, listed and tried out, whatever they do there.

::

    asking     what the caller wants to know: which environments there are, whether a list or one of them is sound
    child      the process; starts from nothing, says what it is about to do, answers once
    stages     what is done there
    supervise  the caller's side: the deadline, the output, and a line for a child that gave no answer
"""

from megatron_rl.environments.loading.asking import Found, Inspection, Surveyed, found, inspected, surveyed

__all__ = ["Found", "Inspection", "Surveyed", "found", "inspected", "surveyed"]
