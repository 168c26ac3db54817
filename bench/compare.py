"""Two runs side by side, row by row: ``python -m bench --compare OLD``.

Rows are the same if point, dtype, pattern and the backend that was asked for are. The ratio is new / old time, of
medians. What it says of a row of ours, most of which make the exit status 1:

=========== ==== ====================================================================================
same             within the threshold
faster           by more than it
slower      1    by more than it
failed      1    the new run has no time, or is wrong, where the old one had a time
missing     1    the new run has no such row
new              the old run has no such row, or no time there
no time          nor has the new one
=========== ==== ====================================================================================

Peers and yardsticks are shown, and never make it 1: they tell whether the machine is another than before.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from .cases import Point
from .results import Document, device_of, names_of
from .table import Column

THRESHOLD = 0.05
BAD = ("slower", "failed", "missing")
_SHAPE = tuple(field.name for field in fields(Point) if field.name not in ("set", "size"))
_MACHINE = ("cpu", "torch", "triton", "tilelang", "python")

COLUMNS: tuple[Column, ...] = (
    ("size", lambda line: line["size"]),
    ("backend", lambda line: line["backend"]),
    ("verdict", lambda line: line["verdict"]),
    ("old ms", lambda line: line["old_ms"]),
    ("new ms", lambda line: line["new_ms"]),
    ("new / old", lambda line: line["ratio"]),
)


class Comparison(NamedTuple):
    """``lines`` have ``size``, ``backend``, ``kind``, ``verdict``, ``old_ms``, ``new_ms`` and ``ratio``.

    ``warnings`` say what else differs between both runs: why the ratios may say little.
    """

    title: str
    lines: list[dict[str, Any]]
    warnings: list[str]

    @property
    def worse(self) -> list[dict[str, Any]]:
        """Those of our rows that became slower, failed or are gone."""
        return [line for line in self.lines if line["verdict"] in BAD and line["kind"] == "backend"]


def compare(old: Document, new: Document, threshold: float) -> Comparison:
    """Compare two documents of :mod:`bench.results`: a line for each row of both."""
    before, after = ({_key(row): row for row in document["rows"]} for document in (old, new))
    lines = [_line(before.get(key), after.get(key), threshold) for key in dict.fromkeys((*before, *after))]
    was, now = (
        f"{str(header.get('commit') or 'no commit')[:12]} of {header.get('date')}"
        for header in (old["header"], new["header"])
    )
    return Comparison(f"New / old: {now} / {was}, threshold {threshold:.3g}", lines, _warnings(old, new))


def _warnings(old: Document, new: Document) -> list[str]:
    said = []
    one, two = old["header"], new["header"]
    if device_of(one) != device_of(two):
        said.append(
            f"device: {device_of(one)} before, {device_of(two)} now: times of different devices say little of the code"
        )
    said += [
        f"{name}: {one[name] or 'none'} before, {two.get(name) or 'none'} now"
        for name in _MACHINE
        if name in one and one[name] != two.get(name)
    ]
    for name, what in (("timer", "timer"), ("l2", "L2"), ("seed", "seed of the data")):
        was, now = _values(old, name), _values(new, name)
        if was and now and was != now:
            said.append(f"{what}: {', '.join(was)} before, {', '.join(now)} now")
    return [f"WARNING: {text}" for text in said]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*(row[name] for name in _SHAPE), row["dtype"], row["pattern"], row["requested_backend"])


def _line(old: dict[str, Any] | None, new: dict[str, Any] | None, threshold: float) -> dict[str, Any]:
    row = new or old
    assert row is not None
    old_ms, new_ms = (x["median_ms"] if x is not None else None for x in (old, new))
    ratio = new_ms / old_ms if old_ms and new_ms else None
    broken = new is not None and new["status"] in ("FAIL", "error")
    if new is None:
        verdict = "missing" if old_ms is not None else "no time"
    elif broken or (old_ms is not None and new_ms is None):
        verdict = "failed"
    elif new_ms is None:
        verdict = "no time"
    elif ratio is None:
        verdict = "new"
    else:
        verdict = "slower" if ratio > 1 + threshold else "faster" if ratio < 1 / (1 + threshold) else "same"
    names = list(dict.fromkeys(names_of(x) for x in (old, new) if x is not None))
    return {
        "size": row["size"],
        "backend": ", now ".join(names),
        "kind": row["kind"],
        "verdict": verdict,
        "old_ms": old_ms,
        "new_ms": new_ms,
        "ratio": ratio,
    }


def _values(document: Document, name: str) -> list[str]:
    """What the timed rows of ``document`` have for ``name``."""
    return sorted({str(row[name]) for row in document["rows"] if row["median_ms"] is not None})
