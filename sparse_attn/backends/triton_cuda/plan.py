"""Which kernel runs a problem, with which tile sizes: by shape and device, from tables, without a look at ``index``.

Nothing here touches a device or Triton, so that the choice for any GPU is tested on any machine. The measurements
behind the numbers are in docs/performance.md, "The Triton backend".
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch

# Bytes of shared memory that one block may have, by compute capability (CUDA C++ programming guide, technical
# specifications per compute capability).
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_LEAST_SHARED_KIB = 99
# What a kernel needs beside its tiles: barriers, exchange of reductions and of layouts.
_RESERVED_BYTES = 4 * 1024

# Bytes of keys and values that are read for one query, up to which few programs are over before the host would have
# made TMA descriptors. At the contest's small points (32 and 64 KiB), on an H200: 6.3 and 7.2 us without TMA and pairs
# of tiles, 6.7 and 8.0 with them, and 10 to 40 us less on the host.
_FEW_BYTES = 2**16

# Queries of one tile: each has a bit in a 32-bit mask.
MAX_QUERIES = 32


class Gpu(NamedTuple):
    """What a choice depends on: compute capability as a number (80, 90, ...) and streaming multiprocessors."""

    capability: int
    sms: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block."""
        return _SHARED_KIB.get(self.capability, _LEAST_SHARED_KIB) * 1024

    @property
    def is_hopper(self) -> bool:
        """Whether matrix products are wgmma, and tiles can be copied by TMA."""
        return self.capability == 90


class Shape(NamedTuple):
    """The part of a problem that a choice depends on; ``heads`` is ``B * Hk`` and ``g`` is ``Hq / Hk``."""

    dtype: torch.dtype
    heads: int
    g: int
    N: int
    M: int
    D: int
    Dv: int
    topk: int
    block_size: int
    q_offset: int


class Union(NamedTuple):
    """Tiles of the union kernels.

    Attributes:
        halved: the kernel of two halves, of ``R`` rows and ``T // 2`` queries each; else one tile of R rows, T queries.
        BN: keys at a time; ``BN_masked`` where single keys are masked, whose tiles go through registers.
        parts: of v's features, see ``union_kernel``.
        tma: copy whole tiles by TMA, where strides allow.
    """

    halved: bool
    R: int
    T: int
    BN: int
    BN_masked: int
    parts: int
    warps: int
    stages: int
    tma: bool = False


class Gather(NamedTuple):
    """Tiles of the gather kernel.

    Attributes:
        R: rows, heads of one query.
        BN, BN_masked, tma: as for :class:`Union`.
        pairs: two tiles of keys in one step.
        splits: programs that share the blocks of one query.
    """

    R: int
    BN: int
    BN_masked: int
    warps: int
    stages: int
    tma: bool = False
    pairs: bool = False
    splits: int = 1


class Plan(NamedTuple):
    """One kernel, or both: then each tile of queries takes the one that its own list makes cheaper.

    ``sharing`` is how many of a tile's queries must share a block, on average, for the union to be; 0 with one kernel.
    """

    union: Union | None
    gather: Gather | None
    sharing: float = 0.0


@lru_cache(maxsize=4096)  # bounded: M grows with every decoding step
def plan(shape: Shape, gpu: Gpu) -> Plan:
    """Choose kernels and tiles."""
    union = union_tiles(shape, gpu)
    few = shape.N * shape.heads < union.T * gpu.sms  # too few tiles to fill the device, but perhaps not too few queries
    if few or union.T == 1:
        return Plan(None, gather_tiles(shape, gpu))
    share, needed = selected_share(shape), break_even(union, shape.g)
    expected = union.T * share / (1 - (1 - share) ** union.T)  # sharing, if queries choose independently
    if expected > 1.25 * needed:
        return Plan(union, None)
    return Plan(union, gather_tiles(shape, gpu), needed)


def break_even(union: Union, g: int) -> float:
    """Queries that share a block, on average, from which on the union is as fast as the gather.

    Both take a time for each block of keys that hardly depends on what is masked. On an H200, at the statement's
    large-2: 7.4 ns for the halved tile of 128 rows, 6.9 ns for one tile of 64 rows (sm_80 code), against 3.0 and 3.5 ns
    for the gather's 16 rows; times of all SMs together, divided by the number of blocks walked.
    """
    ratio = 2.5 if union.halved else 2.0
    return max(1.25, ratio * 16 / padded(g))


def selected_share(shape: Shape) -> float:
    """Share of the blocks in reach of the middle query that it selects, if it selects as many as it may."""
    middle = shape.q_offset + shape.N // 2
    reach = min(max(middle, 0), max(shape.M - 1, 0)) // shape.block_size + 1
    return min(1.0, shape.topk / reach)


