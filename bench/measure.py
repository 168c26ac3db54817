"""One row of the benchmark: is the result right, and only then how long does a call take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sparse_attn

from .cases import Case, Point
from .counts import nominal_flop
from .dense import dense_attention
from .peers import Peer
from .roofline import Ceilings, place
from .timers import L2, measure_time, synchronised_clock

# The tolerance of the contest's driver.
ATOL = RTOL = 1e-2
# What the fp64 check of the reference may take: queries, and bytes for the scores of one key/value head.
_CHECKED_QUERIES = 256
_CHECKED_BYTES = 2**30


@dataclass
class Row:
    """One point on one backend. Times in ms, TFLOP/s, errors absolute; None where there is nothing to tell.

    ``kind`` is ``"backend"``, ``"peer"`` (computes the same) or ``"yardstick"`` (dense attention, another function).
    ``l2`` is what the timer leaves in that cache, ``"cold"`` or ``"warm"``. ``compulsory_bytes``, ``matmul_percent``,
    ``copy_percent`` and ``bound_by``: see :mod:`bench.roofline`. ``cold_start_s`` and ``cached_start_s``: see
    :mod:`bench.cold_start`.
    """

    point: Point
    dtype: str
    pattern: str
    seed: int
    requested_backend: str
    kind: str = "backend"
    resolved_backend: str | None = None
    status: str = "error"
    reason: str | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    tflops_selected: float | None = None
    tflops_nominal: float | None = None
    max_error: float | None = None
    checked_against: str | None = None
    timer: str | None = None
    l2: str | None = None
    compulsory_bytes: int | None = None
    matmul_percent: float | None = None
    copy_percent: float | None = None
    bound_by: str | None = None
    first_call_s: float | None = None
    cold_start_s: float | None = None
    cached_start_s: float | None = None

    def flat(self) -> dict[str, Any]:
        """The row with its point's fields in front, for JSON and CSV."""
        rest = {name: value for name, value in vars(self).items() if name != "point"}
        return {
            "set": self.point.set,
            "size": self.point.size,
            **self.point.shape,
            "density": self.point.density,
            **rest,
        }


class How(NamedTuple):
    """How to time: ``warmup`` and ``rep`` in ms, ``timer`` (None: the device's default), ceilings to compare with."""

    warmup: float
    rep: float
    timer: str | None = None
    ceilings: Ceilings | None = None


class Work(NamedTuple):
    """What one call of a case has to do, as :mod:`bench.counts` counts it."""

    flop: int
    moved: int


# --- correctness ----------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """Against what an output was checked, its largest absolute difference, and what is wrong with it, if anything."""

    against: str
    max_error: float | None
    fault: str | None


