"""Environments whose tasks are the rows of a published data set.

::

    files        rows of a local json, jsonl, csv or parquet file     hub       rows of a Hugging Face data set
    rows         reads a source and checks every row up front         problems  repeated and contradictory rows
    environment  the base class: a subclass says what a row means     template  the prompt of DAPO and AIME

Nothing here imports ``datasets`` or ``pyarrow`` before rows are read: they take seconds.
"""

from megatron_rl.environments.data.environment import DatasetEnvironment, Overlong, chosen
from megatron_rl.environments.data.problems import Problem, held_out, letters_and_digits
from megatron_rl.environments.data.rows import Row, RowError, Source, read_rows
from megatron_rl.environments.data.template import dapo_prompt, dapo_statement

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
