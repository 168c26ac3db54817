"""Pictures of one run: time and TFLOP/s against length, against density, and by point, a line for each backend.

What is drawn follows from the rows. Rows whose shapes differ in N alone (M, where it follows N, aside), or in topk
alone, are a sweep: a pair of panels for each, with the 20 % to 80 % quantiles of times as a band. Other rows are
compared point by point. Lengths, densities and times are on logarithmic axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from .results import Document, ceilings_of, device_of, names_of

Row = dict[str, Any]

# Okabe and Ito's colours, which people with any colour vision tell apart; black and grey are for yardsticks.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREYS = ("#000000", "#7F7F7F", "#4D4D4D", "#A6A6A6")
_MARKERS = "osD^vP"
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.fonttype": "none",  # text stays text: smaller, and can be found and read aloud
    "svg.hashsalt": "sparse_attn",
}
_SWEPT = ("N", "topk")


@dataclass(frozen=True)
class Panel:
    """Rows drawn together. ``field`` is what differs among them: ``"N"``, ``"topk"``, or None: compared by point."""

    field: str | None
    rows: list[Row]

    @property
    def subtitle(self) -> str:
        """What is fixed."""
        if self.field is None:
            return "by point"
        first = self.rows[0]
        follows = ("M",) if self.field == "N" and first["M"] == first["N"] else ()
        shape = ["B", "Hq", "Hk", *(["N"] if self.field == "topk" else []), "M", "D", "topk", "block_size"]
        if first["M"] == first["N"] and "M" in shape:
            shape.remove("M")
        fixed = " ".join(f"{name}={first[name]}" for name in shape if name not in (self.field, *follows))
        offset = f" q_offset={first['q_offset']}" if first["q_offset"] else ""
        return f"{fixed}{offset}, {first['pattern']} index"


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Sort the rows that have a time into sweeps and the rest. A row may be part of a sweep of each field."""
    timed = [row for row in rows if row["median_ms"] is not None]
    found, used = [], set()
    for field in _SWEPT:
        families: dict[tuple[Any, ...], list[Row]] = {}
        for row in timed:
            families.setdefault(_family(row, field), []).append(row)
        for members in families.values():
            if len({row[field] for row in members}) > 1:
                found.append(Panel(field, members))
                used |= {id(row) for row in members}
    rest = [row for row in timed if id(row) not in used]
    return [*found, *([Panel(None, rest)] if rest else [])]


def _family(row: Row, field: str) -> tuple[Any, ...]:
    """What rows have in common that differ in ``field`` alone."""
    square = row["M"] == row["N"]
    shape = {name: row[name] for name in ("B", "Hq", "Hk", "N", "M", "D", "Dv", "topk", "block_size", "q_offset")}
    shape.pop(field)
    if field == "N" and square:
        shape["M"] = None
    if row["pattern"] == "dense":  # topk follows N
        shape["topk"] = None
    return (square, row["dtype"], row["pattern"], *shape.values())


def draw(document: Document) -> Figure:
    """The picture of all rows that have a time; says so if none has."""
    rows = document["rows"]
    shown = panels(rows)
    styles = _styles(rows)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10.5, 1.1 + 3.5 * max(1, len(shown))), layout="constrained")
        heading = f"sparse_attention on {device_of(document['header'])}, {rows[0]['dtype']}"
        figure.suptitle(f"{heading}\n{_versions(document['header'])}", fontsize=10)
        if not shown:
            figure.text(0.5, 0.4, "no row has a time", ha="center")
            return figure
        grid: Any = figure.subplots(len(shown), 2, squeeze=False)
        for panel, (left, right) in zip(shown, grid, strict=True):
            _one(left, panel, styles, "median_ms", "ms", ("p20_ms", "p80_ms"))
            _time_axis(left)
            _one(right, panel, styles, "tflops_selected", "TFLOP/s, selected work", None)
            _rate_axis(right, document)
            left.set_title(panel.subtitle, loc="left", fontsize=9)
        handles: dict[str, Any] = {}
        for axes in grid.flat:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(6, len(handles)))
    return figure


def save(document: Document, path: str) -> None:
    """Draw to a file, in the format that its ending names."""
    with matplotlib.rc_context(_STYLE):
        draw(document).savefig(path, dpi=150)


