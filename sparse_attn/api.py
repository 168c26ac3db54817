"""The functions that users call."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops, registry
from .checks import check_arguments
from .contract import Problem
from .messages import Explanation


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    block_size: int,
    sm_scale: float | None = None,
    *,
    q_offset: int = 0,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    block_size: int,
    sm_scale: float | None = None,
    *,
    q_offset: int = 0,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    block_size: int,
    sm_scale: float | None = None,
    *,
    q_offset: int = 0,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    block_size: int,
    sm_scale: float | None = None,
    *,
    q_offset: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Block top-k sparse attention: each query attends to the key blocks that ``index`` names for it.

    Query ``i`` of head ``h`` sees key ``j`` iff ``j <= i + q_offset`` and ``j // block_size`` is in the set
    ``index[b, h // g, i, :]``, with ``g = Hq / Hk`` query heads to a key/value head. The order of ids is free and
    duplicates count once; ``-1`` and every other id outside ``[0, ceil(M / block_size))`` means nothing, wherever it
    stands. A query that sees no key gets 0 (and ``lse = -inf``, and zero gradients). Keys and values that no query sees
    are never used: they may hold anything. Those that some query of their batch entry and group sees should be
    finite: a NaN among them may reach other queries.

        out[b, h, i] = softmax(sm_scale * q[b, h, i] @ k[b, h // g, seen].T) @ v[b, h // g, seen]

    Args:
        q: ``[B, Hq, N, D]``, float16, bfloat16 or, on backends that can, float32.
        k: ``[B, Hk, M, D]``, q's dtype and device; ``Hk`` divides ``Hq``.
        v: ``[B, Hk, M, Dv]``, q's dtype and device.
        index: ``[B, Hk, N, topk]``, int32 or int64, q's device: ids of key blocks. Never read on the host.
        block_size: keys in a block, at least 1; the last block of the M keys may be partial.
        sm_scale: factor on the scores; default ``1 / sqrt(D)``.
        q_offset: position of query 0 among the keys: 0 aligns it with key 0, ``M - N`` is decoding against a cache.
        return_lse: also return ``lse``, the natural logarithm of the softmax denominators.

    Scores, softmax and sums are in float32. Any strides are right. The backend is chosen for each call by device and
    problem; ``SPARSE_ATTN_BACKEND`` and :func:`use_backend` force one, :func:`explain` says what would run and why.

    Returns:
        ``out`` ``[B, Hq, N, Dv]`` in q's dtype, contiguous; with ``return_lse`` a pair ``(out, lse)``, lse
        ``[B, Hq, N]`` in float32. Both are differentiable in q, k and v where the backend has a backward pass.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: an argument's shape, device or value does not fit the others.
        UnknownBackendError: the backend asked for does not exist.
        BackendUnavailableError: the backend asked for cannot run this call. Nothing else is tried.
    """
    block_size, scale, q_offset = check_arguments(q, k, v, index, block_size, sm_scale, q_offset)
    if _needs_grad(q, k, v):
        out, lse = ops.differentiable(q, k, v, index, block_size, scale, q_offset)
        return (out, lse) if return_lse else out
    if torch.compiler.is_compiling():
        forward = ops.forward_lse if return_lse else ops.forward
        return forward(q, k, v, index, block_size, scale, q_offset)
    if getattr(forward_ad, "_current_level", -1) >= 0:
        _refuse_tangents(q, k, v)
    with ops.below_autograd():
        forward = ops.forward_lse if return_lse else ops.forward
        return forward(q, k, v, index, block_size, scale, q_offset)


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    block_size: int,
    sm_scale: float | None = None,
    *,
    q_offset: int = 0,
    return_lse: bool = False,
) -> Problem:
    """Describe a call of ``sparse_attention`` with these arguments by value. Raises what that call's checks raise."""
    block_size, _, q_offset = check_arguments(q, k, v, index, block_size, sm_scale, q_offset)
    return ops.problem_of_call(q, k, v, index, block_size, q_offset, return_lse, _needs_grad(q, k, v))


def backend_for(*args: Any, **kwargs: Any) -> str:
    """Name the backend that would run ``sparse_attention`` with these arguments. Raises what that call would raise."""
    return registry.select(problem_of(*args, **kwargs), registry.current_override()).name


def explain(*args: Any, **kwargs: Any) -> Explanation:
    """Say which backend would run ``sparse_attention`` with these arguments, and why not each of the others.

    Print the result to read it. A forced backend that cannot run the call gives ``chosen=None``, not an error.
    """
    return registry.explanation(problem_of(*args, **kwargs))


def _refuse_tangents(*tensors: Tensor) -> None:
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("sparse_attention has no forward-mode derivative: use reverse mode")


def _needs_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
