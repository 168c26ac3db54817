"""Whether a bar of :mod:`bench.claims` holds, from the rows of a proof."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from .claims import Bar, Proof

HOLDS, MISSED, NOT_MEASURED = "holds", "missed", "not measured"
_SIGNS = {"<=": operator.le, ">=": operator.ge}
_BEST_PEER = "best peer"


class Verdict(NamedTuple):
    """``answer`` is one of the three above; ``figure`` None where not measured; ``note`` has what it is made of."""

    bar: Bar
    answer: str
    figure: float | None
    note: str


class NotMeasured(Exception):
    """Why there is no figure."""


def judge(bars: Sequence[Bar], document: Proof) -> list[Verdict]:
    """A verdict for each bar."""
    return [_judge(bar, document) for bar in bars]


def summary(verdicts: Sequence[Verdict]) -> str:
    """``Of 31 bars, 28 hold, 2 are missed and 1 was not measured.``"""
    counts = {answer: sum(verdict.answer == answer for verdict in verdicts) for answer in (HOLDS, MISSED, NOT_MEASURED)}
    said = [
        f"{counts[HOLDS]} {_verb(counts[HOLDS], 'holds', 'hold')}",
        f"{counts[MISSED]} {_verb(counts[MISSED], 'is', 'are')} missed",
    ]
    missing = counts[NOT_MEASURED]
    said += [f"{missing} {_verb(missing, 'was', 'were')} not measured"] if missing else []
    return f"Of {len(verdicts)} bars, {', '.join(said[:-1])} and {said[-1]}."


def _verb(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


def _judge(bar: Bar, document: Proof) -> Verdict:
    try:
        figure, note = _figure(bar, document)
    except NotMeasured as error:
        return Verdict(bar, NOT_MEASURED, None, str(error))
    holds = _SIGNS[bar.sign](figure, bar.threshold)
    return Verdict(bar, HOLDS if holds else MISSED, figure, note)


def _figure(bar: Bar, document: Proof) -> tuple[float, str]:
    """The value of ``bar.figure``, and the times in it.

    Raises:
        NotMeasured: if it has none.
    """
    first, _, second = bar.figure.partition(" / ")
    if second:
        above, below = _row(first, bar, document), _row(second, bar, document)
        ratio = above["median_ms"] / below["median_ms"]
        note = f"{_named(first, above)} / {_named(second, below)}"
        if first != second and above["resolved_backend"] == below["resolved_backend"]:
            return 1.0, f"the same code; {note}: {ratio:.2f}"
        return ratio, "; ".join([note, *_choice(bar, document)])
    name, _, unit = bar.figure.partition(" ")
    row = _row(name, bar, document)
    if unit == "us":
        return 1e3 * row["median_ms"], "; ".join([f"L2 {row['l2']}", *_choice(bar, document)])
    if row["copy_percent"] is None:
        raise NotMeasured("the ceilings were not measured")
    moved = f"{row['compulsory_bytes'] / 1e6:.1f} MB in {1e3 * row['median_ms']:.4g} us, L2 {row['l2']}"
    return row["copy_percent"], "; ".join([moved, *_choice(bar, document)])


def _row(name: str, bar: Bar, document: Proof) -> dict[str, Any]:
    """The row that ``name`` means, which has a time."""
    run = document["runs"].get(bar.run)
    if run is None:
        raise NotMeasured(f"the run {bar.run} was not made")
    if run["failed"] is not None:
        raise NotMeasured(f"the run {bar.run} failed: {run['failed']}")
    there = [row for row in document["rows"] if (row["run"], row["size"]) == (bar.run, bar.size)]
    wanted = [row for row in there if name in (row["requested_backend"], _BEST_PEER if row["kind"] == "peer" else "")]
    timed = [row for row in wanted if row["median_ms"] is not None]
    if not timed:
        whys = [f"{row['requested_backend']}: {row['status']}: {row['reason']}" for row in wanted]
        raise NotMeasured("; ".join(whys) or f"no row of {name}")
    return min(timed, key=lambda row: row["median_ms"])


def _named(name: str, row: dict[str, Any]) -> str:
    """``fla 35.4 ms``, ``auto (triton) 0.0068 ms``."""
    ran = row["resolved_backend"] or row["requested_backend"]
    shown = ran if name in (ran, _BEST_PEER) else f"{name} ({ran})"
    return f"{shown} {row['median_ms']:.4g} ms"


def _choice(bar: Bar, document: Proof) -> list[str]:
    """What the package itself chose there, if that was measured too."""
    try:
        chosen = _row("auto", bar, document)["resolved_backend"]
    except NotMeasured:
        return []
    return [f"auto chose {chosen}"]
