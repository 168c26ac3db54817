"""A proof for readers: ``results.md`` and ``index.html``, and the table of the large points in README."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import claims, report, table
from .claims import Proof
from .ratios import ratios
from .report import Section
from .results import device_of
from .table import Column
from .verdicts import Verdict, judge, summary

TITLE = "sparse_attn: what was measured, and which bars hold"
MARKERS = ("<!-- results -->", "<!-- /results -->")
_WIDTH = 130
# Of a run's header, and what each is called. Devices differ by whose code they run, which is no other machine.
_FACTS = (
    ("device", "device"), ("cpu", "host"), ("commit", "commit"), ("torch", "torch"), ("cuda", "CUDA"),
    ("cudnn", "cuDNN"), ("triton", "Triton"), ("tilelang", "TileLang"), ("python", "Python"),
    ("sparse_attn", "sparse_attn"),
)  # fmt: skip


def _of(value: Callable[[Verdict], object]) -> Callable[[Verdict], object]:
    return value


BAR_COLUMNS: tuple[Column, ...] = (
    ("issue", _of(lambda verdict: verdict.bar.issue)),
    ("run", _of(lambda verdict: verdict.bar.run)),
    ("claim", _of(lambda verdict: verdict.bar.claim)),
    ("figure", _of(lambda verdict: verdict.bar.figure)),
    ("bar", _of(lambda verdict: f"{verdict.bar.sign} {verdict.bar.threshold:g}")),
    ("got", _of(lambda verdict: verdict.figure)),
    ("", _of(lambda verdict: verdict.answer)),
    ("from", _of(lambda verdict: verdict.note)),
)


def write(document: Proof, folder: Path) -> None:
    """Write both pages into ``folder``."""
    made = sections(document)
    text = "\n\n".join([f"# {TITLE}", *(section.markdown() for section in made)])
    (folder / "results.md").write_text(text + "\n", encoding="utf-8")
    (folder / "index.html").write_text(report.render(TITLE, made), encoding="utf-8")


def sections(document: Proof) -> list[Section]:
    """What the pages say, in order: bars, machine, ratios, then run by run."""
    verdicts = judge(claims.BARS, document)
    said = [
        summary(verdicts),
        "Written by `python -m bench.proof`. Each figure is of one run, in one process; the runs are below.",
    ]
    failed = [f"{name} failed: {entry['failed']}" for name, entry in document["runs"].items() if entry["failed"]]
    parts = [
        Section("Bars", [*said, *failed], BAR_COLUMNS, verdicts),
        Section("Machine and versions", [], (("fact", _place(0)), ("value", _place(1))), facts(document)),
    ]
    lines = [
        {"run": name, **line}
        for name in document["runs"]
        for line in ratios([row for row in document["rows"] if row["run"] == name])
    ]
    note = "Dense attention is another function: below 1 we are faster. Peers compute the same: above 1 we are faster."
    if lines:
        parts.append(Section("Ratios", [note], (("run", _key("run")), *report.RATIO_COLUMNS), lines))
    what = {run.name: run.what for run in claims.RUNS}
    return [*parts, *(_section(document, name, what[name]) for name in document["runs"])]


def _section(document: Proof, name: str, what: str) -> Section:
    entry = document["runs"][name]
    rows = [row for row in document["rows"] if row["run"] == name]
    notes = [f"`python -m bench {entry['arguments']}`"]
    if entry["failed"] is not None:
        return Section(f"{name}: {what}", [*notes, f"failed: {entry['failed']}"])
    notes += table.result_notes({"header": entry["header"], "rows": rows})
    return Section(f"{name}: {what}", notes, table.result_columns(rows), rows)


def facts(document: Proof, names: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """Of the runs ``names`` (default: all): device, commit, versions. Where runs differ, whose is which."""
    headers = {
        name: entry["header"]
        for name, entry in document["runs"].items()
        if entry["header"] and (names is None or name in names)
    }
    found = [(label, {name: _fact(header, field) for name, header in headers.items()}) for field, label in _FACTS]
    peers = dict.fromkeys(peer for header in headers.values() for peer in header.get("peers") or {})
    found += [
        (peer, {name: (header.get("peers") or {}).get(peer) for name, header in headers.items()}) for peer in peers
    ]
    return [(label, _one_or_each(values)) for label, values in found if any(values.values())]


def _fact(header: dict[str, Any], field: str) -> str | None:
    return device_of({**header, "code_for": None}) if field == "device" else header.get(field)


def _one_or_each(values: dict[str, str | None]) -> str:
    """``3.6.0``, or ``3.6.0 (statement, handout), 3.7.0 (local)``; what a run does not say is left out."""
    runs: dict[str, list[str]] = {}
    for name, value in values.items():
        if value:
            runs.setdefault(value, []).append(name)
    return next(iter(runs)) if len(runs) == 1 else ", ".join(f"{value} ({', '.join(of)})" for value, of in runs.items())


def _place(position: int) -> Any:
    return lambda line: line[position]


def _key(name: str) -> Any:
    return lambda line: line[name]


# --- README -----------------------------------------------------------------------------------------------------------


def between_markers(path: Path) -> tuple[str, str, str]:
    """The text of ``path`` before the markers' lines, between them, and after.

    Raises:
        ValueError: if they are not there, once each.
    """
    text = path.read_text(encoding="utf-8")
    first, last = MARKERS
    before, found, rest = text.partition(f"{first}\n")
    between, closed, after = rest.partition(f"{last}\n")
    if not found or not closed or text.count(first) != 1 or text.count(last) != 1:
        raise ValueError(f"{path} needs the lines {first} and {last}, once each, in this order")
    return before, between, after


def write_readme(path: Path, document: Proof) -> None:
    """Put the table of the large points between the markers in ``path``.

    Raises:
        ValueError: if it has no markers, or nothing was measured at these points.
    """
    before, _, after = between_markers(path)
    first, last = MARKERS
    path.write_text(f"{before}{first}\n{headline(document)}\n{last}\n{after}", encoding="utf-8")


def headline(document: Proof) -> str:
    """Times at the large points, their ratios, and where they were measured.

    Raises:
        ValueError: if none of ours has a time there.
    """
    lines = [(label, _times(document, run, size)) for label, run, size in claims.HEADLINE]
    if not any(times.get(name) for _, times in lines for name in ("tilelang", "triton")):
        raise ValueError("no large point was measured: nothing to show in a README")
    columns: list[Column] = [("ms", _place(0))]
    for heading, name in (
        ("`tilelang`", "tilelang"), ("`triton`", "triton"), ("dense, cuDNN", "sdpa-cudnn"), ("fla", "fla")
    ):  # fmt: skip
        columns.append((heading, _time(name)))
    for above, below in (
        ("tilelang", "sdpa-cudnn"), ("triton", "sdpa-cudnn"), ("fla", "tilelang"), ("fla", "triton")
    ):  # fmt: skip
        columns.append((f"{above} / {below}".replace("sdpa-cudnn", "dense"), _ratio(above, below)))
    rendered = table.markdown("", columns, lines).strip()
    bars = summary(judge(claims.BARS, document))
    known = dict(facts(document, [run for _, run, _ in claims.HEADLINE]))
    device = known.pop("device")
    where = [f"{label} {value}" for label, value in known.items() if label not in ("host", "CUDA", "sparse_attn")]
    text = (
        f"The contest's large points on {device}, fp16, random index unless said; medians of whole calls by "
        f"`do_bench`, L2 cold. Dense is causal attention, another function; fla is fla-core's NSA selection kernel. "
        f"{bars} Every row and every bar: [docs/results/results.md](docs/results/results.md). "
        f"Versions: {'; '.join(where)}."
    )
    return f"{rendered}\n\n{textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)}"


def _times(document: Proof, run: str, size: str) -> dict[str, float]:
    rows = [
        row for row in document["rows"] if (row["run"], row["size"]) == (run, size) and row["median_ms"] is not None
    ]
    return {row["requested_backend"]: row["median_ms"] for row in rows}


def _time(name: str) -> Callable[[Any], object]:
    return lambda line: line[1].get(name)


def _ratio(above: str, below: str) -> Callable[[Any], object]:
    def ratio(line: Any) -> object:
        times = line[1]
        return f"**{times[above] / times[below]:.2f}**" if above in times and below in times else None

    return ratio
