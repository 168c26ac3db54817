"""A paper model of kernels on Hopper GPUs: ``python -m bench.model`` predicts times from what an algorithm has to do.

Nothing is run. Work is counted in the index of a point, for one head of one batch entry: with a random index all have
the same, with a local one they are drawn in the same way. Kernels, for groups of 16 heads:

* ``union``: ``backends/tilelang_hopper``. A warpgroup multiplies, by wgmma, the blocks that any of its 4 queries
  selected; two share what is loaded. What fills up the last step of 128 keys is not counted.
* ``ordered``: the same, where its queries are dealt into tiles by what they selected.
* ``exact``: its kernel for GPUs with slow products. A warpgroup multiplies, by wgmma with keys as rows, each of its 4
  queries by the blocks that it selected, one query after the other; two share an SM, and nothing that is loaded.
* ``mma``: a warp for each of a tile's 8 queries multiplies, by mma.sync, the blocks that its query selected. K and V
  are staged once for the tile, and read from shared memory by each of these warps; q stays in registers.
* ``gather``: one query at a time, by mma.sync, and K and V of its blocks loaded for it alone.
* ``dense``: all causal keys, by wgmma, tiles of 128 rows of one head. Another function: the yardstick.

The slowest unit sets the time. Shared memory is written by loads and read by products; both count. Small points are
launching and a few tiles, of which this says nothing: there are no fixed costs here, and no SM is ever idle.
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

KERNELS = ("union", "ordered", "exact", "mma", "gather", "dense")
HEADS = 16
ROWS = 64  # of a warpgroup: 4 queries of 16 heads
TILE = 8  # queries that share what is loaded
WINDOW = 128  # queries that are dealt into tiles together
STEP = 128  # keys for which wgmma reads the queries from shared memory once
_BYTES = 2  # fp16

# Per clock and SM (Hopper): dense fp16 FLOP of wgmma (989 TFLOP/s for 132 SMs at 1.83 GHz), bytes of shared memory, and
# exponentials. mma.sync: assumed at 62 % of wgmma on an H100; the prototype of `mma` is bound by shared memory, so
# that no measurement here tells.
WGMMA, SHARED, EXP = 4096, 128, 16
MMA_SHARE = 0.62

# The assumption that is fitted: the unit of an SM that bounds a kernel works in this share of its clocks. So much was
# measured for the union kernel's products on an H200; for shared memory it gives the measured times of `mma`.
# The other clocks are waits that nothing hides. There are taken to be as many of them where products are slower: with
# the H20's, which take 4 times the clocks, 0.87 are products. Dense causal kernels were measured there at 0.73 (2048
# keys) to 0.91 (16384) of 148 TFLOP/s: github.com/Dao-AILab/flash-attention/issues/1310. The rates of L2 and memory
# are those that kernels did reach: nothing is taken off.
EFFICIENCY = 0.63

# Clocks that a warpgroup of `exact` takes for a step, and for each query in it beside its products: nothing hides them
# but the other warpgroup's work. Fitted to its five times below, at 1.98 GHz.
STEP_CLOCKS, QUERY_CLOCKS = 1650, 440


@dataclass(frozen=True)
class Gpu:
    """``wgmma`` and ``mma`` in FLOP per clock and SM, the latter with both ends if unknown; the rest in Hz and bytes/s.

    ``product_clock`` is what the power limit leaves of ``clock`` while tensor cores are busy.
    """

    sms: int
    clock: float
    product_clock: float
    wgmma: float
    mma: tuple[float, ...]
    l2: float
    memory: float


# 1.635 GHz: measured under the union kernel, at the power limit. L2: read by the gather kernel. Memory: a copy.
H200 = Gpu(132, 1.98e9, 1.635e9, WGMMA, (MMA_SHARE * WGMMA,), 10.8e12, 4.24e12)
# 148 TFLOP/s and 4.0 TB/s are published; assumed are 1.83 GHz, and that power does not limit it. mma.sync is as fast as
# wgmma if only the peak was lowered, 0.62 of it if both were: not known. FlashAttention-2, which is mma.sync, got 84
# TFLOP/s (the issue above), so rather the latter, 92. The L2's rate is not published: the H200's, scaled by SMs and
# clock. Of the memory's peak, the share that a copy gets on an H200 (4.24 of 4.8 TB/s).
_H20_WGMMA = 148e12 / (78 * 1.83e9)
H20 = Gpu(
    78, 1.83e9, 1.83e9, _H20_WGMMA, (min(MMA_SHARE * WGMMA, _H20_WGMMA), MMA_SHARE * _H20_WGMMA),
    H200.l2 * 78 / 132 * 1.83 / 1.98, 4.0e12 * 4.24 / 4.8,
)  # fmt: skip

# Times on an H200 in ms, lowest and highest, from docs/performance.md: `union`, `ordered` and `exact` are the TileLang
# backend's, without lists and order, `mma` is the prototype in CUDA C++ (11 queries a tile, q read again for each
# block), `gather` the Triton backend's, `dense` cuDNN.
MEASURED = {
    ("statement", "large-1", "random", "union"): (1.75, 1.85),
    ("statement", "large-1", "random", "exact"): (3.57, 3.58),
    ("statement", "large-1", "random", "mma"): (2.86, 2.86),
    ("statement", "large-1", "dense", "dense"): (1.83, 2.06),
    ("statement", "large-2", "random", "union"): (12.2, 13.6),
    ("statement", "large-2", "random", "ordered"): (12.4, 12.4),
    ("statement", "large-2", "random", "exact"): (21.7, 22.0),
    ("statement", "large-2", "random", "mma"): (14.6, 14.6),
    ("statement", "large-2", "random", "gather"): (22.1, 22.1),
    ("statement", "large-2", "local", "union"): (7.0, 8.2),
    ("statement", "large-2", "local", "exact"): (17.8, 17.9),
    ("statement", "large-2", "dense", "dense"): (15.2, 16.5),
    ("handout", "large-1", "random", "exact"): (0.897, 0.899),
    ("handout", "large-2", "random", "union"): (3.27, 3.9),
    ("handout", "large-2", "random", "exact"): (7.19, 7.26),
    ("handout", "large-2", "random", "mma"): (5.41, 5.41),
    ("handout", "large-2", "dense", "dense"): (3.45, 4.28),
}


class Work(NamedTuple):
    """FLOP, by ``wgmma`` or mma.sync; exponentials; bytes: K and V from L2; shared memory; q, k, v, out, index once.

    ``waits``: of a kernel in which one product waits for another, clocks of a warpgroup beside its products.
    """

    wgmma: bool
    flop: float
    exps: float
    l2: float
    shared: float
    memory: float
    waits: float = 0.0


def selection(index: Tensor, num_blocks: int) -> Tensor:
    """Which blocks each query selected, ``[N, num_blocks]``: ``index`` ``[N, topk]`` as sets; other ids are none."""
    ids = index.long()
    ids = ids.where((ids >= 0) & (ids < num_blocks), num_blocks)
    return torch.zeros(len(ids), num_blocks + 1, dtype=torch.bool).scatter_(1, ids, True)[:, :num_blocks]


def walked(selected: Tensor, queries: int) -> int:
    """Pairs of ``queries`` adjacent queries and a block that any of them selected."""
    padded = torch.nn.functional.pad(selected, (0, 0, 0, -len(selected) % queries))
    return int(padded.view(-1, queries, padded.shape[1]).any(1).sum())


def dealt(selected: Tensor) -> Tensor:
    """Queries in the order in which ``order.py`` of the TileLang backend deals them out, those of each full window."""
    queries, blocks = len(selected) // WINDOW * WINDOW, selected.shape[1]
    sets = selected[:queries].view(-1, WINDOW, blocks)
    windows, places = torch.arange(len(sets)), torch.arange(WINDOW)
    left = torch.ones(len(sets), WINDOW, dtype=torch.bool)
    order, union = [], sets[:, 0]
    for place in range(WINDOW):
        # A warpgroup's first is the first that is left; then whichever adds fewest blocks.
        first = place % (ROWS // HEADS) == 0
        grown = 0 if first else (sets & ~union[:, None]).sum(-1)
        best = torch.where(left, grown * WINDOW + places, 2**31).argmin(1)
        left[windows, best] = False
        union = sets[windows, best] if first else union | sets[windows, best]
        order.append(best)
    taken = sets[windows[:, None], torch.stack(order, 1)]
    return torch.cat([taken.flatten(0, 1), selected[queries:]])


def count(point: Point, kernel: str, selected: Tensor) -> Work:
    """The work of all heads and batch entries, from what one head's queries selected."""
    if (point.Hq, point.N, point.q_offset) != (HEADS * point.Hk, point.M, 0):
        raise ValueError(f"modelled for groups of {HEADS} heads and N = M, got {point}")
    heads, keys, pairs = point.B * point.Hk, point.block_size, walked(selected, 1)
    if kernel == "ordered":
        selected, kernel = dealt(selected), "union"
    if kernel == "dense":
        heads, keys = point.B * point.Hq, STEP
        tiles = -(-point.N // (2 * ROWS))
        loads = tiles * (tiles + 1) // 2  # the tile of queries n sees n + 1 steps of keys
        products, rows = 2 * loads, ROWS
    elif kernel == "union":
        loads, products, rows = walked(selected, TILE), walked(selected, ROWS // HEADS), ROWS
    else:
        together = {"exact": ROWS // HEADS, "mma": TILE, "gather": 1}[kernel]
        loads, products, rows = walked(selected, together), pairs, HEADS
    block = keys * (point.D + point.Dv) * _BYTES
    # Read by wgmma once a step: a block's part of it.
    q = ROWS * point.D * _BYTES * keys / STEP if kernel in ("union", "dense") else 0.0
    tensors = point.B * (point.Hq * point.N + point.Hk * point.M) * (point.D + point.Dv) * _BYTES
    return Work(
        wgmma=kernel in ("union", "exact", "dense"),
        flop=heads * products * 2.0 * rows * keys * (point.D + point.Dv),
        exps=heads * products * float(rows * keys),
        l2=heads * loads * float(block),
        shared=heads * (loads * block + products * (block + q)),
        memory=tensors + (0 if kernel == "dense" else point.B * point.Hk * point.N * point.topk * 4),
        waits=heads * (loads * STEP_CLOCKS + pairs * QUERY_CLOCKS) if kernel == "exact" else 0.0,
    )


def times(work: Work, gpu: Gpu, mma: float) -> dict[str, float]:
    """Seconds that each unit would need alone, where mma.sync does ``mma`` FLOP per clock and SM."""
    rate, full = (gpu.wgmma, WGMMA) if work.wgmma else (mma, MMA_SHARE * WGMMA)
    clocks = gpu.sms * gpu.clock
    # A product of 16 columns takes as long as the tensor core does, or as its other operand is read from shared memory.
    products = work.flop * max(1 / gpu.wgmma, 1 / (HEADS * SHARED)) if work.waits else 0.0
    return {
        # Clocks of products, and clocks that are lost beside them, as many as on a full Hopper SM: see EFFICIENCY.
        "tensor": work.flop / (gpu.sms * gpu.product_clock) * (1 / rate + (1 / EFFICIENCY - 1) / full),
        "shared": work.shared / (SHARED * clocks) / EFFICIENCY,
        "exp": work.exps / (EXP * clocks) / EFFICIENCY,
        "L2": work.l2 / gpu.l2,
        "memory": work.memory / gpu.memory,
        "waits": (work.waits + products) / (2 * clocks),
    }


def predict(work: Work, gpu: Gpu) -> tuple[tuple[float, ...], str]:
    """Milliseconds for each end of ``gpu.mma``, and what bounds them: all units within 5 % of the slowest."""
    ends = [times(work, gpu, mma) for mma in gpu.mma]
    slow = [", ".join(unit for unit, time in end.items() if time > 0.95 * max(end.values())) for end in ends]
    return tuple(1e3 * max(end.values()) for end in ends), " to ".join(dict.fromkeys(slow))


def rows(points: Sequence[Point], seed: int) -> list[dict[str, Any]]:
    """A row for each kernel on each point, and pattern of index: local at the statement's large-2 only."""
    lines = []
    for point in points:
        for pattern in ("random", "local") if (point.set, point.size) == ("statement", "large-2") else ("random",):
            one = replace(point, B=1, Hq=HEADS, Hk=1)
            selected = selection(cases.make_index(one, pattern, torch.device("cpu"), seed)[0, 0], point.num_blocks)
            for kernel in KERNELS if pattern == "random" else KERNELS[:-1]:
                work, name = count(point, kernel, selected), "dense" if kernel == "dense" else pattern
                line: dict[str, Any] = {"point": f"{point.set} {point.size}", "pattern": name, "kernel": kernel}
                line |= {"TFLOP": work.flop / 1e12, "L2 GB": work.l2 / 1e9, "shared GB": work.shared / 1e9}
                for gpu, device in (("H200", H200), ("H20", H20)):
                    ms, bound = predict(work, device)
                    line |= {f"{gpu} ms": _span(ms), f"{gpu} bound": bound}
                    if device is H200:
                        line["measured ms"] = _span(MEASURED.get((point.set, point.size, name, kernel), ()))
                lines.append(line)
    return lines


def _span(values: Sequence[float]) -> float | str | None:
    ends = list(dict.fromkeys(f"{value:.3g}" for value in values))
    return float(ends[0]) if len(ends) == 1 else " to ".join(ends) or None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the predictions and return the exit status."""
    p = argparse.ArgumentParser(prog="python -m bench.model", description="Predict times on Hopper GPUs from counts.")
    p.add_argument("--set", choices=cases.SETS, nargs="+", default=cases.SETS, help="whose points (default: all)")
    p.add_argument("--size", choices=cases.SIZES, nargs="+", default=["all"], help="(default: all)")
    p.add_argument("--seed", type=int, default=0, help="of the index (default: %(default)s)")
    p.add_argument("--markdown", action="store_true", help="print Markdown, on a terminal, too")
    args = p.parse_args(argv)
    lines = rows([point for name in args.set for point in cases.points(name, args.size)], args.seed)
    columns = [(heading, lambda line, heading=heading: line[heading]) for heading in lines[0]]
    notes = [
        f"Predicted: the slowest unit, at its peak in {EFFICIENCY} of a full SM's clocks; L2 and memory: as measured.",
        "Measured: on an H200. H20: with mma.sync as fast as wgmma, to 0.62 of that; not measured.",
    ]
    shown = io.StringIO()  # no terminal: Markdown
    with redirect_stdout(shown if args.markdown else sys.stdout):
        table.show("Predicted times", columns, lines, notes)
    print(shown.getvalue(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
