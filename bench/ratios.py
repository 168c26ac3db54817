"""Speed as a ratio, within one run: our times over dense attention's, and the best peer's over ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from .cases import Point
from .results import names_of

_SAME = (*(field.name for field in fields(Point)), "dtype", "pattern")


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each timed row of ours whose point has a yardstick or a peer with a time.

    ``set``, ``size``, ``pattern``, ``backend``, ``ms``; ``dense`` and ``dense_ms``, the fastest yardstick, and
    ``over_dense`` = ours / dense, below 1 where we are faster; ``peer`` and ``peer_ms``, the fastest peer that computes
    the same, and ``peer_over`` = peer / ours, above 1 where we are faster. None where there is no such row.
    """
    lines = []
    timed = [row for row in rows if row["median_ms"] is not None]
    for row in timed:
        others = [other for other in timed if all(other[name] == row[name] for name in _SAME)]
        dense, peer = (_fastest(others, kind) for kind in ("yardstick", "peer"))
        if row["kind"] != "backend" or not (dense or peer):
            continue
        ms = row["median_ms"]
        lines.append({
            **{name: row[name] for name in ("set", "size", "pattern")},
            "backend": names_of(row),
            "ms": ms,
            "dense": names_of(dense) if dense else None,
            "dense_ms": dense["median_ms"] if dense else None,
            "over_dense": ms / dense["median_ms"] if dense else None,
            "peer": names_of(peer) if peer else None,
            "peer_ms": peer["median_ms"] if peer else None,
            "peer_over": peer["median_ms"] / ms if peer else None,
        })  # fmt: skip
    return lines


def _fastest(rows: Sequence[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return min((row for row in rows if row["kind"] == kind), key=lambda row: row["median_ms"], default=None)
