"""One run as a page: ``python -m bench --report DIR`` writes ``index.html``, ``results.json`` and ``results.md``.

The page is one file: its style and its pictures are in it, and it refers to nothing outside. ``--from`` makes it again
from the JSON, without the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from . import compare, plot, table
from .ratios import ratios
from .results import Document, ceilings_of, device_of, names_of
from .table import Column

_FACTS = (
    ("device", "device"), ("cpu", "host"), ("torch", "torch"), ("cuda", "CUDA"), ("cudnn", "cuDNN"),
    ("triton", "Triton"), ("tilelang", "TileLang"), ("python", "Python"), ("sparse_attn", "sparse_attn"),
    ("commit", "commit"), ("date", "date (UTC)"), ("SPARSE_ATTN_BACKEND", "SPARSE_ATTN_BACKEND"),
)  # fmt: skip
_TIMERS = {
    "do_bench": "triton.testing.do_bench, which flushes the L2 cache before each call (cold)",
    "graph": "many calls captured in one CUDA graph and replayed: the device alone, L2 cache warm",
    "graph-cold": "many calls in one CUDA graph, each after a flush of the L2 cache (cold), less as many flushes alone",
    "events": "events of the device around each call, L2 cache warm",
    "torch.utils.benchmark": "torch.utils.benchmark's clock of the host around each call, caches warm",
}
RATIO_COLUMNS: tuple[Column, ...] = (
    ("size", lambda line: line["size"]),
    ("backend", lambda line: line["backend"]),
    ("ms", lambda line: line["ms"]),
    ("dense", lambda line: line["dense"]),
    ("dense ms", lambda line: line["dense_ms"]),
    ("ours / dense", lambda line: line["over_dense"]),
    ("best peer", lambda line: line["peer"]),
    ("peer ms", lambda line: line["peer_ms"]),
    ("peer / ours", lambda line: line["peer_over"]),
)
SUPPORT_COLUMNS: tuple[Column, ...] = (
    ("device", lambda line: line["device"]),
    ("backend", lambda line: line["backend"]),
    ("answer", lambda line: line["answer"]),
    ("why", lambda line: line["why"] or None),
)


class Section(NamedTuple):
    """A heading, sentences below it, and a table, if there is one."""

    heading: str
    notes: Sequence[str]
    columns: Sequence[Column] = ()
    lines: Sequence[Any] = ()

    def numeric(self) -> list[bool]:
        """Which columns have numbers in them."""
        return [any(isinstance(value(line), (int, float)) for line in self.lines) for _, value in self.columns]

    def cells(self) -> list[list[str]]:
        """The text of each cell."""
        return [[table.text(value(line)) for _, value in self.columns] for line in self.lines]

    def markdown(self) -> str:
        """The same for a README."""
        body = table.markdown("", self.columns, self.lines).strip() if self.lines else ""
        notes = "\n".join(f"* {note}" for note in self.notes)
        return "\n\n".join(filter(None, [f"## {self.heading}", notes, body]))


def write(document: Document, folder: Path, compared: compare.Comparison | None = None) -> None:
    """Write the three files into ``folder``, which exists."""
    made = sections(document, compared)
    table.write_json(str(folder / "results.json"), document)
    heading = f"# {table.result_title(document)}"
    text = "\n\n".join([heading, *(section.markdown() for section in made)])
    (folder / "results.md").write_text(text + "\n", encoding="utf-8")
    (folder / "index.html").write_text(page(document, made), encoding="utf-8")


def page(document: Document, made: Sequence[Section]) -> str:
    """The HTML of one run, with a picture before its ratios, or its results."""
    place = next(number for number, section in enumerate(made) if section.heading in ("Ratios", "Results"))
    return render(table.result_title(document), made, Markup(plot.svg(document)), place)


def render(title: str, made: Sequence[Section], picture: Markup | None = None, before: int = 0) -> str:
    """The HTML, a picture before the section ``before``. All text is escaped, but the picture, which is made here."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    template = environment.get_template("report.html.jinja")
    return template.render(title=title, sections=made, picture=picture, picture_before=before)


def sections(document: Document, compared: compare.Comparison | None = None) -> list[Section]:
    """What the page says, in order; a part that has nothing to say is left out."""
    rows = document["rows"]
    parts = [_summary(document), _problems(document), _ratios(rows)]
    shapes = {row["size"]: f"{row['size']}: {table.shape_text(row)}, density {row['density']:.3g}" for row in rows}
    parts.append(Section("Results", list(shapes.values()), table.result_columns(rows), rows))
    if compared is not None:
        parts.append(Section(compared.title, compared.warnings, compare.COLUMNS, compared.lines))
    support = document["support"]
    said = ["For a call of a usual size, by automatic choice, as `python -m sparse_attn` prints it."]
    parts.append(Section("Support matrix", said, SUPPORT_COLUMNS, support) if support else None)
    return [part for part in parts if part is not None]


def _summary(document: Document) -> Section:
    header, rows = document["header"], document["rows"]
    facts = {label: header.get(name) for name, label in _FACTS} | {"device": device_of(header)}
    peers = {name: version for name, version in (header.get("peers") or {}).items() if version}
    lines = [*facts.items(), *peers.items()]
    notes = []
    if header["arch"] == "cpu":
        notes.append("Measured on a CPU: these times show that the package works, not how fast the product is.")
    timed = dict.fromkeys(row["timer"] for row in rows if row["timer"])
    notes += [f"Times by {_TIMERS.get(timer, timer)}. Medians of calls; p20 and p80 are quantiles." for timer in timed]
    unchecked = sum(row["status"] == "unchecked" for row in rows)
    notes.append(
        f"{unchecked} of {len(rows)} rows were timed without a check."
        if unchecked
        else "Every result was checked before it was timed (atol = rtol = 1e-2); a wrong one has no time."
    )
    ceilings = ceilings_of(header)
    notes += [f"C{str(ceilings)[1:]}."] if ceilings else []
    columns: tuple[Column, ...] = (("fact", lambda line: line[0]), ("value", lambda line: line[1]))
    return Section("Machine and method", notes, columns, [line for line in lines if line[1] is not None])


def _problems(document: Document) -> Section | None:
    """Rows without a time, or with a fault: they must be seen first."""
    shown = [row for row in document["rows"] if row["status"] in ("FAIL", "error", "refused") or row["reason"]]
    notes = list(document["header"].get("notes") or [])
    absent = (document["header"].get("peers_absent") or {}).items()
    notes += [f"not installed: {name}: {how}" for name, how in absent]
    columns: tuple[Column, ...] = (
        ("size", lambda row: row["size"]),
        ("backend", names_of),
        ("status", lambda row: row["status"]),
        ("why", lambda row: row["reason"]),
    )
    return Section("Failed, refused, absent", notes, columns, shown) if shown or notes else None


def _ratios(rows: Sequence[dict[str, Any]]) -> Section | None:
    lines = ratios(rows)
    notes = [
        "Within this run. Dense attention is another function, a yardstick: below 1 we are faster. Peers compute the "
        "same: above 1 we are faster."
    ]
    return Section("Ratios", notes, RATIO_COLUMNS, lines) if lines else None
