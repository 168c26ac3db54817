"""The backend's object: what it can run, and the way to the fused operator and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...contract import Problem
from . import mapping
from .fused_op import paged_attention

# Limits that the operator's documentation gives for one query a row. Rows beyond the first go to another call.
MAX_ROWS = 65536
MAX_PAGE = 512
MAX_KEYS = 262144
MAX_FEATURES = 512
MAX_GROUP = 64
MAX_ELEMENTS = 2**31 - 1
# The documentation asks for it with several queries a row, and is silent for one.
FEATURE_ALIGNMENT = 16

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class TorchNpuBackend:
    """Forward pass in fp16 and bf16, by torch_npu's ``npu_fused_infer_attention_score_v2``, or the version before it.

    The operator takes the lengths of its rows as a list on the host. They depend on ``index``, so every call waits for
    the device once: it cannot be captured in a graph, and the host does not run ahead. This, and that no device has
    confirmed it, is why the automatic choice leaves it out.
    """

    def unsupported(self, problem: Problem) -> Sequence[str]:
        """Reasons from the operator's documented limits; a call with nothing to compute does not reach the operator."""
        reasons = []
        if problem.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"needs fp16 or bf16, got {_DTYPES.get(problem.dtype, problem.dtype)}")
        if problem.Dv != problem.D:
            reasons.append(f"needs D == Dv, got D={problem.D} and Dv={problem.Dv}")
        if problem.D > MAX_FEATURES or problem.D % FEATURE_ALIGNMENT:
            reasons.append(f"needs D <= {MAX_FEATURES} and a multiple of {FEATURE_ALIGNMENT}, got D={problem.D}")
        if problem.group > MAX_GROUP:
            reasons.append(f"needs Hq / Hk <= {MAX_GROUP}, got {problem.group}")
        if problem.M and problem.topk:
            reasons += _page_limits(problem)
        return reasons

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        block_size: int,
        sm_scale: float,
        q_offset: int,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Contract: :class:`sparse_attn.contract.Backend`. Waits for the device once, for the rows' lengths."""
        B, Hq, N, D = q.shape
        Hk, M = k.shape[1:3]
        if 0 in (B, N, M, index.shape[3]):
            out = torch.zeros(B, Hq, N, D, dtype=q.dtype, device=q.device)
            lse = torch.full((B, Hq, N), -math.inf, dtype=torch.float32, device=q.device) if return_lse else None
            return out, lse
        size = mapping.page_size(M, block_size)
        k_pages, v_pages = mapping.pages(k, size), mapping.pages(v, size)
        q_rows = mapping.queries_to_rows(q, Hk)
        tables, row_lengths, empty = mapping.rows(index, M, block_size, q_offset)
        lengths = row_lengths.tolist()
        outs, lses = [], []
        for start in range(0, len(lengths), MAX_ROWS):
            part = slice(start, start + MAX_ROWS)
            out, lse = paged_attention(
                q_rows[part], k_pages, v_pages, tables[part], lengths[part], sm_scale, return_lse
            )
            outs.append(out)
            lses.append(lse)
        # Rows that see nothing have looked at one key, which may hold NaN: replaced, not multiplied.
        nothing = empty.view(-1, 1, 1, 1)
        out = mapping.rows_to_queries(_join(outs).masked_fill_(nothing, 0), B, Hk, N)
        if not return_lse:
            return out, None
        lse = mapping.rows_to_queries(_join(lses).masked_fill_(nothing, -math.inf), B, Hk, N)
        return out, lse.squeeze(-1)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _page_limits(problem: Problem) -> list[str]:
    reasons = []
    M, block_size = problem.M, problem.block_size
    size = mapping.page_size(M, block_size)
    if size > MAX_PAGE or size % mapping.PAGE_ALIGNMENT:
        reasons.append(
            f"needs block_size <= {MAX_PAGE} and a multiple of {mapping.PAGE_ALIGNMENT}, or a single block of at most "
            f"{MAX_PAGE} keys, got block_size={block_size} and M={M}"
        )
    keys = mapping.table_width(M, problem.topk, block_size) * size
    if keys > MAX_KEYS:
        reasons.append(f"needs min(topk, ceil(M / block_size)) * block_size <= {MAX_KEYS}, got {keys}")
    elements = problem.B * problem.Hk * problem.num_blocks * size * problem.D
    if elements > MAX_ELEMENTS:
        reasons.append(f"needs k and v of less than 2**31 elements, filled up to whole blocks, got {elements}")
    return reasons


backend = TorchNpuBackend()
