"""One run: every chosen point on every chosen backend and peer, checked, then timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import cases, cold_start
from .counts import compulsory_bytes, selected_flop
from .environment import header
from .measure import Check, How, Row, Work, measure, measure_peer, one_line
from .peers import Peer
from .results import Document, peer_facts
from .roofline import Ceilings, measure_ceilings

Step = Callable[[str], None]


class Plan(NamedTuple):
    """What to measure and how; ``backends`` has None for the package's choice, ``timer`` None for the default."""

    device: torch.device
    points: Sequence[cases.Point]
    backends: Sequence[str | None]
    peers: Sequence[Peer]
    absent: Sequence[Peer]
    dtype: str
    pattern: str
    seed: int
    check: bool
    roofline: bool
    cold_start: bool
    warmup: float
    rep: float
    timer: str | None
    code_for: str | None

    @property
    def steps(self) -> int:
        """How many times :func:`execute` says what it does."""
        rows = len(self.points) * (len(self.backends) + len(self.peers))
        return len(self.points) + rows * (1 + self.cold_start) + self.roofline


def execute(plan: Plan, step: Step) -> Document:
    """Measure, and make the document of :mod:`bench.results`, but its ``support``.

    Nothing that a backend raises gets out.
    """
    facts: dict[str, Any] = {**header(plan.device), "code_for": plan.code_for, **peer_facts(plan.peers, plan.absent)}
    notes: list[str] = []
    ceilings: Ceilings | None = None
    if plan.roofline:
        step("ceilings")
        try:
            ceilings = measure_ceilings(plan.device, getattr(torch, plan.dtype))
        except Exception as error:  # out of memory perhaps, or a dtype that the device cannot multiply
            notes.append(f"ceilings could not be measured: {one_line(error)}")
        _free(plan.device)
    how = How(plan.warmup, plan.rep, plan.timer, ceilings)
    rows: list[Row] = []
    for point in plan.points:
        rows += _measure_point(plan, point, how, step)
    if plan.cold_start:  # when no data of ours is on the device any more
        for row in rows:
            step(f"{row.point.size}: {row.requested_backend} in fresh processes")
            if row.median_ms is not None:
                cold_start.fill(row, plan.device)
    facts |= {"ceilings": ceilings._asdict() if ceilings else None, "notes": notes}
    return {"header": facts, "rows": [row.flat() for row in rows], "support": []}


def _measure_point(plan: Plan, point: cases.Point, how: How, step: Step) -> list[Row]:
    named = [*((name or "auto", "backend") for name in plan.backends), *((peer.name, peer.kind) for peer in plan.peers)]
    rows = [Row(point, plan.dtype, plan.pattern, plan.seed, name, kind) for name, kind in named]
    step(f"{point.size}: data")
    try:
        case = cases.make_case(point, plan.pattern, getattr(torch, plan.dtype), plan.device, plan.seed)
        work = Work(selected_flop(point, case.index), compulsory_bytes(case))
    except Exception as error:  # out of memory perhaps: the other points are still worth measuring
        for row in rows:
            row.reason = one_line(error)
        return rows
    check = Check(case) if plan.check else None
    for row, name in zip(rows, plan.backends, strict=False):
        step(f"{point.size}: {name or 'auto'}")
        measure(case, row, name, check, work, how)
        _free(plan.device)
    for row, peer in zip(rows[len(plan.backends) :], plan.peers, strict=True):
        step(f"{point.size}: {peer.name}")
        measure_peer(case, row, peer, check, work, how)
        _free(plan.device)
    del case, check
    _free(plan.device)
    return rows


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()
