"""Environments whose tasks are the rows of a published data set.

::

    rows         reads a source, a local file or a data set of the Hugging Face hub, and checks every row
    environment  problems without repetitions, and the base class: a subclass says what a row means

Nothing here imports ``datasets`` or ``pyarrow`` before rows are read: they take seconds.
"""

from megatron_rl.environments.data.environment import (
    DatasetEnvironment,
    Overlong,
    Problem,
    chosen,
    dapo_prompt,
    dapo_statement,
    held_out,
    letters_and_digits,
)
from megatron_rl.environments.data.rows import Row, RowError, Source, read_rows

__all__ = [
    "DatasetEnvironment",
    "Overlong",
    "Problem",
    "Row",
    "RowError",
    "Source",
    "chosen",
    "dapo_prompt",
    "dapo_statement",
    "held_out",
    "letters_and_digits",
    "read_rows",
]
