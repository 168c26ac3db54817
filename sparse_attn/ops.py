"""The operators behind ``sparse_attention``: schemas, shapes for tracing, gradients, and the call of the backend.

They are opaque to torch.compile: the backend is chosen when an operator runs, not when it is traced, so an override
changed after compiling still counts.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import messages, registry
from .contract import Problem
from .device import describe

# One operator for each thing that a caller may want: of the 10 us that a call may take on the host, an empty lse that
# nobody asked for, made and handed out, would cost 2. All have a gradient, also those that are meant for calls without
# one: a graph that was traced for inference may be run on inputs that require gradients. ``differentiable``
# is for calls that are known to need one, so that the backend can be chosen for it.

_library = torch.library.Library("sparse_attn", "DEF")
_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor index, int block_size, float sm_scale, SymInt q_offset"
for _schema in (
    f"forward({_ARGUMENTS}) -> Tensor",
    f"forward_lse({_ARGUMENTS}) -> (Tensor, Tensor)",
    f"differentiable({_ARGUMENTS}) -> (Tensor, Tensor)",
    f"backward(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
forward = torch.ops.sparse_attn.forward.default
forward_lse = torch.ops.sparse_attn.forward_lse.default
differentiable = torch.ops.sparse_attn.differentiable.default
backward = torch.ops.sparse_attn.backward.default
# Enters the dispatcher below the autograd key, whose kernel is Python's: 3 us, even when there is nothing to record.
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
    return tuple.__new__(Problem, fields)  # Problem(...) without its Python frame, 0.15 us


def _forward(q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, sm_scale: float, q_offset: int) -> Tensor:
    problem = problem_of_call(q, k, v, index, block_size, q_offset, False, False)
    selection = registry.select(problem, registry.current_override())
    out, _ = selection.backend(q, k, v, index, block_size, sm_scale, q_offset, False)
    registry.record(selection, problem.device)
    return out


def _forward_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    block_size: int,
    sm_scale: float,
    q_offset: int,
    needs_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    problem = problem_of_call(q, k, v, index, block_size, q_offset, True, needs_grad)
    selection = registry.select(problem, registry.current_override())
    out, lse = selection.backend(q, k, v, index, block_size, sm_scale, q_offset, True)
    registry.record(selection, problem.device)
    if lse is None:
        raise TypeError(messages.lse_missing(selection.name))
    return out, lse


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


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _save(ctx, inputs)


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, inputs, *output)
    ctx.set_materialize_grads(False)


def _save(ctx: Any, inputs: tuple[Any, ...], *outputs: Tensor) -> None:
    *tensors, ctx.block_size, ctx.sm_scale, ctx.q_offset = inputs
    ctx.save_for_backward(*outputs, *tensors)
    # The backward pass runs in the autograd engine's own thread, which does not see use_backend of this one.
    ctx.override = registry.current_override()


def _gradient(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    with registry.override_as(ctx.override):
        grads = backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.block_size, ctx.sm_scale, ctx.q_offset)
    return (*grads, None, None, None, None)


def _gradient_without_lse(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Of ``forward``, which did not keep lse: run once more for it."""
    scalars = ctx.block_size, ctx.sm_scale, ctx.q_offset
    with registry.override_as(ctx.override):
        output = forward_lse(*(x.detach() for x in ctx.saved_tensors), *scalars)
        grads = backward(grad_out, None, *output, *ctx.saved_tensors, *scalars)
    return (*grads, None, None, None, None)


def _refuse_second_gradient(*_: Any) -> NoReturn:
    raise NotImplementedError("sparse_attention has no second derivative: its backward pass is not differentiable")


for _name, _implementation, _fake, _derivative, _setup in (
    ("forward", _forward, _forward_fake, _gradient_without_lse, _save_inputs),
    ("forward_lse", _forward_lse, _forward_lse_fake, _gradient, _save_all),
    ("differentiable", partial(_forward_lse, needs_grad=True), _forward_lse_fake, _gradient, _save_all),
    ("backward", _backward, _backward_fake, _refuse_second_gradient, None),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sparse_attn::{_name}", _fake, lib=_library)
    torch.library.register_autograd(f"sparse_attn::{_name}", _derivative, setup_context=_setup, lib=_library)
