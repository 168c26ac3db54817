"""Tile sizes by a problem's shape alone. What they rest on is in docs/ascend.md: compiled, never timed on a device."""

from __future__ import annotations

from typing import NamedTuple

# Rows of a product: a fractal of the cube has 16; 32 are what the compilers' plans for the vector cores' buffer hold.
_LEAST_HEADS, MOST_HEADS = 16, 32
# Rows of all queries of a tile, by padded width: each has its own scores and sums in that buffer.
_MOST_ROWS = {128: 64, 256: 32}
# Queries of a tile, where they fit. Four share more, but take every block of their union, and the newest compiler
# overlaps cube and vector cores over several blocks only for fewer: the first thing to compare on a device.
QUERIES = 2
# Cube cores of the largest 910B: below that many tiles, cores idle.
MOST_CORES = 24


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


def tiles_for(g: int, N: int, M: int, D: int, Dv: int, block_size: int, lanes: int) -> Tiles:
    """Choose tiles.

    Args:
        lanes: tasks for each query, ``B * Hk``; with few of them, queries are not worth sharing a tile.
    """
    width = max(padded(D), padded(Dv))
    heads = min(padded(g), MOST_HEADS)
    BN = min(64 if width <= 128 else 32, padded(min(block_size, M)))
    T = min(QUERIES, _MOST_ROWS[max(width, 128)] // heads)
    return Tiles(heads, T if N * lanes >= T * MOST_CORES else 1, BN)


def padded(n: int) -> int:
    """The power of two, at least 16, that holds n."""
    return max(_LEAST_HEADS, 1 << max(0, n - 1).bit_length())
