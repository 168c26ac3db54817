"""The operators behind ``sparse_attention``: schemas, shapes for tracing, gradients, and the call of the backend.

They are opaque to torch.compile: the backend is chosen when an operator runs, not when it is traced, so an override
changed after compiling still counts.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import registry
from .contract import Problem
from .device import describe

# One operator for each thing that a caller may want, since what it does not want would cost it: of the 10 us that a
# call may take on the host, a second result costs 1 and an autograd kernel in Python 3. ``differentiable`` is the one
# that has a gradient; ``sparse_attention`` picks it when one is needed.

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
    selection = registry.select(
        problem_of_call(q, k, v, index, block_size, q_offset, False, False), registry.current_override()
    )
    out, _ = selection.backend(q, k, v, index, block_size, sm_scale, q_offset, False)
    registry.record(selection)
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
    selection = registry.select(
        problem_of_call(q, k, v, index, block_size, q_offset, True, needs_grad), registry.current_override()
    )
    out, lse = selection.backend(q, k, v, index, block_size, sm_scale, q_offset, True)
    registry.record(selection)
    assert lse is not None  # the contract of Backend, with return_lse
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


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block_size, ctx.sm_scale, ctx.q_offset = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)
    # The backward pass runs in the autograd engine's own thread, which does not see use_backend of this one.
    ctx.override = registry.current_override()


def _gradient(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    with registry.override_as(ctx.override):
        grads = backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.block_size, ctx.sm_scale, ctx.q_offset)
    return (*grads, None, None, None, None)


def _refuse_second_gradient(*_: Any) -> NoReturn:
    raise NotImplementedError("sparse_attention has no second derivative: its backward pass is not differentiable")


for _name, _implementation, _fake in (
    ("forward", _forward, _forward_fake),
    ("forward_lse", _forward_lse, _forward_lse_fake),
    ("differentiable", partial(_forward_lse, needs_grad=True), _forward_lse_fake),
    ("backward", _backward, _backward_fake),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sparse_attn::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "sparse_attn::differentiable", _gradient, setup_context=_save_for_backward, lib=_library
)
torch.library.register_autograd("sparse_attn::backward", _refuse_second_gradient, lib=_library)
