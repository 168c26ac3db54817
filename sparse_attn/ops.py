"""The operators behind ``sparse_attention``: schemas, shapes for tracing, gradients, and the call of the backend.

They are opaque to torch.compile: the backend is chosen when an operator runs, not when it is traced, so an override
changed after compiling still counts.
"""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import registry
from .contract import Problem
from .device import describe

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
forward = torch.ops.sparse_attn.forward.default
forward_lse = torch.ops.sparse_attn.forward_lse.default
backward = torch.ops.sparse_attn.backward.default
below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", contextlib.nullcontext)


def problem_of_call(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, q_offset: int, return_lse: bool, needs_grad: bool
) -> Problem:
    """Describe a call whose arguments were checked."""
    B, Hq, N, D = q.shape
    _, Hk, M, Dv = v.shape
    fields = (
        describe(q.device), q.dtype, index.dtype, B, Hq, Hk, N, M, D, Dv, index.shape[3], block_size,
        q_offset != 0, return_lse or needs_grad, needs_grad,
    )  # fmt: skip
    return tuple.__new__(Problem, fields)  # Problem(...) without its Python frame, 0.4 us of 10


def _forward(q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, sm_scale: float, q_offset: int) -> Tensor:
    problem = problem_of_call(q, k, v, index, block_size, q_offset, False, False)
    out, _ = _dispatch(problem, q, k, v, index, block_size, sm_scale, q_offset, False)
    return out


def _forward_lse(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, sm_scale: float, q_offset: int, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    problem = problem_of_call(q, k, v, index, block_size, q_offset, True, needs_grad)
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
    problem = problem_of_call(q, k, v, index, block_size, q_offset, True, True)
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
        grads = backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.block_size, ctx.sm_scale, ctx.q_offset)
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