class Check:
    """What outputs of one case are compared with. Made when first needed, then shared by all backends."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @cached_property
    def _reference(self) -> Tensor:
        with sparse_attn.use_backend("reference"):
            return sparse_attn.sparse_attention(*self.case.args, **self.case.kwargs)

    @cached_property
    def _dense(self) -> tuple[Tensor, Tensor]:
        """The queries that are computed, ``[n]``, and their outputs in fp64, ``[B, Hq, n, Dv]``."""
        point, device = self.case.point, self.case.q.device
        affordable = _CHECKED_BYTES // (8 * point.Hq // point.Hk * point.M)
        n = min(point.N, max(2, min(_CHECKED_QUERIES, affordable)))
        rows = torch.arange(n) * (point.N - 1) // max(1, n - 1)
        # Devices other than these two may have no fp64 at all: their check runs on the CPU.
        at = device if device.type in ("cuda", "cpu") else torch.device("cpu")
        q, k, v, index = (x.to(at) for x in self.case.args[:4])
        out, _ = dense_attention(q, k, v, index, point.block_size, **self.case.kwargs, rows=rows.to(at))
        return rows.to(device), out.to(at if at == device else torch.float32).to(device)

    def __call__(self, out: Tensor, backend: str | None) -> Verdict:
        """Compare ``out``, made by ``backend``. The reference would agree with itself: it meets dense attention."""
        point = self.case.point
        against = "dense fp64" if backend == "reference" else "reference"
        shape, dtype = (point.B, point.Hq, point.N, point.Dv), self.case.q.dtype
        if out.shape != shape or out.dtype != dtype:
            return Verdict(against, None, f"needs {dtype} {list(shape)}, got {out.dtype} {list(out.shape)}")
        if not all(entry.isfinite().all() for entry in out):
            return Verdict(against, None, "the output is not finite")
        if backend == "reference":
            rows, expected = self._dense
            out = out[:, :, rows]
        else:
            expected = self._reference
        wide = torch.promote_types(expected.dtype, torch.float32)
        max_error, fault = 0.0, None
        for b in range(point.B):  # by batch entry, to spend less memory on differences
            max_error = max(max_error, float((out[b].to(wide) - expected[b].to(wide)).abs().max()))
            try:
                torch.testing.assert_close(out[b], expected[b], atol=ATOL, rtol=RTOL, check_dtype=False)
            except AssertionError as error:
                fault = fault or f"batch entry {b}: {' '.join(str(error).split())}"
        return Verdict(against, max_error, fault)


# --- one row ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(case: Case, row: Row, requested: str | None, check: Check | None, work: Work, how: How) -> None:
    """Run one backend on one case and fill ``row``. None of what it raises gets out: it becomes a status and a reason.

    Args:
        requested: the backend to force; None for the package's own choice.
        check: what to compare the first output with; None to time unchecked results.
    """
    call = partial(sparse_attn.sparse_attention, *case.args, **case.kwargs)
    try:
        with sparse_attn.use_backend(requested) if requested else nullcontext():
            start = synchronised_clock()
            row.resolved_backend = sparse_attn.backend_for(*case.args, **case.kwargs)  # known even if the call raises
            _check_and_time(case, row, call, start, check, row.resolved_backend, work, how)
    except sparse_attn.BackendUnavailableError as error:
        row.status, row.reason = "refused", str(error)
    except (
        Exception
    ) as error:  # whatever a backend raises, out of memory included: the other rows are still worth having
        row.status, row.reason = "error", one_line(error)


@torch.no_grad()
def measure_peer(case: Case, row: Row, peer: Peer, check: Check | None, work: Work, how: How) -> None:
    """The same for a kernel of another library. A yardstick is compared with what it computes: dense attention."""
    row.resolved_backend = peer.name
    row.reason = peer.unavailable(case, how.timer)
    if row.reason is not None:
        row.status = "refused"
        return
    try:
        start = synchronised_clock()
        call = peer.prepare(case)
        if peer.same_function:
            _check_and_time(case, row, call, start, check, peer.name, work, how)
        else:
            everything = None if check is None else Check(with_every_block(case))
            _check_and_time(case, row, call, start, everything, "reference", work, how)
            if row.status == "PASS":
                row.status = "yardstick"
            row.tflops_selected = row.tflops_nominal = None  # counts of another function
            row.compulsory_bytes = row.matmul_percent = row.copy_percent = row.bound_by = None
    except Exception as error:  # a peer may raise anything
        row.status, row.reason = "error", one_line(error)


def with_every_block(case: Case) -> Case:
    """The same data with an index that selects all blocks: what dense causal attention computes. Takes no memory."""
    point = case.point
    blocks = torch.arange(point.num_blocks, dtype=case.index.dtype, device=case.index.device)
    return replace(case, index=blocks.expand(*case.index.shape[:-1], point.num_blocks))


def _check_and_time(
    case: Case,
    row: Row,
    call: Callable[[], Tensor],
    start: float,
    check: Check | None,
    like: str,
    work: Work,
    how: How,
) -> None:
    """Call once, since ``start``; check that, as the backend ``like``'s output; call on, with a clock."""
    out = call()
    row.first_call_s = synchronised_clock() - start
    if check is not None:
        verdict = check(out, like)
        row.checked_against, row.max_error = verdict.against, verdict.max_error
        if verdict.fault is not None:
            row.status, row.reason = "FAIL", verdict.fault
            return
    del out  # of several GB perhaps, and the next calls make their own
    times = measure_time(call, case.q.device, how.warmup, how.rep, how.timer)
    row.median_ms, row.p20_ms, row.p80_ms, row.timer = times
    row.l2 = L2[times.timer]
    row.tflops_selected = work.flop / times.median / 1e9
    row.tflops_nominal = nominal_flop(case.point) / times.median / 1e9
    row.compulsory_bytes = work.moved
    if how.ceilings is not None:
        row.matmul_percent, row.copy_percent, row.bound_by = place(work.flop, work.moved, times.median, how.ceilings)
    row.status = "unchecked" if check is None else "PASS"


def one_line(error: Exception) -> str:
    """Type and message of an exception."""
    return " ".join(f"{type(error).__name__}: {error}".split())
