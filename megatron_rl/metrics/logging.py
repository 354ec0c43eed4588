"""Log lines of the ``megatron_rl.*`` loggers, and quiet from everybody else's."""

from __future__ import annotations

import logging
import sys
import warnings

from megatron_rl.errors import cut

ROOT = "megatron_rl"
LONGEST_MESSAGE = 20_000
"""Characters: the table of a large model's layers, and not the value of megabytes that an error may quote."""

NOISY_LOGGERS = (
    "asyncio", "datasets", "filelock", "fsspec", "httpcore", "httpx", "httpx2", "huggingface_hub", "matplotlib",
    "megatron.core", "torch", "transformers", "urllib3", "waitress", "wandb", "werkzeug",
)  # fmt: skip
NOISY_WARNINGS = (
    # Said once per megatron-core module that has a faster variant with the extra.
    r".*Transformer Engine and Apex are not installed.*",
    r".*Apex is not installed.*",
    r".*[Tt]ransformer[ _][Ee]ngine is not installed.*",
    # megatron-core's optimizer asks every parameter for its gradient, views of the flat buffer included.
    r".*\.grad attribute of a Tensor that is not a leaf.*",
)


class _RankFormatter(logging.Formatter):
    """``10:00:00 INFO loop: text``; ranks other than 0 say which they are."""

    def __init__(self, rank: int) -> None:
        who = "" if rank == 0 else f"[rank {rank}] "
        super().__init__(f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        shortened = logging.makeLogRecord(record.__dict__)
        shortened.name = record.name.removeprefix(f"{ROOT}.")
        shortened.msg, shortened.args = cut(record.getMessage(), LONGEST_MESSAGE), None
        return super().format(shortened)


def configure_logging(rank: int) -> None:
    """Send the library's log lines to standard error: rank 0 from INFO, others from WARNING. May be called again."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RankFormatter(rank))
    library = logging.getLogger(ROOT)
    library.handlers[:] = [handler]
    library.propagate = False
    library.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING if rank == 0 else logging.ERROR)
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)  # an error is raised too
    for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(?!megatron_rl)")
    for message in NOISY_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
