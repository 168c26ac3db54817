"""Block lists: which key blocks a tile of queries has to walk, and which of its queries selected each.

This is where the set semantics of ``index`` are settled, once: a list names every block once, however often and in
whatever order the rows of the tile named it, and leaves out ids that mean nothing and blocks that causality empties.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .plan import padded

# Key blocks looked at together, at most: bits of 32-bit words, one row of words for each query.
_MAX_BLOCKS = 1024
# Numbers kept for each tile: the ends of its four segments; whether its queries are better off one by one; a 0 whose
# value the compiler does not know, since places that are worked out with it once more need no registers in between; and
# the mask of the queries that see any key.
_FIELDS = 7
FIELDS = tl.constexpr(_FIELDS)


class BlockLists(NamedTuple):
    """Lists of all tiles, made on the device.

    Attributes:
        entries: int64 ``[B * Hk * tiles, capacity]``: ``block << 32 | mask``,
            bit t of the mask for query t of the tile.
        fields: int32 ``[B * Hk * tiles, 7]``: where the segments of a list end (below), the route, 0, and a mask of the
            queries that see anything.
        capacity: length of a list, ``min(num_blocks, T * topk)`` or 1.
        tiles: tiles of one head, ``ceil(N / T)``.
        T: queries in a tile.

    Segments: blocks that both halves of the tile need; that only its first half needs; only its second half; and blocks
    in which some key is hidden from some query (behind the diagonal, or past the end of the keys), which need a mask
    over scores. Lists that do not tell halves apart leave the second and third empty. The route is 1 where the tile's
    queries share so few blocks that walking their union costs more than walking each query's own.
    """

    entries: Tensor
    fields: Tensor
    capacity: int
    tiles: int
    T: int


def block_lists(
    index: Tensor, M: int, block_size: int, q_offset: int, T: int, halves: bool, sharing: float
) -> tuple[BlockLists, Launch]:
    """Lists for tiles of ``T`` queries (a power of two, at most 32), and the launch that fills them.

    Nothing is read on the host.

    Args:
        index: ``[B, Hk, N, topk]``, any strides.
        halves: tell apart blocks that only one half of a tile needs.
        sharing: a tile whose blocks are needed by fewer queries than this, on average, gets route 1; 0 for none.
    """
    B, Hk, N, topk = index.shape
    tiles, num_blocks = -(-N // T), -(-M // block_size)
    capacity = max(1, min(num_blocks, T * topk))
    entries = torch.empty(B * Hk * tiles, capacity, dtype=torch.int64, device=index.device)
    fields = torch.empty(B * Hk * tiles, _FIELDS, dtype=torch.int32, device=index.device)
    blocks = min(_MAX_BLOCKS, padded(num_blocks, least=64))
    fill = Launch(
        build_block_lists,
        (tiles, B * Hk, 1),
        1 if blocks <= 128 else 4,
        (index, entries, fields, sharing),
        (),
        (*index.stride(), Hk, N, M, topk, block_size, q_offset, capacity),
        (T, halves, blocks, num_blocks <= blocks, sharing > 0, min(8, padded(topk, least=1))),
    )
    return BlockLists(entries, fields, capacity, tiles, T), fill


@triton.jit(
    do_not_specialize=[
        "stride_b", "stride_h", "stride_n", "stride_t", "Hk", "N", "M", "topk", "block_size", "q_offset", "capacity",
        "sharing",
    ]
)  # fmt: skip
def build_block_lists(
    index, entries, fields, sharing,
    stride_b, stride_h, stride_n, stride_t,
    Hk, N, M, topk, block_size, q_offset, capacity,
    T: tl.constexpr, HALVES: tl.constexpr, BLOCKS: tl.constexpr, ALL_AT_ONCE: tl.constexpr, ROUTE: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """One program for each tile. Segments are counted first and then filled, BLOCKS blocks at a time."""
    tile = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    index += bh // Hk * stride_b + bh % Hk * stride_h
    row = bh * tl.num_programs(0) + tile
    entries += row * capacity
    fields += row * FIELDS
    first_query = tile * T
    last_position = tl.minimum(first_query + T, N) - 1 + q_offset
    # No query of the tile sees a key of a block from `stop` on; every one sees all keys of the blocks before `edge`.
    stop = tl.where(last_position < 0, 0, tl.minimum(tl.cdiv(M, block_size), last_position // block_size + 1))
    edge = tl.minimum(tl.maximum(first_query + q_offset + 1, 0), M) // block_size

    if ALL_AT_ONCE:
        mask, seen = _masks(
            index, stride_n, stride_t, 0, first_query, N, M, topk, block_size, q_offset, T, BLOCKS, UNROLL
        )
        both, first, second, masked, pairs = _count(mask, 0, edge, T, HALVES, BLOCKS, ROUTE)
    else:
        both, first, second, masked, pairs, seen = 0, 0, 0, 0, 0, 0
        for start in range(0, stop, BLOCKS):
            mask, seen_here = _masks(
                index, stride_n, stride_t, start, first_query, N, M, topk, block_size, q_offset, T, BLOCKS, UNROLL
            )
            seen |= seen_here
            n0, n1, n2, n3, n = _count(mask, start, edge, T, HALVES, BLOCKS, ROUTE)
            both, first, second, masked, pairs = both + n0, first + n1, second + n2, masked + n3, pairs + n
    first += both
    second += first
    masked += second
    tl.store(fields, both)
    tl.store(fields + 1, first)
    tl.store(fields + 2, second)
    tl.store(fields + 3, masked)
    tl.store(fields + 5, 0)
    tl.store(fields + 6, seen)
    tl.store(fields + 4, (pairs < masked * sharing).to(tl.int32))

    masked, second, first, both = second, first, both, 0
    if ALL_AT_ONCE:
        _fill(entries, mask, 0, edge, both, first, second, masked, T, HALVES, BLOCKS)
    else:
        for start in range(0, stop, BLOCKS):
            mask, _ = _masks(
                index, stride_n, stride_t, start, first_query, N, M, topk, block_size, q_offset, T, BLOCKS, UNROLL
            )
            both, first, second, masked = _fill(
                entries, mask, start, edge, both, first, second, masked, T, HALVES, BLOCKS
            )


@triton.jit
def _masks(
    index, stride_n, stride_t, start, first_query, N, M, topk, block_size, q_offset,
    T: tl.constexpr, BLOCKS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """For each of the BLOCKS blocks from ``start`` on: bit t is set iff query t of the tile selected it and sees a key.

    And, second, one mask of the queries of which that is so for any of these blocks.
    """
    WORDS: tl.constexpr = BLOCKS // 32
    t = tl.arange(0, T)
    i = first_query + t
    num_blocks = tl.cdiv(M, block_size)
    rows = index + i.to(tl.int64) * stride_n
    words = tl.zeros([T, WORDS], tl.int32)
    for first_slot in range(0, topk, UNROLL):
        for slot in tl.static_range(UNROLL):  # one id of every row at a time: an OR over them needs no reduction
            ids = tl.load(rows, (i < N) & (first_slot + slot < topk), other=-1)
            rows += stride_t
            counts = (ids >= 0) & (ids < num_blocks)
            ids = tl.where(counts, ids, 0).to(tl.int32)
            local = ids - start
            counts &= (ids * block_size <= i + q_offset) & (local >= 0) & (local < BLOCKS)
            bit = tl.where(counts, 1 << (local & 31), 0)
            words |= tl.where((local >> 5)[:, None] == tl.arange(0, WORDS)[None, :], bit[:, None], 0)
    bits = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    seen = tl.sum(tl.max((words != 0).to(tl.int32), 1) << t, 0)
    return tl.reshape(tl.sum(bits << t[:, None, None], 0), [BLOCKS]), seen


@triton.jit
def _segments(mask, start, edge, T: tl.constexpr, HALVES: tl.constexpr, BLOCKS: tl.constexpr):
    """Which blocks belong to the segment of both halves, the first, the second half, and those that need a mask."""
    inner = (mask != 0) & (start + tl.arange(0, BLOCKS) < edge)
    if HALVES:
        FIRST: tl.constexpr = (1 << (T // 2)) - 1
        first = inner & ((mask & ~FIRST) == 0)
        second = inner & ((mask & FIRST) == 0)
    else:
        first = inner & (mask == 0)  # none
        second = first
    return inner & ~first & ~second, first, second, (mask != 0) & ~inner


@triton.jit
def _count(mask, start, edge, T: tl.constexpr, HALVES: tl.constexpr, BLOCKS: tl.constexpr, PAIRS: tl.constexpr):
    both, first, second, masked = _segments(mask, start, edge, T, HALVES, BLOCKS)
    pairs = tl.zeros([BLOCKS], tl.int32)
    if PAIRS:
        for t in tl.static_range(T):
            pairs += (mask >> t) & 1
    return (
        tl.sum(both.to(tl.int32)),
        tl.sum(first.to(tl.int32)),
        tl.sum(second.to(tl.int32)),
        tl.sum(masked.to(tl.int32)),
        tl.sum(pairs),
    )


@triton.jit
def _fill(
    entries, mask, start, edge, both_end, first_end, second_end, masked_end,
    T: tl.constexpr, HALVES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    both, first, second, masked = _segments(mask, start, edge, T, HALVES, BLOCKS)
    block = start + tl.arange(0, BLOCKS)
    entry = (block.to(tl.int64) << 32) | (mask.to(tl.int64) & 0xFFFFFFFF)
    both_end = _append(entries, entry, both, both_end)
    if HALVES:
        first_end = _append(entries, entry, first, first_end)
        second_end = _append(entries, entry, second, second_end)
    return both_end, first_end, second_end, _append(entries, entry, masked, masked_end)


@triton.jit
def _append(entries, entry, chosen, end):
    place = end + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(entries + place, entry, chosen)
    return end + tl.sum(chosen.to(tl.int32))
