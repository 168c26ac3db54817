"""The public function: argument checks, the torch operator behind it, its shapes for tracing, and its gradient.

The operator is opaque to torch.compile: the backend is chosen when it runs, not when it is traced, so an override
changed after compiling still counts.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import registry
from .contract import Problem
from .device import describe
from .explain import Explanation

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)
_INT32_MAX = 2**31 - 1


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
    are never used: they may hold anything.

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
    block_size, scale, q_offset = _check(q, k, v, index, block_size, sm_scale, q_offset)
    needs_grad = _needs_grad(q, k, v)
    # Nothing to record: enter the dispatcher below the autograd key, whose Python kernel would cost 6 us.
    below = not needs_grad and not torch.compiler.is_compiling()
    with _below_autograd() if below else contextlib.nullcontext():
        if not (return_lse or needs_grad):
            return _forward_op(q, k, v, index, block_size, scale, q_offset)
        out, lse = _forward_lse_op(q, k, v, index, block_size, scale, q_offset, needs_grad)
    return (out, lse) if return_lse else out


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
    block_size, _, q_offset = _check(q, k, v, index, block_size, sm_scale, q_offset)
    return _problem(q, k, v, index, block_size, q_offset, return_lse, _needs_grad(q, k, v))


def backend_for(*args: Any, **kwargs: Any) -> str:
    """Name the backend that would run ``sparse_attention`` with these arguments. Raises what that call would raise."""
    return registry.select(problem_of(*args, **kwargs), registry.current_override()).name


def explain(*args: Any, **kwargs: Any) -> Explanation:
    """Say which backend would run ``sparse_attention`` with these arguments, and why not each of the others.

    Print the result to read it. A forced backend that cannot run the call gives ``chosen=None``, not an error.
    """
    return registry.explanation(problem_of(*args, **kwargs))


# --- argument checks -------------------------------------------------------------------------------------------------


def _check(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, sm_scale: float | None, q_offset: int
) -> tuple[int, float, int]:
    """Check the arguments and return the scalars normalised. On the path of every call: plain comparisons only."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(index, Tensor)):
        _refuse_non_tensor(q=q, k=k, v=v, index=index)
    try:
        B, Hq, N, D = q.shape
        Bk, Hk, M, Dk = k.shape
        Bv, Hv, Mv, Dv = v.shape
        Bi, Hi, Ni, _ = index.shape
    except ValueError:
        _refuse_rank(q=q, k=k, v=v, index=index)
    if q.dtype not in _FLOATS:
        raise TypeError(f"q must be float16, bfloat16 or float32, got {q.dtype}")
    if k.dtype != q.dtype:
        raise TypeError(f"k must have q's dtype {q.dtype}, got {k.dtype}")
    if v.dtype != q.dtype:
        raise TypeError(f"v must have q's dtype {q.dtype}, got {v.dtype}")
    if index.dtype not in _INTEGERS:
        raise TypeError(f"index must be int32 or int64, got {index.dtype}")
    device = q.device
    if k.device != device:
        raise ValueError(f"k must be on q's device {device}, got {k.device}")
    if v.device != device:
        raise ValueError(f"v must be on q's device {device}, got {v.device}")
    if index.device != device:
        raise ValueError(f"index must be on q's device {device}, got {index.device}")

    if Bk != B or Dk != D:
        raise ValueError(f"k must be [B, Hk, M, D] with q's B={B} and D={D}, got shape {_shape(k)}")
    if Bv != B or Hv != Hk or Mv != M:
        raise ValueError(f"v must be [B, Hk, M, Dv] with k's B={B}, Hk={Hk} and M={M}, got shape {_shape(v)}")
    if Hk < 1 or Hq < 1 or Hq % Hk:
        raise ValueError(f"q must have a multiple of k's heads, got Hq={Hq} and Hk={Hk}")
    if Bi != B or Hi != Hk or Ni != N:
        raise ValueError(
            f"index must be [B, Hk, N, topk] with B={B}, Hk={Hk} (the heads of k, not of q) and N={N}, "
            f"got shape {_shape(index)}"
        )
    if D < 1 or Dv < 1:
        raise ValueError(f"q and v must have at least one feature, got D={D} and Dv={Dv}")

    if type(block_size) is not int:
        block_size = _integer("block_size", block_size)
    if not 1 <= block_size <= _INT32_MAX:
        raise ValueError(f"block_size must be at least 1 and below 2**31, got {block_size}")
    if type(q_offset) is not int:
        q_offset = _integer("q_offset", q_offset)
    if not -_INT32_MAX <= q_offset <= _INT32_MAX - N:
        raise ValueError(f"q_offset must keep positions within 31 bits, got {q_offset} with N={N}")
    if sm_scale is None:
        sm_scale = D**-0.5
    elif type(sm_scale) is not float:
        sm_scale = _number("sm_scale", sm_scale)
    return block_size, sm_scale, q_offset


_DIMENSIONS = {"q": "[B, Hq, N, D]", "k": "[B, Hk, M, D]", "v": "[B, Hk, M, Dv]", "index": "[B, Hk, N, topk]"}


