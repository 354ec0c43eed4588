"""The attention product spelled out: what a CPU computes for the trainer and for the rollout engine alike.

Its results do not depend on how many rows are computed together, so the log-probs of both agree to the bit in
fp32, instead of to 2e-5 for the least likely tokens of a sharp model (docs/decisions/001).
"""

from __future__ import annotations

import torch

from megatron_rl.arithmetic import FEWEST_ROWS


def attend_one_token(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """One new token a row -> ``[N, 1, query_heads * D]``.

    ``query`` [N, 1, query_heads, D]; ``key`` and ``value`` [N, groups, K, D]; ``mask`` [N, 1, 1, K] additive.
    Query heads of a group are folded into the query length, so the cache is read once a group and never expanded.
    Not differentiable.
    """
    rows, _, heads, width = query.shape
    groups, keys = key.shape[1:3]
    share = heads // groups
    # The idle rows that keep the arithmetic are zeros; the scale is multiplied in as the others are written.
    folded = query.new_zeros(rows, groups, max(share, FEWEST_ROWS if query.device.type == "cpu" else 1), width)
    torch.mul(query.reshape(rows, groups, share, width), width**-0.5, out=folded[:, :, :share])
    # As `attend_heads`, spelt with bmm: of its views and expansions nothing is needed here.
    scores = torch.bmm(folded.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
    scores.view(rows, groups, -1, keys).add_(mask)
    weights = scores.float().softmax(-1).to(value.dtype)
    output = torch.bmm(weights, value.flatten(0, 1)).view(rows, groups, -1, width)
    return output[:, :, :share].reshape(rows, 1, heads * width)


def attend_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """``softmax(query key^T / sqrt(D) + mask) value`` with the softmax in fp32, differentiable: several tokens a row.

    ``query`` [B, heads, L, D], ``key`` and ``value`` [B, groups, K, D], ``mask`` [L, K] or [B, 1, L, K] additive
    -> ``[B, heads, L, D]``.
    """
    count, heads, length, width = query.shape
    groups = key.shape[1]
    share = heads // groups
    folded = query.reshape(count, groups, share * length, width)
    repeated = mask.repeat(*(1 for _ in mask.shape[:-2]), share, 1)
    scores = torch.matmul(folded * width**-0.5, key.transpose(-1, -2)).add_(repeated)
    weights = scores.float().softmax(-1).to(value.dtype)
    return torch.matmul(weights, value).view(count, heads, length, width)


def hide_later_keys(positions: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [N, keys]: -inf where a key lies beyond the token at ``positions`` [N], else 0."""
    columns = torch.arange(keys, device=positions.device)
    mask = torch.zeros(positions.shape[0], keys, dtype=dtype, device=positions.device)
    return mask.masked_fill_(columns > positions[:, None], float("-inf"))
