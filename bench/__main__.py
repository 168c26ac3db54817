"""``python -m bench``: check and time sparse_attn."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import sparse_attn
from sparse_attn import registry
from sparse_attn.device import describe

from . import cases, measure, options
from .environment import default_device, header
from .overhead import measure_overhead
from .peers import Peer

try:
    from . import table
except ModuleNotFoundError as error:
    if error.name != "rich":
        raise
    print("needs rich: pip install 'sparse_attn[bench]'", file=sys.stderr)
    raise SystemExit(2) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with these arguments (default: the command line's) and return the exit status."""
    parser = options.parser()
    args = parser.parse_args(argv)
    args.device = args.device or default_device()
    points, backends = options.chosen_points(parser, args), options.chosen_backends(parser, args)
    others = options.chosen_peers(parser, args)
    options.check_files(parser, args)
    if args.device.index is not None and args.device.type in ("cuda", "npu"):
        getattr(torch, args.device.type).set_device(args.device)  # timers synchronise the current device
    if args.code_for is not None:
        options.use_older_code(parser, args)
    if args.list:
        return _list(args)
    if args.overhead:
        return _overhead(args)
    if args.device.type == "cpu":
        print("On a CPU: these times show that the package works, not how fast the product is.", file=sys.stderr)
    rows = _measure(args, points, backends, others)
    if _human(args):
        where = str(describe(args.device))
        table.show_results(rows, f"{where}, code for {args.code_for}" if args.code_for else where)
    _write(args, "rows", [row.flat() for row in rows])
    bad = any(row.status in ("FAIL", "error") for row in rows) or all(row.median_ms is None for row in rows)
    return int(bad)


def _measure(
    args: argparse.Namespace, points: Sequence[cases.Point], backends: Sequence[str | None], others: Sequence[Peer]
) -> list[measure.Row]:
    rows = []
    with table.progress(len(points) * (1 + len(backends) + len(others))) as step:
        for point in points:
            names = [*(name or "auto" for name in backends), *(peer.name for peer in others)]
            mine = [measure.Row(point, args.dtype, args.pattern, args.seed, name) for name in names]
            rows += mine
            step(f"{point.size}: data")
            try:
                case = cases.make_case(point, args.pattern, getattr(torch, args.dtype), args.device, args.seed)
                flop = measure.selected_flop(point, case.index)
            except Exception as error:  # out of memory perhaps: the other points are still worth measuring
                for row in mine:
                    row.reason = measure.one_line(error)
                continue
            check = None if args.no_check else measure.Check(case)
            for row, name in zip(mine, backends, strict=False):
                step(f"{point.size}: {name or 'auto'}")
                measure.measure(case, row, name, check, flop, args.warmup, args.rep)
                _free(args.device)
            for row, peer in zip(mine[len(backends) :], others, strict=True):
                step(f"{point.size}: {peer.name}")
                measure.measure_peer(case, row, peer, check, flop, args.warmup, args.rep)
                _free(args.device)
            del case, check
            _free(args.device)
    return rows


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()


def _list(args: argparse.Namespace) -> int:
    lines: list[dict[str, Any]] = []
    for point in cases.POINTS:
        if args.pattern == "dense":
            point = cases.override(point, point.size, topk=point.num_blocks)
        selected = measure.selected_flop(point, cases.make_index(point, args.pattern, args.device, args.seed))
        counts = {"selected_tflop": selected / 1e12, "nominal_tflop": measure.nominal_flop(point) / 1e12}
        lines.append({**asdict(point), "density": point.density, **counts})
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
