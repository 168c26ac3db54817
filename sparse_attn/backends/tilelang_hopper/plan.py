"""Which tiles run a problem, from tables; nothing here touches a device or TileLang."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ...contract import Problem

# Shared memory of one block on Hopper, without what barriers need.
SHARED_BYTES = 227 * 1024 - 1024
# Rows that one warpgroup multiplies: queries times heads.
_ROWS = 64
# Below so many tiles, a kernel that splits the blocks of one query keeps more of the GPU busy.
_FEW_TILES = 100
# Below so many queries that share a block, a kernel for one query at a time multiplies less, for the same traffic.
_LITTLE_SHARING = 2.0


class Tiles(NamedTuple):
    """What a kernel is compiled for, beside the dtype.

    Attributes:
        heads: of one tile: a power of two from 4 to 64; those beyond the group's are computed and not stored.
        queries: of one tile, for all warpgroups together, at most 32.
        BN: keys of a step.
        box: keys that lie together, in one block: a power of two from 8 to BN.
        D, Dv: features of q and k, and of v, multiples of 8.
        warpgroups: that multiply, 1 or 2.
        k_stages, v_stages: steps that are loaded ahead, powers of two; with two warpgroups v needs 4 or more, since a
            warpgroup keeps a stage of v while it leaves out a step.
    """

    heads: int
    queries: int
    BN: int
    box: int
    D: int
    Dv: int
    warpgroups: int
    k_stages: int
    v_stages: int

    @property
    def D_padded(self) -> int:
        """Features of q and k in shared memory."""
        return -(-self.D // 64) * 64

    @property
    def Dv_padded(self) -> int:
        """Features of v in shared memory."""
        return -(-self.Dv // 64) * 64

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles."""
        q = self.warpgroups * _ROWS * self.D_padded
        return 2 * (q + self.BN * (self.k_stages * self.D_padded + self.v_stages * self.Dv_padded))


@lru_cache(maxsize=4096)
def plan(g: int, D: int, Dv: int, block_size: int) -> Tiles:
    """Choose tiles.

    Args:
        g: query heads of a group.
        D, Dv: multiples of 8, at most 256.
        block_size: a multiple of 8.
    """
    heads, warpgroups = heads_of_tile(g), _warpgroups(D, Dv)
    box = min(128, block_size & -block_size)
    BN = 64 if warpgroups == 1 or box < 32 else 128  # many boxes in a step take registers, too
    box = min(BN, box)
    for k_stages, v_stages in ((4, 8), (2, 4)):
        tiles = Tiles(heads, warpgroups * _ROWS // heads, BN, box, D, Dv, warpgroups, k_stages, v_stages)
        if tiles.shared_bytes <= SHARED_BYTES:
            return tiles
    raise AssertionError(f"no tiles fit: {tiles}")


def heads_of_tile(g: int) -> int:
    """Heads of a group of g that are rows of one tile."""
    return min(_ROWS, max(4, 1 << (g - 1).bit_length()))


def _warpgroups(D: int, Dv: int) -> int:
    """Sums of 64 x 256 take half of the registers: one warpgroup has them to itself, and takes half the keys."""
    return 1 if max(D, Dv) > 128 else 2


def few_or_sparse(problem: Problem) -> list[str]:
    """Why another kernel than a union of many queries should run ``problem``: by argument, see docs/performance.md."""
    heads = heads_of_tile(problem.group)
    T = _warpgroups(problem.D, problem.Dv) * _ROWS // heads
    reasons = []
    tiles = problem.B * problem.Hk * -(-problem.group // heads) * -(-problem.N // T)
    if tiles < _FEW_TILES:
        reasons.append(f"is slow for few queries: fewer than {_FEW_TILES} tiles of {T} leave a GPU idle, got {tiles}")
    # The middle query, if as many blocks are in its reach as there are and it selects as many as it may.
    reach = problem.num_blocks if problem.has_q_offset else min(problem.N // 2, problem.M) // problem.block_size
    reach, T = max(1, reach), max(1, min(T, problem.N))
    share = min(1.0, problem.topk / reach)
    sharing = T * share / (1 - (1 - share) ** T) if share > 0 else 0.0
    if sharing < _LITTLE_SHARING:
        reasons.append(
            f"is slow where neighbours share few blocks: {sharing:.1f} of {T} queries take a block if each chooses "
            f"{problem.topk} of {reach} by itself"
        )
    return reasons
