"""What the command line means: points, backends, peers, and files that can be written. Ends the program if nothing."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

import sparse_attn
from sparse_attn import registry
from sparse_attn.messages import unknown_backend

from . import cases, timers
from .arguments import SHAPE
from .older_code import build_for
from .peers import PEERS, Peer

# What says what and how to measure: in vain where nothing is measured.
_MEASURING = (
    "set", "size", "sweep", "backend", "peers", "code_for", "device", "dtype", "pattern", "seed", "no_check", "warmup",
    "rep", "timer", "no_roofline", "cold_start", *SHAPE,
)  # fmt: skip
_OF_ROWS = ("sweep", "timer", "no_roofline", "cold_start", "plot", "report", "compare", "threshold")
PICTURES = (".png", ".svg", ".pdf")


def check_together(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program if options contradict each other, or ask for what is not installed."""
    given = {name for name in (*_MEASURING, *_OF_ROWS) if getattr(args, name) != p.get_default(name)}
    if args.list or args.overhead:
        if given & set(SHAPE):
            p.error("--list and --overhead have shapes of their own: leave the shape's flags out")
        if given & set(_OF_ROWS):
            p.error(f"--list and --overhead time no points: leave out {_flags(given & set(_OF_ROWS))}")
    if args.stored is not None and given & set(_MEASURING):
        p.error(f"--from measures nothing: leave out {_flags(given & set(_MEASURING))}")
    if args.threshold is not None and args.compare is None:
        p.error("--threshold needs --compare OLD.json")
    if args.cold_start and args.code_for is not None:
        p.error("--cold-start measures the GPU's own code: leave out --code-for")
    if args.plot is not None and Path(args.plot).suffix.lower() not in PICTURES:
        p.error(f"--plot needs a file that ends in {', '.join(PICTURES)}, got {args.plot}")
    for option, module in (("plot", "matplotlib"), ("report", "matplotlib"), ("report", "jinja2")):
        if getattr(args, option) is not None and importlib.util.find_spec(module) is None:
            p.error(f"--{option} needs {module}: pip install 'sparse_attn[bench]'")


def _flags(names: Iterable[str]) -> str:
    return ", ".join(sorted(f"--{name.replace('_', '-')}" for name in names))


def chosen_points(p: argparse.ArgumentParser, args: argparse.Namespace) -> list[cases.Point]:
    """The points to measure. Ends the program with a message if they make no sense."""
    shape = {name: getattr(args, name) for name in SHAPE if getattr(args, name) is not None}
    sizes = _words(args.size)
    for size in sizes:
        if size not in cases.SIZES:
            p.error(f"--size {size}: {_near(size, cases.SIZES)}choose from {', '.join(cases.SIZES)}")
    sweeps: list[tuple[str, list[int]]] = args.sweep or []
    if args.pattern == "dense" and "topk" in {*shape, *(name for name, _ in sweeps)}:
        p.error("--topk and its sweep contradict --pattern dense, which selects every block")
    if not sizes:
        own = shape or sweeps
        sizes = ["medium"] if own else ["small", "medium"] if args.device.type == "cpu" else ["all"]
    points = cases.points(args.set, sizes)
    if shape:
        changes = ",".join(f"{name}={value}" for name, value in shape.items())
        points = [
            cases.override(point, f"{point.size} {changes}" if args.size else "custom", **shape) for point in points
        ]
    if sweeps:
        swept: dict[tuple[object, ...], cases.Point] = {}
        for point in points:
            for name, values in sweeps:
                for value in values:
                    changed = cases.override(point, f"{point.size} {name}={value}", **{name: value})
                    swept.setdefault((point.size, *changed.shape.values()), changed)  # in two sweeps: one point
        points = list(swept.values())
    for point in points:
        if point.Hq % point.Hk:
            p.error(f"{point.size}: Hq must be a multiple of Hk, got Hq={point.Hq} and Hk={point.Hk}")
    if args.pattern == "dense":
        points = [cases.override(point, point.size, topk=point.num_blocks) for point in points]
    return points


def chosen_backends(p: argparse.ArgumentParser, args: argparse.Namespace) -> list[str | None]:
    """The backends to force, None for the package's choice. Ends the program with a message if one does not exist."""
    known = list(sparse_attn.backend_specs())
    names = [name for word in _words(args.backend) for name in (known if word == "all" else [word])]
    for name in names:
        if name not in (*known, "auto"):
            p.error(unknown_backend(name, f"--backend {name}", known))
    override = registry.current_override()
    if not names and override is not None and override.name not in known:
        p.error(unknown_backend(override.name, override.source, known))
    return [*dict.fromkeys(names)] or [None]


def chosen_peers(p: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[list[Peer], list[Peer]]:
    """The peers to measure, and those left out. Ends the program with a message if one does not exist.

    Without names: all that are installed and made for the device, and those that are not installed.
    """
    if args.peers is None:
        return [], []
    known = {peer.name: peer for peer in PEERS}
    names = _words(args.peers)
    for name in names:
        if name not in known:
            p.error(f"--peers {name}: {_near(name, known)}choose from {', '.join(known)}")
    if names:
        return [known[name] for name in dict.fromkeys(names)], []
    fitting = [peer for peer in PEERS if not peer.devices or args.device.type in peer.devices]
    return [peer for peer in fitting if peer.installed], [peer for peer in fitting if not peer.installed]


def check_timer(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with a message if ``--timer`` cannot time calls on the device."""
    if args.timer is not None:
        why = timers.unavailable(args.timer, args.device)
        if why is not None:
            p.error(f"--timer {args.timer} {why}")


def check_files(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program now, not after all measurements, if the results could not be written."""
    if args.json == args.csv == "-":
        p.error("--json and --csv cannot both go to stdout: give one of them a FILE")
    targets = [target for target in (args.json, args.csv, args.plot) if target not in (None, "-")]
    for target in targets:
        if targets.count(target) > 1:
            p.error(f"two results cannot both go to {target}: the second would replace the first")
        place = target if os.path.exists(target) else os.path.dirname(target) or "."
        if os.path.isdir(target) or not os.access(place, os.W_OK):
            p.error(f"cannot write {target}")
    if args.report is not None:
        try:
            os.makedirs(args.report, exist_ok=True)
        except OSError as error:
            p.error(f"--report needs a folder, and cannot make {args.report}: {error.strerror}")
        if not os.access(args.report, os.W_OK):
            p.error(f"cannot write in {args.report}")


def use_older_code(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Have Triton build for ``--code-for``. Ends the program with a message if that cannot be."""
    if args.device.type != "cuda":
        p.error(f"--code-for needs a CUDA device, got {args.device}")
    try:
        build_for(args.code_for)
    except ValueError as error:
        p.error(f"--code-for: {error}")


def _words(values: Sequence[str] | None) -> list[str]:
    """The words of an option that takes several, with commas or blanks between them."""
    return [word for value in values or () for word in value.split(",") if word]


def _near(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""
