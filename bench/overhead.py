"""What one eager call of ``sparse_attention`` costs on the host: everything but the backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from timeit import repeat
from typing import Any

import torch
from torch import Tensor

import sparse_attn
from sparse_attn.registry import ENVIRONMENT_VARIABLE, select

from . import cases

TARGET_US = 10
_NAME = "null"
_CALLS, _REPEATS = 2000, 7


class _Null:
    """A backend that returns a ready-made output: what is left of a call is the package's own cost."""

    out: Tensor
    lse: Tensor

    def unsupported(self, problem: sparse_attn.Problem) -> Sequence[str]:
        return ()

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        return self.out, self.lse

    def backward(
        self, *args: Any
    ) -> tuple[Tensor, Tensor, Tensor]:  # without one, inputs that require grad are refused
        raise NotImplementedError


null = _Null()


def measure_overhead(device: torch.device, dtype: torch.dtype, seed: int) -> list[dict[str, Any]]:
    """Time calls of the contest's small shape: ``what``, ``us`` (best mean of several repeats) and ``target_us``."""
    small = cases.POINTS[0]
    case = cases.make_case(small, "random", dtype, device, seed)
    null.out = torch.zeros(small.B, small.Hq, small.N, small.Dv, dtype=dtype, device=device)
    null.lse = torch.zeros(small.B, small.Hq, small.N, dtype=torch.float32, device=device)
    call = partial(sparse_attn.sparse_attention, *case.args)
    sparse_attn.register_backend(sparse_attn.BackendSpec(_NAME, f"{__name__}:null", ("*",)))
    try:
        with _environment(_NAME):
            rows = [_row(f"same problem, {ENVIRONMENT_VARIABLE}={_NAME}", _per_call(call), TARGET_US)]
        with sparse_attn.use_backend(_NAME):
            rows.append(_row(f"same problem, use_backend({_NAME!r})", _per_call(call), TARGET_US))
            rows.append(_row("same problem, return_lse=True", _per_call(partial(call, return_lse=True))))
            rows.append(_row("a new length at every call", _per_new_length(small, dtype, device, seed)))
            q = case.q.clone().requires_grad_()
            recorded = partial(sparse_attn.sparse_attention, q, *case.args[1:])
            rows.append(_row("same problem, q requires grad, forward only", _per_call(recorded)))
    finally:
        sparse_attn.unregister_backend(_NAME)
        del null.out, null.lse
    return rows


def _row(what: str, us: float, target_us: int | None = None) -> dict[str, Any]:
    return {"what": what, "us": us, "target_us": target_us}


def _per_call(call: Callable[[], object]) -> float:
    call()
    return min(repeat(call, number=_CALLS, repeat=_REPEATS)) / _CALLS * 1e6


def _per_new_length(small: cases.Point, dtype: torch.dtype, device: torch.device, seed: int) -> float:
    """Cycle through more lengths N = M than the selection cache holds: it drops each one before its next use."""
    lengths = (select.cache_info().maxsize or 0) + 500
    long = cases.make_case(cases.override(small, "long", N=lengths), "random", dtype, device, seed)
    views = [tuple(x[:, :, :n] for x in long.args[:4]) for n in range(1, lengths + 1)]

    def all_lengths() -> None:
        for q, k, v, index in views:
            sparse_attn.sparse_attention(q, k, v, index, small.block_size)

    all_lengths()
    return min(repeat(all_lengths, number=1, repeat=3)) / lengths * 1e6


@contextmanager
def _environment(name: str) -> Iterator[None]:
    before = os.environ.get(ENVIRONMENT_VARIABLE)
    os.environ[ENVIRONMENT_VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENVIRONMENT_VARIABLE]
        else:
            os.environ[ENVIRONMENT_VARIABLE] = before
