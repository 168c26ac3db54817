"""Tile sizes of a problem, from its shape alone. What they rest on is in docs/ascend.md: compiled, never timed on a device."""

from __future__ import annotations

from typing import NamedTuple

# Rows of one product: a fractal of the cube has 16, and 32 are what the compilers' plans for the vector cores' buffer hold.
_LEAST_HEADS, _MOST_HEADS = 16, 32
# Rows of all queries of a tile, by padded width: each has its own scores and sums in that buffer.
_MOST_ROWS = {128: 64, 256: 32}


class Tiles(NamedTuple):
    """Tiles of the attention kernel.

    Attributes:
        heads: rows of one query's product; a group that has more goes to several tasks.
        T: queries of a tile.
        BN: keys at a time.
    """

    heads: int
    T: int
    BN: int


def tiles_for(g: int, N: int, M: int, D: int, Dv: int, topk: int, block_size: int, q_offset: int, lanes: int) -> Tiles:
    """Choose tiles.

    Args:
        lanes: tasks for each query, ``B * Hk``; with few of them, queries are not worth sharing a tile.
    """
    width = max(padded(D), padded(Dv))
    heads = min(padded(g), _MOST_HEADS)
    BN = min(64 if width <= 128 else 32, padded(min(block_size, M)))
    T = min(4, _MOST_ROWS[max(width, 128)] // heads)
    if T == 4 and selected_share(N, M, topk, block_size, q_offset) < SHARE_OF_FOUR:
        T = 2
    while T > 1 and N * lanes < T * MOST_CORES:
        T //= 2
    return Tiles(heads, T, BN)


# Cube cores of the largest 910B: below that many tiles, cores idle.
MOST_CORES = 24
# From this share of blocks selected on, four queries that take every block of their union move fewer bytes than two that
# leave out what they did not select. By the model of docs/ascend.md, both move 48 KiB for a query and block at 0.75.
SHARE_OF_FOUR = 0.75


def selected_share(N: int, M: int, topk: int, block_size: int, q_offset: int) -> float:
    """Share of the blocks in reach of the middle query that it selects, if it selects as many as it may."""
    middle = q_offset + N // 2
    reach = min(max(middle, 0), max(M - 1, 0)) // block_size + 1
    return min(1.0, topk / reach)


def padded(n: int) -> int:
    """The power of two, at least 16, that holds n."""
    return max(_LEAST_HEADS, 1 << max(0, n - 1).bit_length())
