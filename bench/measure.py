"""One row of the benchmark: is the result right, and only then how long does a call take."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import timer as synchronised_clock  # seconds, after the accelerator has finished

import sparse_attn

from .cases import Case, Point
from .dense import dense_attention
from .peers import Peer

# The tolerance of the contest's driver.
ATOL = RTOL = 1e-2
# What the fp64 check of the reference may take: queries, and bytes for the scores of one key/value head.
_CHECKED_QUERIES = 256
_CHECKED_BYTES = 2**30
# Without do_bench: calls to time at least, so that one hiccup is not the median, but not for longer than this.
_SAMPLES = 5
_PATIENCE_S = 1.0
# Ids sorted at a time while FLOPs are counted.
_CHUNK = 2**22


@dataclass
class Row:
    """One point on one backend. Times in ms, TFLOP/s, errors absolute; None where there is nothing to tell."""

    point: Point
    dtype: str
    pattern: str
    seed: int
    requested_backend: str
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
    first_call_s: float | None = None

    def flat(self) -> dict[str, Any]:
        """The row with its point's fields in front, for JSON and CSV."""
        rest = {name: value for name, value in vars(self).items() if name != "point"}
        return {"set": self.point.set, "size": self.point.size, **self.point.shape, **rest}


# --- FLOPs ----------------------------------------------------------------------------------------------------------


def nominal_flop(point: Point) -> int:
    """The contest's count, ``2 * (D + Dv) * B * Hq * N * topk * block_size``: padding and masked keys included."""
    return 2 * (point.D + point.Dv) * point.B * point.Hq * point.N * point.topk * point.block_size


def selected_flop(point: Point, index: Tensor) -> int:
    """``2 * (D + Dv)`` for each (head, query, key) that the operator's mask admits; ``index`` ``[B, Hk, N, topk]``."""
    pairs = torch.zeros((), dtype=torch.int64, device=index.device)
    step = max(1, _CHUNK // max(1, point.topk))
    for lists in index.flatten(0, 1):
        for start in range(0, point.N, step):
            ids = lists[start : start + step].sort(-1).values.long()
            seen_keys = torch.arange(start, start + len(ids), device=index.device) + (point.q_offset + 1)
            in_block = seen_keys.clamp(max=point.M)[:, None] - ids * point.block_size
            counts = (ids >= 0) & (ids < point.num_blocks)
            counts[:, 1:] &= ids[:, 1:] != ids[:, :-1]
            pairs += in_block.clamp(0, point.block_size).where(counts, 0).sum()
    return 2 * (point.D + point.Dv) * (point.Hq // point.Hk) * int(pairs)


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


# --- time -----------------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Median and 20 % and 80 % quantiles of one call, in ms, and what measured them."""

    median: float
    p20: float
    p80: float
    timer: str


def measure_time(call: Callable[[], object], device: torch.device, warmup: float, rep: float) -> Times:
    """Time ``call`` for about ``rep`` ms after ``warmup`` ms; at least one call, however long it takes."""
    if device.type in ("cuda", "npu") and importlib.util.find_spec("triton") is not None:
        do_bench = importlib.import_module("triton.testing").do_bench
        median, p20, p80 = do_bench(call, warmup=warmup, rep=rep, quantiles=[0.5, 0.2, 0.8])
        return Times(median, p20, p80, "do_bench")
    start = synchronised_clock()
    while (synchronised_clock() - start) * 1e3 < warmup:
        call()
    seconds: list[float] = []
    while sum(seconds) * 1e3 < rep or (len(seconds) < _SAMPLES and sum(seconds) < _PATIENCE_S):
        start = synchronised_clock()
        call()
        seconds.append(synchronised_clock() - start)
    quantiles = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    median, p20, p80 = (torch.tensor(seconds, dtype=torch.float64) * 1e3).quantile(quantiles).tolist()
    return Times(median, p20, p80, "torch.utils.benchmark")


@torch.no_grad()
def measure(
    case: Case, row: Row, requested: str | None, check: Check | None, flop: int, warmup: float, rep: float
) -> None:
    """Run one backend on one case and fill ``row``. None of what it raises gets out: it becomes a status and a reason.

    Args:
        requested: the backend to force; None for the package's own choice.
        check: what to compare the first output with; None to time unchecked results.
        flop: of one call, as :func:`selected_flop` counts.
        warmup, rep: in ms.
    """
    call = partial(sparse_attn.sparse_attention, *case.args, **case.kwargs)
    try:
        with sparse_attn.use_backend(requested) if requested else nullcontext():
            start = synchronised_clock()
            row.resolved_backend = sparse_attn.backend_for(*case.args, **case.kwargs)  # known even if the call raises
            _check_and_time(case, row, call, start, check, flop, warmup, rep)
    except sparse_attn.BackendUnavailableError as error:
        row.status, row.reason = "refused", str(error)
    except (
        Exception
    ) as error:  # whatever a backend raises, out of memory included: the other rows are still worth having
        row.status, row.reason = "error", one_line(error)


@torch.no_grad()
def measure_peer(case: Case, row: Row, peer: Peer, check: Check | None, flop: int, warmup: float, rep: float) -> None:
    """The same for a kernel of another library. Of one that computes something else, the result is not checked."""
    row.resolved_backend = peer.name
    row.reason = peer.unavailable(case.point)
    if row.reason is not None:
        row.status = "refused"
        return
    try:
        start = synchronised_clock()
        call = peer.prepare(case)
        _check_and_time(case, row, call, start, check if peer.same_function else None, flop, warmup, rep)
        if not peer.same_function and row.status == "unchecked":
            row.status, row.tflops_selected, row.tflops_nominal = "yardstick", None, None  # counts of another function
    except Exception as error:  # a peer may raise anything
        row.status, row.reason = "error", one_line(error)


def _check_and_time(
    case: Case,
    row: Row,
    call: Callable[[], Tensor],
    start: float,
    check: Check | None,
    flop: int,
    warmup: float,
    rep: float,
) -> None:
    """Call once, since ``start``; check that; call on, with a clock."""
    out = call()
    row.first_call_s = synchronised_clock() - start
    if check is not None:
        verdict = check(out, row.resolved_backend)
        row.checked_against, row.max_error = verdict.against, verdict.max_error
        if verdict.fault is not None:
            row.status, row.reason = "FAIL", verdict.fault
            return
    del out  # of several GB perhaps, and the next calls make their own
    times = measure_time(call, case.q.device, warmup, rep)
    row.median_ms, row.p20_ms, row.p80_ms, row.timer = times
    row.tflops_selected = flop / times.median / 1e9
    row.tflops_nominal = nominal_flop(case.point) / times.median / 1e9
    row.status = "unchecked" if check is None else "PASS"


def one_line(error: Exception) -> str:
    """Type and message of an exception."""
    return " ".join(f"{type(error).__name__}: {error}".split())
