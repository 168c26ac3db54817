"""A second formulation of the operator, sharing no code with the package: dense attention under a boolean mask.

It is what the reference itself is checked against, in tests and in the benchmark. It looks at the problem from
the other side (for every key block: which queries selected it) and leaves the attention to torch's SDPA.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_mask(index: Tensor, M: int, block_size: int, positions: Tensor) -> Tensor:
    """Which keys each query sees: ``index`` ``[..., n, topk]`` and positions ``[n]`` -> bool ``[..., n, M]``."""
    mask = torch.zeros(*index.shape[:-1], M, dtype=torch.bool, device=index.device)
    for block, first in enumerate(range(0, M, block_size)):
        mask[..., first : first + block_size] = (index == block).any(-1, keepdim=True)
    return mask & (torch.arange(M, device=index.device) <= positions[:, None])


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    block_size: int,
    sm_scale: float | None = None,
    *,
    q_offset: int = 0,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The operator as dense attention: arguments as for ``sparse_attention``; differentiable.

    Args:
        rows: int64 ``[n]``, the queries to compute; default all N.
        dtype: in which to compute. Low precision gives the error that eager torch makes, float64 the truth.

    Returns:
        ``out`` ``[B, Hq, n, Dv]`` in ``dtype`` and ``lse`` ``[B, Hq, n]`` in float64. Memory is O(Hq / Hk * n * M).
    """
    B, Hq, N, D = q.shape
    Hk, M = k.shape[1:3]
    g = Hq // Hk
    scale = D**-0.5 if sm_scale is None else sm_scale
    rows = torch.arange(N, device=q.device) if rows is None else rows
    q, index = q[:, :, rows], index[:, :, rows]
    n, Dv = rows.numel(), v.shape[3]
    out = q.new_zeros(B, Hq, n, Dv, dtype=dtype)
    lse = q.new_zeros(B, Hq, n, dtype=torch.float64)
    for b in range(B):
        for h in range(Hk):
            heads = slice(h * g, (h + 1) * g)
            mask = dense_mask(index[b, h], M, block_size, rows + q_offset)
            # Keys and values that nobody sees may hold anything; SDPA would multiply them by 0.
            seen = mask.any(0)[:, None]
            k_h = k[b, h].to(dtype).where(seen, 0).expand(g, M, D)
            v_h = v[b, h].to(dtype).where(seen, 0).expand(g, M, v.shape[3])
            q_h = q[b, heads].to(dtype)
            # SDPA gives rows without keys NaN or not, by version: let them see everything, and take it back afterwards.
            empty = ~mask.any(1)[:, None]
            attended = F.scaled_dot_product_attention(q_h, k_h, v_h, attn_mask=mask | empty, scale=scale)
            out[b, heads] = attended.where(~empty, 0)
            scores = (q_h.double() @ k_h.double().mT * scale).masked_fill(~mask, -torch.inf)
            lse[b, heads] = scores.logsumexp(-1)
    return out, lse
