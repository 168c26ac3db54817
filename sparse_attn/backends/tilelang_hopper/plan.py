"""Which kernel and tiles run a problem, from tables; nothing here touches a device or TileLang."""

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
# Below so many queries that share a block, a kernel for one query at a time multiplies less, for the same traffic. At
# 1.1 (65536 keys, 16 blocks of 64) this one was up to 6 % faster than the Triton backend's, or as fast. Alone
# (decoding) it is not.
_LITTLE_SHARING = 1.05

# What tells Hopper GPUs apart: how many FLOP of wgmma (fp16, dense) a multiprocessor does in a clock. No property says
# so; how many multiprocessors there are tells which GPU it is. Others have a Hopper multiprocessor's full rate.
#
# | multiprocessors | FLOP / clock | from |
# |---|---|---|
# | 132, 114, ... (H100, H200, H800, GH200) | 4096 | 989 TFLOP/s published for 132 at 1.83 GHz |
# | 78 (H20) | 1037 | 148 TFLOP/s published, at 1.83 GHz |
_FULL_RATE = 4096
_RATES = {78: 1037}
# At the full rate a product of 16 columns waits for shared memory (64 keys of 128 + 128 features: 256 clocks for k and
# v, 128 for products); at a quarter of it for the tensor cores (506).
_SLOW_RATE = 2048
# Products of the union kernel for each that is needed, expected if each query chooses by itself, from which on it pays
# to multiply less, all else being slower. By `python -m bench.model`, on an H20, for 58 ms of the union at 1.93
# (statement large-2): 45 of the exact kernel, 52 with queries dealt into tiles (`order.py`). For 8.5 at 1.32 (large-1):
# 8.3, and 8.1. On an H200, measured: dealt into tiles, 12.6 ms for 13.7 at 1.93, nothing gained at 1.32.
_EXACT_FROM = 1.5
_ORDERED_FROM, _ORDERED_FROM_IF_SLOW = 1.5, 1.25

# Adjacent queries that are dealt into tiles; a place among them is a byte.
WINDOW = 128
# Of so many blocks at most: a mask of each query's lies in shared memory.
MAX_ORDERED_BLOCKS = 1024
# And of so many windows at least: to deal out one takes as long as those of all multiprocessors beside it.
_FEW_WINDOWS = 256

# Blocks of the exact kernel that share a multiprocessor.
BLOCKS = 2


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
        ordered: whether a tile's queries are those of a window that ``order.py`` put together; else adjacent ones.
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
    ordered: bool = False

    @property
    def facts(self) -> int:
        """Numbers that are kept of a list: of its steps, and of which queries it is."""
        return 4 + (self.warpgroups if self.ordered else 0)

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


def choose(
    sms: int, g: int, D: int, Dv: int, block_size: int, num_blocks: int, windows: int, waste: float
) -> tuple[Tiles, bool]:
    """Choose tiles, and whether they are the exact kernel's; else they are the union kernel's.

    Args:
        sms: multiprocessors of the GPU.
        g, D, Dv, block_size: as for ``plan``.
        num_blocks: of a key/value head.
        windows: full ones, of all key/value heads and batch entries.
        waste: as ``expected_waste`` has it.
    """
    slow = _RATES.get(sms, _FULL_RATE) <= _SLOW_RATE
    if slow and waste > _EXACT_FROM and (tiles := exact_tiles(g, D, Dv, block_size)):
        return tiles, True
    tiles = plan(g, D, Dv, block_size)
    if waste > (_ORDERED_FROM_IF_SLOW if slow else _ORDERED_FROM) and windows >= _FEW_WINDOWS:
        tiles = ordered_tiles(tiles, num_blocks) or tiles
    return tiles, False


def exact_tiles(g: int, D: int, Dv: int, block_size: int) -> Tiles | None:
    """Tiles of the exact kernel if it can run this: it has 16 heads, boxes of 64 keys, sums of up to 128 features."""
    if heads_of_tile(g) != 16 or block_size % 64 != 0 or max(D, Dv) > 128:
        return None
    return Tiles(16, 4, 64, 64, D, Dv, 1, 2, 2)


def ordered_tiles(tiles: Tiles, num_blocks: int) -> Tiles | None:
    """``tiles`` for queries that are dealt into them, if they can be: a warpgroup has several, and a word for them."""
    if not 2 <= tiles.queries // tiles.warpgroups <= 4 or num_blocks > MAX_ORDERED_BLOCKS:
        return None
    return tiles._replace(ordered=True)


@lru_cache(maxsize=4096)
def expected_waste(N: int, num_blocks: int, topk: int, block_size: int, first_block: int) -> float:
    """Pairs of 4 queries and a block that any of them takes, times 4, for each pair of a query and a block.

    If each chooses as many blocks as it may, at random, among those in its reach. By blocks, not keys: while M and
    q_offset grow by 1, as in decoding, the answer is kept.
    """
    pairs = union = 0.0
    step = max(1, N // 64)
    for query in range(step // 2, N, step):
        reach = min(num_blocks, query // block_size + first_block + 1)
        if reach > 0:
            share = min(1.0, topk / reach)
            pairs += 4 * reach * share
            union += 4 * reach * (1 - (1 - share) ** 4)
    return union / pairs if pairs else 1.0


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
    """Why another kernel than a union of many queries should run ``problem``: see docs/performance.md."""
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
