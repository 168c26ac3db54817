"""Made-up documents of :mod:`bench.proof`, in tests."""

from __future__ import annotations

from typing import Any

from bench import arguments, claims, options, proof
from bench.claims import Run

from .bench_run import document, row

RUNS = {run.name: run for run in claims.RUNS}
FAST = {"triton": 2.0, "tilelang": 1.5, "sdpa-cudnn": 3.0, "fla": 6.0}


def points_of(run: Run) -> list[Any]:
    p = arguments.parser()
    return options.chosen_points(p, p.parse_args([*run.words, "--device", "cpu"]))


def measured(name: str, times: dict[str, float | None], *sizes: str, **changes: Any) -> dict[str, Any]:
    """A made-up document with one run: at each of its points the same times, by backend or peer."""
    kinds = {"fla": "peer", "flex": "peer", "sdpa-cudnn": "yardstick", "sdpa-flash": "yardstick"}
    rows = [
        {"run": name, **row(point, other, ms, kinds.get(other, "backend"), **changes)}
        for point in points_of(RUNS[name])
        for other, ms in times.items()
        if not sizes or point.size in sizes
    ]
    header = document(commit="c0ffee", triton="3.6.0", peers={"fla": "0.6.0"}, peers_absent={})["header"]
    del header["date"]
    return {"runs": {name: {"arguments": RUNS[name].arguments, "failed": None, "header": header}}, "rows": rows}


def merged(*documents: dict[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {"runs": {}, "rows": []}
    for one in documents:
        proof._merge(whole, one)
    return whole
