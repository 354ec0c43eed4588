"""Structure of models (`ModelLayout`), and model families of the Hugging Face format: ``config.json`` and weight names.

Plain Python, no torch: the configuration fills in flags with it, and checkpoints find the tensors of a rank. Each file
in ``known/`` is one family; `read_model` finds it by ``config.json``.
"""

from megatron_rl.families.architecture import PLAIN, Architecture, ExpertShare, LayerKind, Stages
from megatron_rl.families.family import Family, HfModel, read_model, weight_problems
from megatron_rl.families.hf_config import model_directory
from megatron_rl.families.layout import Head, Layer, ModelLayout
from megatron_rl.families.parts import LayerCache, Linear, Parameter, StateCache
from megatron_rl.families.weights import Entry, Piece, WeightMap

__all__ = [
    "PLAIN", "Architecture", "Entry", "ExpertShare", "Family", "Head", "HfModel", "Layer", "LayerCache", "LayerKind",
    "Linear", "ModelLayout", "Parameter", "Piece", "Stages", "StateCache", "WeightMap", "model_directory", "read_model",
    "weight_problems",
]  # fmt: skip
