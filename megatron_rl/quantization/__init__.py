"""Quantised linear layers: one file per recipe in ``recipes/``, found by its name.

    recipe = RECIPES.get("int8")           # of megatron_rl.registry
    q = recipe.quantize(weight)            # [N, K] -> codes and scales
    y = recipe.matmul(x, q, bias)          # [..., K] -> [..., N]

The package itself imports no torch, because the configuration reads its torch-free parts.
"""