def svg(document: Document) -> str:
    """The picture as an ``<svg>`` element that refers to nothing outside itself."""
    text = StringIO()
    with matplotlib.rc_context(_STYLE):
        draw(document).savefig(text, format="svg", metadata={"Date": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    start, end = drawn.find("<metadata>"), drawn.find("</metadata>")
    return drawn if start < 0 else drawn[:start] + drawn[end + len("</metadata>") :]


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Colour, line and marker of each name: ours solid, peers dashed, yardsticks grey and dotted."""
    kinds = {names_of(row): row["kind"] for row in rows}
    styles, colours, greys = {}, 0, 0
    for number, (name, kind) in enumerate(kinds.items()):
        if kind == "yardstick":
            colour, greys = _GREYS[greys % len(_GREYS)], greys + 1
        else:
            colour, colours = _COLOURS[colours % len(_COLOURS)], colours + 1
        line = {"backend": "-", "peer": "--", "yardstick": ":"}[kind]
        styles[name] = {"color": colour, "linestyle": line, "marker": _MARKERS[number % len(_MARKERS)]}
    return styles


def _one(
    axes: Axes, panel: Panel, styles: dict[str, Any], value: str, label: str, band: tuple[str, str] | None
) -> None:
    axes.set_ylabel(label)
    points = list(dict.fromkeys(row["size"] for row in panel.rows))
    x: Callable[[Row], float] = {
        "N": lambda row: row["N"],
        "topk": lambda row: row["density"],
        None: lambda row: points.index(row["size"]),
    }[panel.field]
    drawn = [name for name in styles if any(names_of(row) == name for row in panel.rows)]
    for number, name in enumerate(drawn):
        found: dict[float, Row] = {}
        for row in panel.rows:
            if names_of(row) == name and row[value] is not None:
                found.setdefault(x(row), row)  # chosen by the package and forced are one
        mine = [found[place] for place in sorted(found)]
        if not mine:
            continue
        aside = 0.0 if panel.field else (number - (len(drawn) - 1) / 2) * 0.6 / len(drawn)  # beside each other
        places = [x(row) + aside for row in mine]
        style = styles[name] if panel.field else {**styles[name], "linestyle": "none"}
        label = f"{name} (dense)" if mine[0]["kind"] == "yardstick" else name
        axes.plot(
            places, [row[value] for row in mine], label=label, markersize=5, linewidth=1.6, clip_on=False, **style
        )
        if band and panel.field:
            low, high = ([row[end] for row in mine] for end in band)
            axes.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)
    _length_axis(axes, panel, x) if panel.field else _point_axis(axes, points)


def _point_axis(axes: Axes, points: Sequence[str]) -> None:
    axes.set_xticks(range(len(points)), points)
    axes.set_xlim(-0.5, len(points) - 0.5)
    axes.grid(False, axis="x")


def _length_axis(axes: Axes, panel: Panel, x: Callable[[Row], float]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({x(row) for row in panel.rows})))
    axes.xaxis.set_minor_locator(NullLocator())
    if panel.field == "N":
        axes.set_xlabel("sequence length N")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: _length(tick)))
    else:
        topk = {row["density"]: row["topk"] for row in panel.rows}
        axes.set_xlabel("density: share of the causal blocks that is selected (topk)")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:.2g}\n({topk.get(tick, '')})"))


def _time_axis(axes: Axes) -> None:
    """Logarithmic, with plain numbers at 1, 2 and 5 of each decade; at 1 alone where there are many decades."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = (1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:.12g}"))


def _rate_axis(axes: Axes, document: Document) -> None:
    ceilings = ceilings_of(document["header"])
    if ceilings is not None:
        label = f"matmul ceiling, {ceilings.matmul_tflops:.3g} TFLOP/s"
        axes.axhline(ceilings.matmul_tflops, color="#B22222", linewidth=1, linestyle=(0, (1, 3)), label=label)
    axes.set_ylim(bottom=0)


def _length(value: float) -> str:
    n = int(value)
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def _versions(header: dict[str, Any]) -> str:
    named = [f"{name} {header[name]}" for name in ("torch", "triton", "tilelang") if header.get(name)]
    commit = [f"commit {header['commit'][:12]}"] if header.get("commit") else []
    return ", ".join([*named, *commit, str(header.get("date") or "")[:10]])
