"""The command line of the benchmark: its words, and what they mean in points and backends."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import torch

import sparse_attn
from sparse_attn import registry
from sparse_attn.messages import unknown_backend

from . import cases
from .older_code import build_for
from .peers import PEERS, Peer

_SHAPE = ("B", "Hq", "Hk", "N", "M", "D", "Dv", "topk", "block_size", "q_offset")
_DTYPES = ("float16", "bfloat16", "float32")

_EPILOG = """\
Every result is checked before it is timed, with the tolerance of the contest's driver (atol = rtol = 1e-2): against
the backend `reference`, and the reference itself against dense attention in fp64, on a sample of queries. A wrong
result gets no times. Times are the median and the 20 % and 80 % quantiles of a call, in ms: by
triton.testing.do_bench where there is Triton and an accelerator (it flushes the L2 cache between runs), else by
torch.utils.benchmark.

Two counts of floating-point operations:
  nominal   2 * (D + Dv) * B * Hq * N * topk * block_size
            the contest's 4 * B * Hq * N * topk * block * D when Dv = D: counts padding (-1) and masked keys as work
  selected  2 * (D + Dv) * (number of (head, query, key) that the mask admits)
            the work that the problem needs: duplicate ids once, no key after the query, ids out of range ignored

exit status: 0; 1 if a result is wrong, a backend failed, or nothing could be timed; 2 if the command line is wrong.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of ``python -m bench``."""
    p = argparse.ArgumentParser(
        prog="python -m bench",
        description="Check and time sparse_attn on the points of the contest, or on a shape of your own.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = p.add_argument_group("what to measure")
    what.add_argument(
        "--size", nargs="+", action="extend", metavar="SIZE",
        help=f"{', '.join(cases.SIZES)}; several may be given (default: all on an accelerator, small medium on a CPU)",
    )  # fmt: skip
    what.add_argument("--set", choices=cases.SETS, default="statement", help="whose points (default: %(default)s)")
    what.add_argument(
        "--backend", nargs="+", action="extend", metavar="NAME",
        help="force these backends, one row each; all: every known one; auto: the package's table "
        f"(default: the package's choice, which {registry.ENVIRONMENT_VARIABLE} may override)",
    )  # fmt: skip
    what.add_argument(
        "--peers", nargs="*", metavar="NAME",
        help="other libraries' kernels on the same data, too, all or these: sdpa-cudnn and sdpa-flash, dense "
        "attention, which is another function and a yardstick; flex and fla, which compute the same and are checked",
    )  # fmt: skip
    what.add_argument(
        "--code-for", metavar="ARCH",
        help="run the code that Triton makes for an older GPU, as sm80, on the one at hand (default: its own)",
    )  # fmt: skip
    what.add_argument("--device", type=_device, help="(default: cuda, else npu, else cpu)")
    what.add_argument("--dtype", choices=_DTYPES, default="float16", help="of q, k, v (default: %(default)s)")
    what.add_argument(
        "--pattern", choices=cases.PATTERNS, default="random",
        help="random: the contest's, a random choice of causal blocks for each query. local: neighbouring queries "
        "share most blocks, as in trained models. dense: every causal block (default: %(default)s)",
    )  # fmt: skip
    what.add_argument("--seed", type=int, default=0, help="of the data (default: %(default)s)")
    instead = p.add_argument_group("instead of measuring").add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="show the points and the backends")
    instead.add_argument("--overhead", action="store_true", help="host time of a call whose backend does nothing")

    how = p.add_argument_group("how")
    how.add_argument("--no-check", action="store_true", help="time results without checking them")
    how.add_argument("--warmup", type=_not_negative, default=10, metavar="MS", help="(default: %(default)s ms)")
    how.add_argument(
        "--rep", type=_not_negative, default=50, metavar="MS", help="time for so long (default: %(default)s ms)"
    )
    for form in ("json", "csv"):
        how.add_argument(
            f"--{form}", nargs="?", const="-", metavar="FILE",
            help=f"write {form.upper()} to FILE, or to stdout, instead of the table, without one",
        )  # fmt: skip

    shape = p.add_argument_group(
        "shape",
        "Change these fields of the chosen points, or of medium when no --size is given. M follows N, and Dv D.",
    )
    for name in _SHAPE:
        kind = int if name == "q_offset" else _positive
        shape.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, metavar=name.upper())
    return p


def chosen_points(p: argparse.ArgumentParser, args: argparse.Namespace) -> list[cases.Point]:
    """The points to measure. Ends the program with a message if they make no sense."""
    shape = {name: getattr(args, name) for name in _SHAPE if getattr(args, name) is not None}
    if shape and (args.list or args.overhead):
        p.error("--list and --overhead have shapes of their own: leave the shape's flags out")
    sizes = _words(args.size)
    for size in sizes:
        if size not in cases.SIZES:
            p.error(f"--size {size}: {_near(size, cases.SIZES)}choose from {', '.join(cases.SIZES)}")
    if args.pattern == "dense" and "topk" in shape:
        p.error("--topk contradicts --pattern dense, which selects every block")
    if not sizes:
        sizes = ["medium"] if shape else ["small", "medium"] if args.device.type == "cpu" else ["all"]
    points = cases.points(args.set, sizes)
    if shape:
        changes = ",".join(f"{name}={value}" for name, value in shape.items())
        points = [
            cases.override(point, f"{point.size} {changes}" if args.size else "custom", **shape) for point in points
        ]
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


def chosen_peers(p: argparse.ArgumentParser, args: argparse.Namespace) -> list[Peer]:
    """The peers to measure. Ends the program with a message if one does not exist."""
    if args.peers is None:
        return []
    known = {peer.name: peer for peer in PEERS}
    names = _words(args.peers) or list(known)
    for name in names:
        if name not in known:
            p.error(f"--peers {name}: {_near(name, known)}choose from {', '.join(known)}")
    return [known[name] for name in names]


def check_files(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program now, not after all measurements, if the results could not be written."""
    if args.json == args.csv == "-":
        p.error("--json and --csv cannot both go to stdout: give one of them a FILE")
    if args.json is not None and args.json == args.csv:
        p.error(f"--json and --csv cannot both go to {args.json}: the second would replace the first")
    for target in {args.json, args.csv} - {None, "-"}:
        place = target if os.path.exists(target) else os.path.dirname(target) or "."
        if os.path.isdir(target) or not os.access(place, os.W_OK):
            p.error(f"cannot write {target}")


def use_older_code(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Have Triton build for ``--code-for``. Ends the program with a message if that cannot be."""
    if args.device.type != "cuda":
        p.error(f"--code-for needs a CUDA device, got {args.device}")
    try:
        build_for(args.code_for)
    except ValueError as error:
        p.error(f"--code-for: {error}")


def _words(arguments: Sequence[str] | None) -> list[str]:
    return [word for argument in arguments or () for word in argument.split(",") if word]


def _near(word: str, valid: Iterable[str]) -> str:
    near = get_close_matches(word, list(valid), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not there: {str(error).splitlines()[0]}") from None
    return device


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _not_negative(text: str) -> float:
    if not (value := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value
