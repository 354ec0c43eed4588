"""What the forward pass of one packed bin keeps for the backward pass: an approximation.

Numbers kept a layer, with T tokens of the bin, S = T / tensor-parallel size under `--sequence-parallel` (else T),
hidden h, and q, k, f the widths of queries, of keys and of the MLP on one tensor-parallel rank::

    norms               4 S h               inputs and outputs of the two
    attention           T (3 q + 2 k)       rotated q, k and v, the result padded and packed
      with qk norms     + T (2 q + 2 k)     the projection itself, and q once more
      core recomputed   T (3 q + 3 k)       the projection, rotated q and k, the result
      both              T (4 q + 3 k)       the same, and q once more
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


def activation_elements(config: RLConfig) -> int:
    """Numbers alive at the start of the backward pass, logits not among them; of the parameters' type."""
    kernels, layers = config.kernels, config.model.num_layers
    border = _sliced_tokens(config) * config.model.hidden_size
    ends = 2 * border  # the final norm's input and output
    layer = _layer_elements(config)
    if kernels.recompute_granularity != "full":
        return layers * layer + ends
    count = kernels.recompute_num_layers
    if kernels.recompute_method == "uniform":
        return math.ceil(layers / count) * border + count * layer + ends
    return count * border + max(layers - count, 1) * layer + ends


def _layer_elements(config: RLConfig) -> int:
    model, parts = config.model, config.parallel.tensor_model_parallel_size
    tokens = config.training.rl_sequence_packing_bin_size
    query = model.num_attention_heads * model.kv_channels // parts
    key = max(1, model.num_query_groups // parts) * model.kv_channels
    mlp = (5 if model.swiglu else 2) * model.ffn_hidden_size // parts
    if model.num_experts is not None:  # each token runs through some experts, and is copied in and out of each
        inner = (5 if model.swiglu else 2) * model.moe_ffn_hidden_size // parts
        mlp = model.moe_router_topk * (inner + 2 * model.hidden_size) + 2 * model.num_experts
    recomputed = config.kernels.recompute_modules or ()
    if "core_attn" in recomputed:
        attention = 3 * query + 3 * key + (query if model.qk_layernorm else 0)
    else:
        attention = 3 * query + 2 * key + (2 * (query + key) if model.qk_layernorm else 0)
    if "mlp" in recomputed:
        mlp = 0
    return 4 * _sliced_tokens(config) * model.hidden_size + tokens * (attention + mlp)


def _sliced_tokens(config: RLConfig) -> int:
    """Tokens of a bin whose norms and residual stream this rank holds."""
    parts = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    return config.training.rl_sequence_packing_bin_size // parts
