"""What the forward pass of one packed bin keeps for the backward pass: an approximation.

Numbers kept a layer, with T tokens of the bin, S = T / tensor-parallel size under `--sequence-parallel` (else T),
hidden h, and q, k, v, f the widths of queries, keys, values and the MLP on one tensor-parallel rank::

    norms               4 S h               inputs and outputs of the two
    attention           T (3 q + k + v)     rotated q, k and v, the result padded and packed
      with qk norms     + T (2 q + k + v)   the projection itself, and q once more
      core recomputed   T (3 q + 2 k + v)   the projection, rotated q and k, the result
      both              T (4 q + 2 k + v)   the same, and q once more
    MLP                 5 T f               fc1 counts twice, the gate after SiLU, the other half, their product
      without gate      2 T f
      recomputed        0

Layers recomputed as a whole keep their input S h, once a group, and one group at a time is alive in full.
Not in it: padding between sequences of different lengths, statistics of norms and softmax, gradients of
activations, and what only CPUs keep: the score matrices of short sequences and a second copy at an RMSNorm.
"""

from __future__ import annotations

import math

from megatron_rl.config import RLConfig
from megatron_rl.families import Layer, ModelLayout


def activation_elements(config: RLConfig, layout: ModelLayout) -> int:
    """Numbers alive at the start of the backward pass, logits not among them; of the parameters' type."""
    kernels, parts = config.kernels, layout.tensor_size if config.parallel.sequence_parallel else 1
    border = config.training.rl_sequence_packing_bin_size // parts * config.model.hidden_size
    ends = 2 * border  # the final norm's input and output
    layers = [4 * border + _inner_elements(layer, config) for layer in layout.layers]
    if kernels.recompute_granularity != "full":
        return sum(layers) + ends
    count = kernels.recompute_num_layers
    if kernels.recompute_method == "uniform":
        return math.ceil(len(layers) / count) * border + count * max(layers) + ends
    return count * border + max(sum(layers[count:]), max(layers)) + ends


def _inner_elements(layer: Layer, config: RLConfig) -> int:
    """Of attention and MLP."""
    model, cache = config.model, layer.cache
    widths = {linear.name.rpartition(".")[2]: linear.columns for linear in layer.linears}
    query, key, both = widths["linear_proj"], cache.heads * cache.key_width, cache.numbers(1)
    mlp = (5 if model.swiglu else 2) * widths["linear_fc2"]
    if model.num_experts is not None:  # each token runs through some experts, and is copied in and out of each
        mlp = model.moe_router_topk * (mlp + 2 * model.hidden_size) + 2 * model.num_experts
    recomputed = config.kernels.recompute_modules or ()
    if "core_attn" in recomputed:
        attention = 3 * query + key + both + (query if model.qk_layernorm else 0)
    else:
        attention = 3 * query + both + (2 * query + both if model.qk_layernorm else 0)
    if "mlp" in recomputed:
        mlp = 0
    return config.training.rl_sequence_packing_bin_size * (attention + mlp)
