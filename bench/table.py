"""How results are shown: a table for people, JSON and CSV for programs, and progress while one waits."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .cases import Point
from .measure import Row

# Wide enough that no cell is ever cut or wrapped where nobody is looking at a window.
_PIPED_WIDTH = 10_000
_COLOURS = {
    "PASS": "green",
    "FAIL": "bold red",
    "error": "red",
    "refused": "yellow",
    "unchecked": "yellow",
    "yardstick": "cyan",
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
    terminal = sys.stdout.isatty()
    console = Console(
        file=sys.stdout,
        width=None if terminal else _PIPED_WIDTH,
        force_terminal=terminal,
        no_color=None if terminal else True,
        markup=False,  # messages have brackets of their own: [B, Hq, N, D]
        highlight=False,
        emoji=False,
    )
    table = _table(columns, rows, terminal)
    if table.__rich_measure__(console, console.options.update(max_width=_PIPED_WIDTH)).maximum > console.width:
        values = {heading: dict.fromkeys(_text(value(row)) for row in rows) for heading, value in columns}
        notes = [*(f"{heading}: {', '.join(values[heading])}" for heading in spare), *notes]
        table = _table([column for column in columns if column[0] not in spare], rows, terminal)
    if terminal:
        console.print(title, style="bold")
        console.print(table, crop=False)
    else:
        with console.capture() as drawn:
            console.print(table)
        lines = [line.strip() for line in drawn.get().splitlines() if line.strip()]
        print(title, "", *lines, "", sep="\n")
    for note in notes:
        console.print(note, soft_wrap=not terminal)


def _table(columns: Sequence[Column], rows: Sequence[Any], terminal: bool) -> Table:
    style: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": 0}
    table = Table(**(style if terminal else {"box": box.MARKDOWN}))
    cells = [[value(row) for _, value in columns] for row in rows]
    for position, (heading, _) in enumerate(columns):
        column = [line[position] for line in cells]
        number = any(isinstance(x, (int, float)) for x in column)
        heading = heading.replace(" ", "\n") if number and terminal else heading
        # Text wraps between words; a number that is wrapped or cut would be another number.
        longest = max(len(word) for x in (heading, *map(_text, column)) for word in x.split())
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, min_width=longest)
    for line in cells:
        table.add_row(*(Text(_text(x), style=_COLOURS.get(_text(x), "")) for x in line))
    return table


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 0.1 else f"{value:.2g}"
    return "-" if value is None else str(value)


RESULT_COLUMNS: tuple[Column, ...] = (
    ("size", lambda row: row.point.size),
    ("backend", lambda row: row.resolved_backend or row.requested_backend),
    ("status", lambda row: row.status),
    ("ms", lambda row: row.median_ms),
    ("p20", lambda row: row.p20_ms),
    ("p80", lambda row: row.p80_ms),
    ("TFLOP/s selected", lambda row: row.tflops_selected),
    ("TFLOP/s nominal", lambda row: row.tflops_nominal),
    ("max error", lambda row: row.max_error),
    ("checked against", lambda row: row.checked_against),
    ("timer", lambda row: row.timer),
)


def show_results(rows: Sequence[Row], device: str) -> None:
    """Print the table of measurements, the points' shapes, and why rows without times have none."""
    points = {(row.point.set, row.point.size): row.point for row in rows}
    notes = [f"{point.size}: {shape_text(point)}" for point in points.values()]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.reason:
            key = (row.status, row.resolved_backend or row.requested_backend, row.reason)
            reasons.setdefault(key, []).append(row.point.size)
    notes += [f"{status}: {name} on {', '.join(sizes)}: {why}" for (status, name, why), sizes in reasons.items()]
    first = rows[0]
    title = f"sparse_attention on {device}, points of the {first.point.set}, {first.pattern} index, {first.dtype}"
    show(title, RESULT_COLUMNS, rows, notes, spare=("checked against", "timer"))


def shape_text(point: Point) -> str:
    """The shape as it would be given on the command line, without what says nothing."""
    shape = {name: value for name, value in point.shape.items() if (name, value) != ("q_offset", 0)}
    return " ".join(f"{name}={value}" for name, value in shape.items())


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
