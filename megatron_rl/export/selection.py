"""Which tensors of a Hugging Face checkpoint are quantised: one rule, by name and number of dimensions.

Converted are the matrices of the decoder's linear layers: below ``layers.N.self_attn`` or ``layers.N.mlp``
(``block_sparse_moe`` in Mixtral), named as `_LINEARS` says, with two dimensions. All else is kept: embeddings,
output head, norms, biases, routers (``mlp.gate``), a vision tower, experts fused into one tensor of three dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_LINEARS = (
    r"(q|k|v|o|qkv)_proj",  # attention; one matrix for all three in Phi-3
    r"(q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa",  # DeepSeek's latent attention
    r"(gate|up|down|gate_up)_proj",  # MLP, experts, shared experts
    r"experts\.\d+\.w[123]",  # Mixtral's experts
)
_CONVERTED = re.compile(
    r"(model\.|language_model\.|text_model\.)*layers\.\d+\.(self_attn|mlp|block_sparse_moe)\."
    rf"(.+\.)?({'|'.join(_LINEARS)})\.weight"
)
_EMBEDDING = re.compile(r"(^|\.)\w*(embed|wte|wpe)\w*(\.|$)")
_NORM = re.compile(r"(^|\.)\w*norm\w*\.weight$")
OUTPUT_HEAD = "lm_head"


def is_converted(name: str, shape: tuple[int, ...]) -> bool:
    """True for the weight [N, K] of a linear layer of the decoder."""
    return len(shape) == 2 and _CONVERTED.fullmatch(name) is not None


def modules_left_alone(kept: Iterable[tuple[str, tuple[int, ...]]]) -> list[str]:
    """The modules a loader has to leave in full precision, of the tensors that were kept.

    The output head always; a router and any other tensor of two or more dimensions by its module's name, or a loader
    that looks at layer types would take its weight for codes.
    """
    names = {
        name.rpartition(".")[0]
        for name, shape in kept
        if len(shape) >= 2 and not _EMBEDDING.search(name) and not _NORM.search(name)
    }
    return [OUTPUT_HEAD, *sorted(names - {OUTPUT_HEAD, ""}, key=_natural)]


def by_kind(names: Iterable[str]) -> dict[str, int]:
    """Names with ``*`` for layer and expert numbers, each with how many there are, in the order of the names."""
    counts: dict[str, int] = {}
    for name in names:
        kind = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
