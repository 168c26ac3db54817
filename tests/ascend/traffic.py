"""A traffic model of the 910B kernel: bytes counted in compiled code, and times predicted from them.

`python -m tests.ascend.traffic` prints it. Counted is the loop over whole blocks that the compiler made: what a cube
core loads (k, v, and the weights p that vector cores wrote) and stores (scores s and results o, which vector cores
load). Nothing here was measured on a device.
"""

from __future__ import annotations

import re
from collections import Counter

from bench import cases
from sparse_attn.backends.triton_ascend.plan import Tiles, tiles_for

# Bytes a second, an assumption: the rate of a 910B2's device memory. What is counted stays in its L2, or mostly (k and
# v of a head, and what cores hand each other), whose rate is higher, and not known here.
MEMORY_RATE = 1.6e12
_BYTES = {"f16": 2, "bf16": 2, "f32": 4}


def count(hivm: str) -> Counter[str]:
    """Bytes that cube cores move in one step of the first loop over blocks: "load" to L1, "store" from L0C."""
    function = next(part for part in re.split(r"\n  func\.func ", hivm) if re.match(r"@\w+_mix_aic\(", part))
    shapes: dict[str, int] = {}
    moved: Counter[str] = Counter()
    depth = 0
    block_loop = None  # the depth of the first loop inside that over tasks
    loops: list[int] = []
    for line in function.splitlines():
        cast = re.match(r"\s*(%\w+) = memref\.cast %\w+ : memref<((?:\d+x)+)(\w+),", line)
        if cast:
            elements = 1
            for length in cast.group(2).split("x")[:-1]:
                elements *= int(length)
            shapes[cast.group(1)] = elements * _BYTES.get(cast.group(3), 0)
        call = re.match(r"\s*func\.call @(\w+?)_(?:half|bfloat16_t|float)\w*\((%\w+), (%\w+)", line)
        if call and block_loop is not None:
            if call.group(1) == "nd2nz":
                moved["load"] += shapes[call.group(2)]
            elif call.group(1).startswith("fixpipe"):
                moved["store"] += shapes[call.group(3)]
        if re.match(r"\s*(%\S+ = )?scf\.for ", line):
            loops.append(depth)
            if len(loops) == 2 and block_loop is None:
                block_loop = depth
        depth += line.count("{") - line.count("}")
        while loops and depth <= loops[-1]:
            if loops.pop() == block_loop:
                return moved
    raise ValueError("no loop over blocks in what the compiler made")


def expected(tiles: Tiles, D: int) -> Counter[str]:
    """The same by arithmetic: k and v once for all queries of a tile, and s, p and o of each. fp16, Dv = D."""
    kv = 2 * tiles.BN * D * 2
    p, s, o = tiles.heads * tiles.BN * 2, tiles.heads * tiles.BN * 4, tiles.heads * D * 4
    return Counter(load=kv + tiles.T * p, store=tiles.T * (s + o))


def bytes_for_pair(tiles: Tiles, D: int, block_size: int, share: float) -> tuple[float, float]:
    """Bytes for each pair of a query and a block that it selected: of k and v, and of s, p and o.

    If queries choose independently. Vector cores move s, p and o a second time. ``share`` is how many of the blocks in
    reach a query selects.
    """
    steps = -(-block_size // tiles.BN)
    kv = steps * 2 * tiles.BN * D * 2
    between = steps * 2 * tiles.heads * (tiles.BN * (2 + 4) + D * 4)
    sharing = tiles.T * share / (1 - (1 - share) ** tiles.T)  # queries of a tile that take one of its blocks
    in_vain = tiles.T / sharing if tiles.T == 4 else 1.0  # products of those that do not
    return kv / sharing, between * in_vain


def torch_bytes_for_pair(g: int, D: int, block_size: int) -> float:
    """The least that gathering in torch's operators moves for such a pair.

    k and v of the block are read, written and read again by the products; scores are written by one product, read and
    written by the softmax, and read by the other, in fp16. Masks, casts and copies for each query head come on top.
    """
    return 3 * 2 * block_size * D * 2 + 4 * g * block_size * 2


def table() -> str:
    """Markdown, a row for each contest point."""
    lines = [
        "| point | share | queries of a tile | k, v | s, p, o | pairs | predicted | gathering in torch | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for point in cases.POINTS:
        g, lanes = point.Hq // point.Hk, point.B * point.Hk
        tiles = tiles_for(g, point.N, point.M, point.D, point.D, point.block_size, lanes)
        blocks = [i // point.block_size + 1 for i in range(point.N)]
        pairs = lanes * sum(min(point.topk, n) for n in blocks)
        share = sum(min(point.topk, n) for n in blocks) / sum(blocks)
        kv, between = bytes_for_pair(tiles, point.D, point.block_size, share)
        ours, theirs = pairs * (kv + between), pairs * torch_bytes_for_pair(g, point.D, point.block_size)
        lines.append(
            f"| {point.set} {point.size} | {share:.2f} | {tiles.T} | {kv / 1024:.1f} KiB | {between / 1024:.1f} KiB "
            f"| {pairs:,} | {ours / MEMORY_RATE * 1e3:.3g} ms | {theirs / MEMORY_RATE * 1e3:.3g} ms "
            f"| {theirs / ours:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