def _refuse_non_tensor(**arguments: Any) -> NoReturn:
    name, value = next((n, x) for n, x in arguments.items() if not isinstance(x, Tensor))
    raise TypeError(f"{name} must be a torch.Tensor {_DIMENSIONS[name]}, got {type(value).__name__}")


def _refuse_rank(**arguments: Tensor) -> NoReturn:
    name, value = next((n, x) for n, x in arguments.items() if x.dim() != 4)
    raise ValueError(f"{name} must have 4 dimensions {_DIMENSIONS[name]}, got shape {_shape(value)}") from None


def _integer(name: str, value: Any) -> int:
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):  # a Tensor's value may be on the device
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    return operator.index(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    if isinstance(value, (bool, str, Tensor)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a float or None, got {type(value).__name__}")
    return float(value)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _problem(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, q_offset: int, return_lse: bool, needs_grad: bool
) -> Problem:
    B, Hq, N, D = q.shape
    _, Hk, M, Dv = v.shape
    fields = (
        describe(q.device), q.dtype, index.dtype, B, Hq, Hk, N, M, D, Dv, index.shape[3], block_size,
        q_offset != 0, return_lse or needs_grad, needs_grad,
    )  # fmt: skip
    return tuple.__new__(Problem, fields)  # Problem(...) without its Python frame, 0.4 us of 10


def _needs_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


# --- the operators ---------------------------------------------------------------------------------------------------
#
# Inference without lse is an operator of its own: the second result and the arguments that ask for it would cost it
# 2 us of 10 a call. Only ``forward_lse`` is differentiable, since the backward pass needs lse.

_library = torch.library.Library("sparse_attn", "DEF")
_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor index, int block_size, float sm_scale, SymInt q_offset"
for _schema in (
    f"forward({_ARGUMENTS}) -> Tensor",
    f"forward_lse({_ARGUMENTS}, bool needs_grad) -> (Tensor, Tensor)",
    f"backward(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_forward_op = torch.ops.sparse_attn.forward.default
_forward_lse_op = torch.ops.sparse_attn.forward_lse.default
_backward_op = torch.ops.sparse_attn.backward.default
_below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)


def _forward(q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, sm_scale: float, q_offset: int) -> Tensor:
    problem = _problem(q, k, v, index, block_size, q_offset, False, False)
    out, _ = _dispatch(problem, q, k, v, index, block_size, sm_scale, q_offset, False)
    return out


def _forward_lse(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, sm_scale: float, q_offset: int, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    problem = _problem(q, k, v, index, block_size, q_offset, True, needs_grad)
    out, lse = _dispatch(problem, q, k, v, index, block_size, sm_scale, q_offset, True)
    assert lse is not None  # the contract of Backend, with return_lse
    return out, lse


def _dispatch(problem: Problem, *arguments: Any) -> tuple[Tensor, Tensor | None]:
    selection = registry.select(problem, registry.current_override())
    if selection.warning is not None:
        registry.warn_once(selection.warning)
    result = selection.backend(*arguments)
    registry.record(selection.name)  # afterwards: a backend may call others on its way
    return result


def _backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    block_size: int,
    sm_scale: float,
    q_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = _problem(q, k, v, index, block_size, q_offset, True, True)
    backend: Any = registry.select(problem, registry.current_override()).backend
    if grad_out is None:  # only lse was used
        grad_out = torch.zeros_like(out)
    return backend.backward(grad_out, grad_lse, out, lse, q, k, v, index, block_size, sm_scale, q_offset)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _forward_lse_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _forward_fake(q, k, v), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_fake(
    grad_out: Any, grad_lse: Any, out: Any, lse: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block_size, ctx.sm_scale, ctx.q_offset, needs_grad = inputs
    if not needs_grad:
        _refuse_gradient()
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)
    # The backward pass runs in the autograd engine's own thread, which does not see use_backend of this one.
    ctx.override = registry.current_override()


def _gradient(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    with registry.override_as(ctx.override):
        grads = _backward_op(grad_out, grad_lse, *ctx.saved_tensors, ctx.block_size, ctx.sm_scale, ctx.q_offset)
    return (*grads, None, None, None, None, None)


def _refuse_gradient(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "inputs require gradients, and this operator of sparse_attn was told that they need none: "
        "call sparse_attn.sparse_attention, which picks the operator that records them"
    )


def _refuse_second_gradient(*_: Any) -> NoReturn:
    raise NotImplementedError("sparse_attention has no second derivative: its backward pass is not differentiable")


for _name, _implementation, _fake, _derivative, _setup in (
    ("forward", _forward, _forward_fake, _refuse_gradient, _refuse_gradient),
    ("forward_lse", _forward_lse, _forward_lse_fake, _gradient, _save_for_backward),
    ("backward", _backward, _backward_fake, _refuse_second_gradient, None),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sparse_attn::{_name}", _fake, lib=_library)
    torch.library.register_autograd(f"sparse_attn::{_name}", _derivative, setup_context=_setup, lib=_library)
