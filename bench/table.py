"""How results are shown: a table for people, JSON and CSV for programs, and progress while one waits."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .cases import Point
from .results import Document, ceilings_of, device_of, names_of

# Wide enough that no cell is ever cut or wrapped where nobody is looking at a window.
_PIPED_WIDTH = 10_000
_COLOURS = {
    "PASS": "green",
    "FAIL": "bold red",
    "error": "red",
    "refused": "yellow",
    "unchecked": "yellow",
    "yardstick": "cyan",
    "holds": "green",
    "missed": "red",
}

Column = tuple[str, Callable[[Any], object]]


def show(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Any],
    notes: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print a table to stdout, and notes below it: uncoloured Markdown, never cut, when stdout is not a terminal.

    On a terminal that is too narrow, the columns headed ``spare`` become notes.
    """
    if not sys.stdout.isatty():
        print(markdown(title, columns, rows, notes))
        return
    console = _console(sys.stdout, terminal=True)
    table = _table(columns, rows, terminal=True)
    if table.__rich_measure__(console, console.options.update(max_width=_PIPED_WIDTH)).maximum > console.width:
        values = {heading: dict.fromkeys(text(value(row)) for row in rows) for heading, value in columns}
        notes = [*(f"{heading}: {', '.join(values[heading])}" for heading in spare if heading in values), *notes]
        table = _table([column for column in columns if column[0] not in spare], rows, terminal=True)
    console.print(title, style="bold")
    console.print(table, crop=False)
    for note in notes:
        console.print(note)


def markdown(title: str, columns: Sequence[Column], rows: Sequence[Any], notes: Sequence[str] = ()) -> str:
    """The table as Markdown below its title, and the notes below that."""
    console = _console(io.StringIO(), terminal=False)
    with console.capture() as drawn:
        console.print(_table(columns, rows, terminal=False))
    lines = [line.strip() for line in drawn.get().splitlines() if line.strip()]
    return "\n".join([title, "", *lines, "", *notes])


def _console(file: TextIO, terminal: bool) -> Console:
    return Console(
        file=file,
        width=None if terminal else _PIPED_WIDTH,
        force_terminal=terminal,
        no_color=None if terminal else True,
        markup=False,  # messages have brackets of their own: [B, Hq, N, D]
        highlight=False,
        emoji=False,
    )


def _table(columns: Sequence[Column], rows: Sequence[Any], terminal: bool) -> Table:
    style: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": 0}
    table = Table(**(style if terminal else {"box": box.MARKDOWN}))
    cells = [[value(row) for _, value in columns] for row in rows]
    for position, (heading, _) in enumerate(columns):
        column = [line[position] for line in cells]
        number = any(isinstance(x, (int, float)) for x in column)
        heading = heading.replace(" ", "\n") if number and terminal else heading
        # Text wraps between words; a number that is wrapped or cut would be another number.
        longest = max(len(word) for x in (heading, *map(text, column)) for word in x.split())
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, min_width=longest)
    for line in cells:
        words = [text(x) if terminal else text(x).replace("|", "\\|") for x in line]
        table.add_row(*(Text(word, style=_COLOURS.get(word, "")) for word in words))
    return table


def text(value: object) -> str:
    """A cell: numbers to four digits, a dash for None."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 0.1 else f"{value:.2g}"
    return "-" if value is None else str(value)


def _of(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda row: row[name]


RESULT_COLUMNS: tuple[Column, ...] = (
    ("size", _of("size")),
    ("backend", names_of),
    ("status", _of("status")),
    ("ms", _of("median_ms")),
    ("p20", _of("p20_ms")),
    ("p80", _of("p80_ms")),
    ("TFLOP/s selected", _of("tflops_selected")),
    ("TFLOP/s nominal", _of("tflops_nominal")),
    ("% of matmul", _of("matmul_percent")),
    ("% of copy", _of("copy_percent")),
    ("bound by", _of("bound_by")),
    ("cold start s", _of("cold_start_s")),
    ("cached start s", _of("cached_start_s")),
    ("max error", _of("max_error")),
    ("checked against", _of("checked_against")),
    ("timer", _of("timer")),
    ("L2", _of("l2")),
)
_ASKED_FOR = ("% of matmul", "% of copy", "bound by", "cold start s", "cached start s")


def result_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """``RESULT_COLUMNS`` without those that were not asked for."""
    return [
        (heading, value)
        for heading, value in RESULT_COLUMNS
        if heading not in _ASKED_FOR or any(value(row) is not None for row in rows)
    ]


def show_results(document: Document) -> None:
    """Print the table of measurements, the points' shapes, and why rows without times have none."""
    rows = document["rows"]
    notes = result_notes(document)
    show(result_title(document), result_columns(rows), rows, notes, spare=("checked against", "timer", "L2"))


def result_title(document: Document) -> str:
    """What was measured, where."""
    first = document["rows"][0]
    where = f"{device_of(document['header'])}, points of the {first['set']}"
    return f"sparse_attention on {where}, {first['pattern']} index, {first['dtype']}"


def result_notes(document: Document) -> list[str]:
    """The shapes, the ceilings, and every reason that a row has, once for all points on which it is the same."""
    header, rows = document["header"], document["rows"]
    notes = [f"{row['size']}: {shape_text(row)}" for row in {(row["set"], row["size"]): row for row in rows}.values()]
    ceilings = ceilings_of(header)
    notes += [str(ceilings)] if ceilings else []
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["reason"]:
            reasons.setdefault((row["status"], names_of(row), row["reason"]), []).append(row["size"])
    notes += [f"{status}: {name} on {', '.join(sizes)}: {why}" for (status, name, why), sizes in reasons.items()]
    notes += [f"not installed: {name}: {how}" for name, how in (header.get("peers_absent") or {}).items()]
    return notes + list(header.get("notes") or [])


def shape_text(row: dict[str, Any]) -> str:
    """The shape as it would be given on the command line, without what says nothing."""
    shape = {field.name: row[field.name] for field in fields(Point) if field.name not in ("set", "size")}
    return " ".join(f"{name}={value}" for name, value in shape.items() if (name, value) != ("q_offset", 0))


def write_json(target: str, document: dict[str, Any]) -> None:
    """Write to the file ``target``, or to stdout for ``-``. Numbers that JSON lacks (NaN, infinities) become null."""
    with _opened(target) as file:
        json.dump(_finite(document), file, indent=2, allow_nan=False)
        file.write("\n")


def write_csv(target: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write to the file ``target``, or to stdout for ``-``."""
    with _opened(target) as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _opened(target: str) -> Iterator[TextIO]:
    if target == "-":
        yield sys.stdout
    else:
        with open(target, "w", encoding="utf-8", newline="") as file:
            yield file


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being measured, if anybody is looking; call the result with a text before each step."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total, completed=-1)

        def step(text: str) -> None:
            bar.update(task, description=text, advance=1)

        yield step
