"""``python -m bench``: check and time sparse_attn."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import sparse_attn
from sparse_attn import registry
from sparse_attn.device import describe

from . import cases, counts, options
from .arguments import parser as command_line
from .environment import default_device, header
from .overhead import measure_overhead
from .results import Document, is_bad, load, support_matrix

try:
    from . import compare, table
except ModuleNotFoundError as error:
    if error.name != "rich":
        raise
    print("needs rich: pip install 'sparse_attn[bench]'", file=sys.stderr)
    raise SystemExit(2) from None

from .run import Plan, execute


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with these arguments (default: the command line's) and return the exit status."""
    parser = command_line()
    args = parser.parse_args(argv)
    options.check_together(parser, args)
    options.check_files(parser, args)
    old, document = _stored(parser, "--compare", args.compare), _stored(parser, "--from", args.stored)
    if document is None:
        args.device = args.device or default_device()
        plan = _plan(parser, args)
        if args.list:
            return _list(args)
        if args.overhead:
            return _overhead(args)
        if args.device.type == "cpu":
            print("On a CPU: these times show that the package works, not how fast the product is.", file=sys.stderr)
        with table.progress(plan.steps) as step:
            document = execute(plan, step)
        if args.json is not None or args.report is not None:
            document["support"] = support_matrix()  # imports every backend, which may take seconds
    threshold = compare.THRESHOLD if args.threshold is None else args.threshold
    compared = None if old is None else compare.compare(old, document, threshold)
    if _human(args):
        table.show_results(document)
        if compared is not None:
            print()
            table.show(compared.title, compare.COLUMNS, compared.lines, compared.warnings)
    elif compared is not None:  # stdout is a program's
        worse = [f"{line['verdict']}: {line['backend']} on {line['size']}" for line in compared.worse]
        print(*compared.warnings, *worse, sep="\n", file=sys.stderr)
    _write_all(args, document, compared)
    return int(is_bad(document["rows"]) or (compared is not None and bool(compared.worse)))


def _stored(parser: argparse.ArgumentParser, option: str, path: str | None) -> Document | None:
    try:
        return None if path is None else load(path)
    except ValueError as error:
        parser.error(f"{option} {error}")


def _plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Plan:
    points, backends = options.chosen_points(parser, args), options.chosen_backends(parser, args)
    peers, absent = options.chosen_peers(parser, args)
    options.check_timer(parser, args)
    if args.device.index is not None and args.device.type in ("cuda", "npu"):
        getattr(torch, args.device.type).set_device(args.device)  # timers synchronise the current device
    if args.code_for is not None:
        options.use_older_code(parser, args)
    return Plan(
        args.device, points, backends, peers, absent, args.dtype, args.pattern, args.seed, not args.no_check,
        not args.no_roofline, args.cold_start, args.warmup, args.rep, args.timer, args.code_for,
    )  # fmt: skip


def _write_all(args: argparse.Namespace, document: Document, compared: compare.Comparison | None) -> None:
    if args.json is not None:
        table.write_json(args.json, document)
    if args.csv is not None:
        table.write_csv(args.csv, document["rows"])
    if args.plot is not None or args.report is not None:
        from . import plot  # matplotlib: a second to import

        if args.plot is not None:
            plot.save(document, args.plot)
        if args.report is not None:
            from . import report

            report.write(document, Path(args.report), compared)


def _list(args: argparse.Namespace) -> int:
    lines: list[dict[str, Any]] = []
    for point in cases.POINTS:
        if args.pattern == "dense":
            point = cases.override(point, point.size, topk=point.num_blocks)
        selected = counts.selected_flop(point, cases.make_index(point, args.pattern, args.device, args.seed))
        flop = {"selected_tflop": selected / 1e12, "nominal_tflop": counts.nominal_flop(point) / 1e12}
        lines.append({**asdict(point), "density": point.density, **flop})
    if _human(args):
        notes = [f"Backends on {describe(args.device)}, all of which --backend accepts:"]
        notes += [
            f"  {name}: {registry.unavailable_on(name, describe(args.device)) or 'can run here'}"
            for name in sparse_attn.backend_specs()
        ]
        columns = [
            (key.replace("_", " ").replace("tflop", "TFLOP"), _field(key))
            for key in lines[0]
            if key not in ("Dv", "q_offset")
        ]
        table.show(f"The points of the contest, with a {args.pattern} index", columns, lines, notes)
    _write(args, "points", lines)
    return 0


def _overhead(args: argparse.Namespace) -> int:
    rows = measure_overhead(args.device, getattr(torch, args.dtype), args.seed)
    if _human(args):
        columns = (("a call with", _field("what")), ("us", _field("us")), ("target: under", _field("target_us")))
        table.show(
            f"Host time of sparse_attention on {describe(args.device)}, backend that does nothing", columns, rows
        )
    _write(args, "overhead", rows)
    return 0


def _field(key: str) -> Any:
    return lambda line: line[key]


def _human(args: argparse.Namespace) -> bool:
    return "-" not in (args.json, args.csv)


def _write(args: argparse.Namespace, what: str, rows: list[dict[str, Any]]) -> None:
    if args.json is not None:
        table.write_json(args.json, {"header": {**header(args.device), "code_for": args.code_for}, what: rows})
    if args.csv is not None:
        table.write_csv(args.csv, rows)


if __name__ == "__main__":
    sys.exit(main())
