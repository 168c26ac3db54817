"""The words of the command line, and what ``--help`` says of them; :mod:`bench.options` says what they mean."""

from __future__ import annotations

import argparse

import torch

from sparse_attn import registry

from . import cases, timers
from .peers import PEERS
from .roofline import EXPLAINS_PERCENT, LAUNCH_US

SHAPE = ("B", "Hq", "Hk", "N", "M", "D", "Dv", "topk", "block_size", "q_offset")
_DTYPES = ("float16", "bfloat16", "float32")

_EPILOG = f"""\
Every result is checked before it is timed, with the tolerance of the contest's driver (atol = rtol = 1e-2): against
the backend `reference`; the reference itself, and peers that compute dense attention, against dense attention in
fp64, on a sample of queries. A wrong result gets no times. Times are the median and the 20 % and 80 % quantiles of a
call, in ms. What took them and what was in the L2 cache is in each row:
  do_bench  cold  triton.testing.do_bench, which flushes L2 before each call. Default where there is Triton and an
                  accelerator
  graph     warm  many calls in one CUDA graph, replayed: the device alone, without the host's part of a call
  graph-cold  cold  the same with L2 flushed before each call, less the time of as many flushes
  events    warm  the device's events around each call; where launching takes longer than the kernel, it is launching
  torch.utils.benchmark  warm  the host's clock around each call. Default elsewhere, and the only one on a CPU

Two counts of floating-point operations:
  nominal   2 * (D + Dv) * B * Hq * N * topk * block_size
            the contest's 4 * B * Hq * N * topk * block * D when Dv = D: counts padding (-1) and masked keys as work
  selected  2 * (D + Dv) * (number of (head, query, key) that the mask admits)
            the work that the problem needs: duplicate ids once, no key after the query, ids out of range ignored

Roofline: two ceilings are measured once a run, on its device and in its dtype: a matrix product (8192^3; 512^3 on a
CPU) and a device copy (1 GiB, read and written; 64 MiB on a CPU). They are below the table and in the JSON's header.
  % of matmul  selected FLOP / time, of the product's FLOP/s
  % of copy    bytes that have to move / time, of the copy's bytes/s: q, out and index once, and once those keys of
               k and v that some query sees
  bound by     compute or memory, the larger of both, if it is at least {EXPLAINS_PERCENT:.0f} %; below that launch, if
               the call takes less than {LAUNCH_US:.0f} us, else neither
Dense attention is another function: of it there are times only.

The JSON has `header`, `rows` and `support` (what `python -m sparse_attn` prints). A row has the point's fields, its
density (share of the causal blocks that is selected), dtype, pattern, seed, requested_backend, kind (backend, peer,
yardstick: dense attention), resolved_backend, status, reason, median_ms, p20_ms, p80_ms, tflops_selected,
tflops_nominal, max_error, checked_against, timer, l2, compulsory_bytes, matmul_percent, copy_percent, bound_by,
first_call_s (in this process, caches as they are), cold_start_s and cached_start_s. What is not known is null.

exit status: 0; 1 if a result is wrong, a backend failed, nothing could be timed, or --compare found something slower
or missing; 2 if the command line is wrong.
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
        "--sweep", action="append", type=_sweep, metavar="FIELD=A,B,...",
        help="in place of each chosen point: it with each of these values of one field of the shape, as N=1k,4k,16k or "
        "topk=4,16,64. Several sweeps: one after the other, not their product",
    )  # fmt: skip
    what.add_argument(
        "--backend", nargs="+", action="extend", metavar="NAME",
        help="force these backends, one row each; all: every known one; auto: the package's table "
        f"(default: the package's choice, which {registry.ENVIRONMENT_VARIABLE} may override)",
    )  # fmt: skip
    dense = ", ".join(peer.name for peer in PEERS if not peer.same_function)
    same = ", ".join(peer.name for peer in PEERS if peer.same_function)
    what.add_argument(
        "--peers", nargs="*", metavar="NAME",
        help=f"other libraries' kernels on the same data, too, all that are installed or these: {dense}, dense "
        f"attention, which is another function and a yardstick; {same}, which compute the same",
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
    instead.add_argument(
        "--from", dest="stored", metavar="FILE", help="take the results that --json or --report wrote to FILE"
    )

    how = p.add_argument_group("how")
    how.add_argument("--no-check", action="store_true", help="time results without checking them")
    how.add_argument("--warmup", type=_not_negative, default=10, metavar="MS", help="(default: %(default)s ms)")
    how.add_argument(
        "--rep", type=_not_negative, default=50, metavar="MS", help="time for so long (default: %(default)s ms)"
    )
    how.add_argument("--timer", choices=timers.CHOICES, help="on an accelerator; see below (default: do_bench)")
    how.add_argument("--no-roofline", action="store_true", help="do not measure ceilings, nor compare with them")
    how.add_argument(
        "--cold-start", action="store_true",
        help="also the first call in a fresh process with empty caches of kernels, and in a second one that finds them "
        "filled: seconds, with importing and compiling, without starting Python and torch",
    )  # fmt: skip

    results = p.add_argument_group("results")
    for form in ("json", "csv"):
        results.add_argument(
            f"--{form}", nargs="?", const="-", metavar="FILE",
            help=f"write {form.upper()} to FILE, or to stdout, instead of the table, without one",
        )  # fmt: skip
    results.add_argument(
        "--plot", metavar="FILE", help="draw times and TFLOP/s of all rows, against length and density where these are "
        "swept: PNG, SVG or PDF, by FILE's ending",
    )  # fmt: skip
    results.add_argument(
        "--report", metavar="DIR", help="write DIR/index.html, one page with everything, and results.json, results.md"
    )
    results.add_argument(
        "--compare", metavar="OLD", help="with what --json wrote before: the ratio of times new / old for each row; "
        "exit status 1 if one of ours is slower by more than the threshold, failed or missing",
    )  # fmt: skip
    results.add_argument("--threshold", type=_not_negative, metavar="X", help="for --compare (default: 0.05, for 5 %%)")

    shape = p.add_argument_group(
        "shape",
        "Change these fields of the chosen points, or of medium when no --size is given. M follows N, and Dv D.",
    )
    for name in SHAPE:
        kind = int if name == "q_offset" else _positive
        shape.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, metavar=name.upper())
    return p


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
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return value


def _sweep(text: str) -> tuple[str, list[int]]:
    """``"N=1k,2048"`` -> ``("N", [1024, 2048])``."""
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in SHAPE:
        raise argparse.ArgumentTypeError(f"needs FIELD=A,B,... with one of {', '.join(SHAPE)}, got {text!r}")
    try:
        numbers = [int(word[:-1]) * 1024 if word[-1:] in "kK" else int(word) for word in values.split(",") if word]
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs whole numbers, as 1024 or 1k, got {values!r}") from None
    if not numbers or (name != "q_offset" and min(numbers) < 1):
        raise argparse.ArgumentTypeError(f"needs at least one number, none below 1, got {text!r}")
    return name, list(dict.fromkeys(numbers))
