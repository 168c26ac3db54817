"""Block lists: which key blocks a tile of queries walks, and which of its queries selected each.

This is where the set semantics of ``index`` are settled, once. In torch's operators rather than a kernel: comparing all
ids of a tile with each other fits no 910B vector core's buffer beyond 16 ids at a time (docs/ascend.md), and sorting is
what the vendor's library does well. Nothing is read on the host, and no length of a tensor depends on what index holds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Numbers kept for each tile: the ends of its four segments, and a mask of the queries that see any key.
FIELDS = 5
# Sorted as fp32, which a 910B sorts on its vector cores, ids stay exact below this; times the queries of a tile.
MAX_SORTED = 2**24


class BlockLists(NamedTuple):
    """Lists of all tiles.

    Attributes:
        blocks: int32 ``[B * Hk * tiles, capacity]``, ids in ascending order within a segment.
        masks: int32, the same shape: bit t for query t of the tile.
        fields: int32 ``[B * Hk * tiles, 5]``: ends of the segments (below), mask of the queries that see anything.

    Segments: blocks that several queries take, or one query that is alone in its tile; that only the first of two
    queries takes; that only the second takes; blocks in which some key is hidden from some query (behind the diagonal,
    past the end of the keys), or all blocks if single keys have to be masked anyway.
    Tiles of four leave the second and third empty.
    """

    blocks: Tensor
    masks: Tensor
    fields: Tensor


def block_lists(index: Tensor, M: int, block_size: int, q_offset: int, T: int, mask_all: bool) -> BlockLists:
    """Lists for tiles of ``T`` queries: 1, 2 or 4.

    Args:
        index: ``[B, Hk, N, topk]``, int32 or int64, any strides; topk at least 1.
        mask_all: put all blocks into the last segment.
    """
    B, Hk, N, topk = index.shape
    device = index.device
    tiles, num_blocks = -(-N // T), -(-M // block_size)
    capacity = T * topk
    # The last block of which query i sees a key, for every query of every tile; -1: none.
    position = torch.arange(tiles * T, dtype=torch.int32, device=device) + q_offset
    last = torch.div(position, block_size, rounding_mode="floor").clamp(-1, num_blocks - 1)
    last[N:] = -1
    ids = F.pad(index, (0, 0, 0, tiles * T - N), value=-1)
    valid = (ids >= 0) & (ids <= last[:, None])
    seen = (valid.any(-1).reshape(B * Hk * tiles, T).int() << torch.arange(T, dtype=torch.int32, device=device)).sum(-1)

    # One number for an id and the query that named it, in order: what is the same stands side by side.
    query = torch.arange(tiles * T, dtype=torch.int32, device=device)[:, None] % T
    named = torch.where(valid, ids * T + query, num_blocks * T).reshape(B * Hk * tiles, capacity)
    named = named.float().sort(-1).values.int()
    block, query = named // T, named % T
    real = block < num_blocks
    before, behind = (F.pad(x, edge, value=-1) for x, edge in ((named[:, :-1], (1, 0)), (block[:, 1:], (0, 1))))
    starts = real & (block != torch.div(before, T, rounding_mode="floor"))
    ends = real & (block != behind)
    # Queries of a block: what the sum of bits, once for each pair, grows by from the end of one block to the next's.
    bits = ((real & (named != before)).int() << query).cumsum(-1, dtype=torch.int32)
    place = starts.cumsum(-1, dtype=torch.int32) - 1
    blocks = _gathered(block, place, ends, capacity)
    bits = _gathered(bits, place, ends, capacity)
    n = starts.sum(-1, dtype=torch.int32)
    there = torch.arange(capacity, dtype=torch.int32, device=device) < n[:, None]
    masks = torch.where(there, bits - F.pad(bits[:, :-1], (1, 0)), 0)

    # Every query sees all keys of the blocks before this one.
    first_position = position[::T].repeat(B * Hk)
    edge = torch.div((first_position + 1).clamp(0, M), block_size, rounding_mode="floor")
    segment = torch.zeros_like(masks)
    if T == 2:
        segment = torch.where(masks == 3, 0, masks)
    masked = torch.ones_like(there) if mask_all else blocks >= edge[:, None]
    segment = torch.where(there, torch.where(masked, 3, segment), 4)
    # Ids keep their order within a segment. A number for a segment and a place is exact in fp32, too: topk is limited.
    order = (segment * capacity + torch.arange(capacity, dtype=torch.int32, device=device)).float().argsort(-1)
    ends_of = torch.stack([(segment <= s).sum(-1, dtype=torch.int32) for s in range(4)], -1)
    return BlockLists(
        blocks.gather(-1, order).contiguous(),
        masks.gather(-1, order).contiguous(),
        torch.cat([ends_of, seen[:, None].int()], -1).contiguous(),
    )


def _gathered(values: Tensor, place: Tensor, chosen: Tensor, capacity: int) -> Tensor:
    """What is chosen of each row, at its place; 0 behind. Everything else goes to a column that is cut off."""
    out = torch.zeros(values.shape[0], capacity + 1, dtype=torch.int32, device=values.device)
    return out.scatter_(-1, torch.where(chosen, place, capacity).long(), values)[:, :capacity]
