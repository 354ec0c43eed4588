"""Whether the files of a Hugging Face directory hold the model of its ``config.json``: headers alone are read."""

from __future__ import annotations

from megatron_rl.errors import CheckpointError
from megatron_rl.families.family import HfModel
from megatron_rl.tensor_files import stored_tensors

NUMBER_FORMATS = ("F32", "BF16", "F16")
"""That weights are read in."""
_PASSED_OVER = (".rotary_emb.inv_freq",)
"""Endings of tensors that older files have and every model computes itself."""


def weight_problems(model: HfModel) -> list[str]:
    """One line for each way in which the files do not hold the model of ``config.json``."""
    try:
        stored = stored_tensors(model.directory)
    except CheckpointError as error:
        return [str(error)]
    expected, where = model.weights.tensors, model.directory
    missing = [name for name in expected if name not in stored]
    surplus = [name for name in stored if name not in expected and not _may_be_there(name)]
    shapes = [name for name, shape in expected.items() if name in stored and stored[name].shape != shape]
    formats = [name for name in expected if name in stored and stored[name].dtype not in NUMBER_FORMATS]
    problems = []
    if missing:
        problems.append(
            f"{where}: tensor {missing[0]} is missing{_more(missing)}, which a {model.family.class_name} of this "
            "config.json has; take config.json and files of one model"
        )
    if surplus:
        problems.append(
            f"{where}: tensor {surplus[0]}{_more(surplus)} is none that a {model.family.class_name} of this "
            "config.json has, and would be ignored; take config.json and files of one model"
        )
    if shapes:
        name = shapes[0]
        problems.append(
            f"{where}: tensor {name} has shape {_by(stored[name].shape)}, config.json means {_by(expected[name])}"
            f"{_more(shapes)}; take config.json and files of one model"
        )
    if formats:
        name = formats[0]
        problems.append(
            f"{where}: tensor {name}{_more(formats)} is stored as {stored[name].dtype}; use a model in "
            f"{', '.join(NUMBER_FORMATS)}"
        )
    return problems


def _may_be_there(name: str) -> bool:
    # A tied head is sometimes written although it is the embedding; transformers passes over it too.
    return name == "lm_head.weight" or name.endswith(_PASSED_OVER)


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "()"
