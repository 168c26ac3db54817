"""A paper model of kernels on Hopper GPUs: ``python -m bench.model`` predicts times from what an algorithm has to do.

Nothing is run. Work is counted from the index of a point, for one head and one batch entry: for a random index all have
the same, and for a local one they are drawn in the same way. Kernels, each for 16 heads of a group:

* ``union``: ``backends/tilelang_hopper``. A warpgroup multiplies, with wgmma, what any of its 4 queries selected; two of
  them share what is loaded. Blocks are counted, not steps of 128 keys: the boxes that fill up a step are left out.
* ``exact``: a warp for each of 8 queries of a tile, mma.sync, only the blocks that the query selected, read from shared
  memory by each warp. K and V are staged once for the tile; q stays in registers.
* ``gather``: one query at a time, mma.sync, K and V of its blocks through L2 for it alone.
* ``dense``: all causal keys, wgmma, 128 rows of one head a tile. Another function: the yardstick.

Each unit has a rate; the slowest one sets the time. Shared memory is written by loads and read by products: both count.
Points of some microseconds are launching and a few tiles, of which this says nothing.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cases, table
from .cases import Point

KERNELS = ("union", "exact", "gather", "dense")
HEADS = 16
ROWS = 64  # of a warpgroup: 4 queries of 16 heads
TILE = 8  # queries that share what is loaded
STEP = 128  # keys for which wgmma reads the queries from shared memory once
_BYTES = 2  # fp16

# Per clock and SM (Hopper): dense fp16 FLOP of wgmma (989 TFLOP/s for 132 SMs at 1.83 GHz), bytes of shared memory, and
# exponentials. mma.sync reaches 62 % of wgmma in published microbenchmarks of an H100 (arXiv 2402.13499, 2501.12084).
WGMMA, SHARED, EXP = 4096, 128, 16
MMA_SHARE = 0.62

# The one assumption that is fitted: while a kernel runs, the unit that bounds it works in this share of all clocks. It is
# measured for the union kernel's products on an H200; with it, shared memory at 1.98 GHz gives the times of `exact`.
# The rest are waits and arithmetic that nothing hides. Their clocks are taken to be the same where products are slower:
# on an H20, where a product takes 4 times the clocks, 0.87 of all are products. Dense kernels were measured there at 0.73
# (2048 keys, causal) to 0.95 (16384) of 148 TFLOP/s: github.com/Dao-AILab/flash-attention/issues/1310.
# Rates of L2 and device memory are those that kernels did reach: nothing is taken off.
EFFICIENCY = 0.63


@dataclass(frozen=True)
class Gpu:
    """Rates. ``wgmma`` and ``mma`` in FLOP per clock and SM; ``mma`` has both ends where it is not known.

    Clocks in Hz: ``product_clock`` is what the power limit leaves of ``clock`` while tensor cores are busy. ``l2`` and
    ``memory`` in bytes a second.
    """

    sms: int
    clock: float
    product_clock: float
    wgmma: float
    mma: tuple[float, ...]
    l2: float
    memory: float


# 1.59 GHz: 540 TFLOP/s of the union kernel are then 0.63 of the peak, and a matrix product of 8192^3, measured at 640 to
# 770 TFLOP/s, is 0.74 to 0.90 of it. L2: what the gather kernel reads. Memory: a copy.
H200 = Gpu(132, 1.98e9, 1.59e9, WGMMA, (MMA_SHARE * WGMMA,), 10.8e12, 4.24e12)
# 148 TFLOP/s and 4.0 TB/s are published; 1.83 GHz, and that power does not limit it, are assumed. Whether mma.sync is slower
# than wgmma there, too, is not known: it is as fast where only the tensor cores' peak was lowered. FlashAttention-2, which
# is mma.sync, got 84 TFLOP/s (the issue above): nearer to 0.62 x 148. The L2's rate is not published: scaled from the H200's by SMs
# and clock. Of the memory's peak, as much as a copy gets on an H200 (4.24 of 4.8 TB/s).
_H20_WGMMA = 148e12 / (78 * 1.83e9)
H20 = Gpu(
    78, 1.83e9, 1.83e9, _H20_WGMMA,
    (min(MMA_SHARE * WGMMA, _H20_WGMMA), MMA_SHARE * _H20_WGMMA),
    H200.l2 * 78 / 132 * 1.83 / 1.98, 4.0e12 * 4.24 / 4.8,
)  # fmt: skip

# Times on an H200 in ms, lowest and highest, from docs/performance.md: `union` is the TileLang kernel, `exact` the CUDA C++
# prototype (tiles of 11 queries, q read again for each block), `gather` the Triton backend's, all without making lists; `dense` is cuDNN.
MEASURED = {
    ("statement", "large-1", "random", "union"): (2.08, 2.08),
    ("statement", "large-1", "random", "exact"): (2.86, 2.86),
    ("statement", "large-2", "random", "union"): (13.7, 13.7),
    ("statement", "large-2", "random", "exact"): (14.6, 14.6),
    ("statement", "large-2", "random", "gather"): (22.1, 22.1),
    ("statement", "large-2", "local", "union"): (8.4, 9.1),
    ("statement", "large-2", "dense", "dense"): (16.0, 16.5),
    ("handout", "large-2", "random", "union"): (3.86, 3.86),
    ("handout", "large-2", "random", "exact"): (5.41, 5.41),
    ("handout", "large-2", "dense", "dense"): (3.5, 4.15),
}


class Work(NamedTuple):
    """What a kernel has to do: FLOP of both products, exponentials, and bytes; ``wgmma`` or mma.sync."""

    wgmma: bool
    flop: float
    exps: float
    l2: float
    shared: float
    memory: float


def selection(index: Tensor, num_blocks: int) -> Tensor:
    """Which blocks each query selected, ``[N, num_blocks]``: ``index`` ``[N, topk]`` as a set, without ids out of range."""
    ids = index.long()
    ids = ids.where((ids >= 0) & (ids < num_blocks), num_blocks)
    return torch.zeros(len(ids), num_blocks + 1, dtype=torch.bool).scatter_(1, ids, True)[:, :num_blocks]


def walked(selected: Tensor, queries: int) -> int:
    """Pairs of ``queries`` adjacent queries and a block that any of them selected."""
    padded = torch.nn.functional.pad(selected, (0, 0, 0, -len(selected) % queries))
    return int(padded.view(-1, queries, padded.shape[1]).any(1).sum())


def count(point: Point, kernel: str, selected: Tensor) -> Work:
    """The work of all heads and batch entries, from what one head's queries selected."""
    if (point.Hq, point.N, point.q_offset) != (HEADS * point.Hk, point.M, 0):
        raise ValueError(f"modelled for groups of {HEADS} heads and N = M, got {point}")
    heads, keys = point.B * point.Hk, point.block_size
    pairs = walked(selected, 1)
    if kernel == "dense":
        heads, keys = point.B * point.Hq, STEP
        tiles = -(-point.N // (2 * ROWS))
        loads = tiles * (tiles + 1) // 2  # the tile of queries n sees n + 1 steps of keys
        products, rows = 2 * loads, ROWS
    elif kernel == "union":
        loads, products, rows = walked(selected, TILE), walked(selected, ROWS // HEADS), ROWS
    else:
        loads, products, rows = walked(selected, TILE) if kernel == "exact" else pairs, pairs, HEADS
    wgmma = kernel in ("union", "dense")
    block = keys * (point.D + point.Dv) * _BYTES
    queries = ROWS * point.D * _BYTES * keys / STEP if wgmma else 0.0  # wgmma: a part of them for each block
    tensors = point.B * (point.Hq * point.N + point.Hk * point.M) * (point.D + point.Dv) * _BYTES
    return Work(
        wgmma=wgmma,
        flop=heads * products * 2.0 * rows * keys * (point.D + point.Dv),
        exps=heads * products * float(rows * keys),
        l2=heads * loads * float(block),
        shared=heads * (loads * block + products * (block + queries)),
        memory=tensors + (0 if kernel == "dense" else point.B * point.Hk * point.N * point.topk * 4),
    )


def times(work: Work, gpu: Gpu, mma: float) -> dict[str, float]:
    """Seconds that each unit would need alone, where mma.sync does ``mma`` FLOP per clock and SM."""
    rate, full = (gpu.wgmma, WGMMA) if work.wgmma else (mma, MMA_SHARE * WGMMA)
    clocks = gpu.sms * gpu.clock
    return {
        # Clocks of products, and clocks that are lost beside them, as many as on a full Hopper SM: see EFFICIENCY.
        "tensor": work.flop / (gpu.sms * gpu.product_clock) * (1 / rate + (1 / EFFICIENCY - 1) / full),
        "shared": work.shared / (SHARED * clocks) / EFFICIENCY,
        "exp": work.exps / (EXP * clocks) / EFFICIENCY,
        "L2": work.l2 / gpu.l2,
        "memory": work.memory / gpu.memory,
    }


def predict(work: Work, gpu: Gpu) -> tuple[tuple[float, ...], str]:
    """Milliseconds, one or both ends, and what bounds them: all units within 5 % of the slowest."""
    ends = dict.fromkeys(gpu.mma) if not work.wgmma else (gpu.wgmma,)
    found, bounds = [], []
    for mma in ends:
        needed = times(work, gpu, mma)
        found.append(1e3 * max(needed.values()))
        bounds.append(", ".join(name for name, time in needed.items() if time > 0.95 * max(needed.values())))
    return tuple(found), " to ".join(dict.fromkeys(bounds))


def rows(points: Sequence[Point], seed: int) -> list[dict[str, Any]]:
    """A row for each kernel on each point, and pattern of index: local at the statement's large-2 only."""
    lines = []
    for point in points:
        for pattern in ("random", "local") if (point.set, point.size) == ("statement", "large-2") else ("random",):
            one = replace(point, B=1, Hq=HEADS, Hk=1)
            index = cases.make_index(one, pattern, torch.device("cpu"), seed)
            selected = selection(index[0, 0], point.num_blocks)
            for kernel in KERNELS if pattern == "random" else KERNELS[:-1]:
                work, shown = count(point, kernel, selected), "dense" if kernel == "dense" else pattern
                h200, h200_bound = predict(work, H200)
                h20, h20_bound = predict(work, H20)
                lines.append({
                    "point": f"{point.set} {point.size}", "pattern": shown, "kernel": kernel,
                    "TFLOP": work.flop / 1e12, "L2 GB": work.l2 / 1e9, "shared GB": work.shared / 1e9,
                    "H200 ms": _span(h200), "H200 bound": h200_bound,
                    "measured ms": _span(MEASURED.get((point.set, point.size, shown, kernel), ())),
                    "H20 ms": _span(h20), "H20 bound": h20_bound,
                })  # fmt: skip
    return lines


def _span(values: Sequence[float]) -> float | str | None:
    ends = list(dict.fromkeys(f"{value:.3g}" for value in values))
    return float(ends[0]) if len(ends) == 1 else " to ".join(ends) or None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the predictions and return the exit status."""
    p = argparse.ArgumentParser(
        prog="python -m bench.model", description="Predict times on Hopper GPUs from counts. Nothing is run."
    )
    p.add_argument("--set", choices=cases.SETS, nargs="+", default=cases.SETS, help="whose points (default: all)")
    p.add_argument("--size", choices=cases.SIZES, nargs="+", default=["all"], help="(default: all)")
    p.add_argument("--seed", type=int, default=0, help="of the index (default: %(default)s)")
    p.add_argument("--markdown", action="store_true", help="print Markdown, on a terminal, too")
    args = p.parse_args(argv)
    lines = rows([point for name in args.set for point in cases.points(name, args.size)], args.seed)
    columns = [(heading, lambda line, heading=heading: line[heading]) for heading in lines[0]]
    notes = [
        f"Prediction: the slowest unit; {EFFICIENCY} of an SM's clocks at its peak, L2 and memory at rates that were reached.",
        "H20: with mma.sync as fast as wgmma, to 0.62 of it. Not measured; measured ms: H200, docs/performance.md.",
    ]
    shown = io.StringIO()  # no terminal: Markdown
    with redirect_stdout(shown if args.markdown else sys.stdout):
        table.show("Predicted times", columns, lines, notes)
    print(shown.getvalue(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