def union_tiles(shape: Shape, gpu: Gpu) -> Union:
    """Tiles of the union kernel for a shape."""
    width, value_width = padded(shape.D), padded(shape.Dv)
    wide = max(width, value_width) > 128
    block = padded(shape.block_size)
    if shape.dtype == torch.float32:
        # Exact fp32 products have no tensor cores, and everything passes through registers: small tiles.
        R, BN, parts, warps, stages = 32, 16, 1, 4, 1
    elif gpu.is_hopper and not wide and 4 <= shape.g <= 32:
        # 64 rows are what one wgmma takes. Two resident blocks of 128 threads with 255 registers fill an SM.
        half = min(_power_of_two_below(64 // shape.g), MAX_QUERIES // 2)
        return _fit(Union(True, 64, 2 * half, min(64, block), 32, 1, 4, 2, tma=True), shape, gpu)
    elif gpu.is_hopper:
        R, BN, parts, warps, stages = 64, 64 if not wide else 32, 1, 4, 2
    else:
        # Warps of 32 rows use every fragment of k and v twice; 32 keys at a time is what registers then leave room for.
        R, BN, warps, stages = 64, 32, 2 if not wide else 4, 2
        parts = 2 if value_width > R else 1
    heads = min(padded(shape.g, least=1), R)
    T = min(R // heads, MAX_QUERIES)
    tiles = Union(
        False,
        heads * T,
        T,
        min(BN, block),
        16,
        parts,
        warps,
        stages,
        tma=gpu.is_hopper and shape.dtype != torch.float32,
    )
    return _fit(tiles, shape, gpu)


def gather_tiles(shape: Shape, gpu: Gpu) -> Gather:
    """Tiles of the gather kernel for a shape."""
    wide = max(padded(shape.D), padded(shape.Dv)) > 128
    block = padded(shape.block_size)
    R = min(padded(shape.g), 64 if shape.dtype != torch.float32 else 32)
    programs = shape.heads * -(-shape.g // R) * shape.N
    if shape.dtype == torch.float32:
        tiles = Gather(R, 16, 16, 4, 1)
    elif programs < 4 * gpu.sms and R == 16 and not wide:
        # Few programs: each must keep as many bytes under way as its SM's share of the bandwidth asks for, if it has
        # many to read. Of sm_80, 64 keys of 128 features spill where blocks are not split.
        read = shape.topk * shape.block_size * (shape.D + shape.Dv) * torch.finfo(shape.dtype).bits // 8
        tma = gpu.is_hopper and read > _FEW_BYTES
        tiles = Gather(R, 64, 16, 4, 3, tma, pairs=tma) if gpu.is_hopper else Gather(R, 32, 16, 4, 4)
    elif gpu.is_hopper:
        tiles = Gather(R, 32, 16, max(1, R // 16) * (2 if wide else 1), 3, tma=True)
    else:
        tiles = Gather(R, 16, 16, max(1, R // 16) * (2 if wide else 1), 4)
    # A part of less than two blocks would cost more to merge than it saves.
    while programs * tiles.splits * 2 <= gpu.sms and tiles.splits * 4 <= shape.topk:
        tiles = tiles._replace(splits=2 * tiles.splits)
    return _fit(tiles._replace(BN=min(tiles.BN, block)), shape, gpu)


_Tiles = TypeVar("_Tiles", Union, Gather)


def _fit(tiles: _Tiles, shape: Shape, gpu: Gpu) -> _Tiles:
    """Take stages off, then keys, then rows, until the tiles fit into shared memory."""
    while shared_bytes(tiles, shape) > gpu.shared_bytes:
        if tiles.stages > 1:
            tiles = tiles._replace(stages=tiles.stages - 1)
        elif tiles.BN > 16:
            tiles = tiles._replace(BN=tiles.BN // 2)
        elif tiles.R > 16:
            tiles = tiles._replace(R=tiles.R // 2)
            if isinstance(tiles, Union):
                tiles = tiles._replace(T=max(1, tiles.T // 2))
        else:
            raise ValueError(f"no tile of {shape} fits into {gpu.shared_bytes} bytes of shared memory")
    return tiles._replace(BN_masked=min(tiles.BN_masked, tiles.BN))


def shared_bytes(tiles: Union | Gather, shape: Shape) -> int:
    """Shared memory a kernel needs, from above: queries (or results on their way out), stages of k and v, and p."""
    size = torch.finfo(shape.dtype).bits // 8
    width, value_width = padded(shape.D), padded(shape.Dv)
    halved = isinstance(tiles, Union) and tiles.halved
    paired = isinstance(tiles, Gather) and tiles.pairs
    queries = (2 if halved else 1) * tiles.R * max(width, value_width)
    # TMA copies into two buffers at least; otherwise one stage is the one at work, in registers or on its way there.
    buffers = max(2, tiles.stages - 1) if tiles.tma else max(1, tiles.stages - 1)
    keys = (2 if paired else 1) * buffers * tiles.BN * (width + value_width)
    return size * (queries + keys + tiles.R * tiles.BN) + _RESERVED_BYTES


def padded(n: int, least: int = 16) -> int:
    """The power of two, at least ``least``, that holds n."""
    return max(least, 1 << max(0, n - 1).bit_length())


def _power_of_two_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)
