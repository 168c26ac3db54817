"""From the operator's arguments to a paged cache, a table of pages for each row, and the rows' lengths.

A *row* is one query of one key/value head with the g query heads of that group: ``R = B * Hk * N`` rows, ordered as
``[B, Hk, N]``. A *page* is a block of keys of one batch entry and key/value head. No value is read on the host here.

A row has no mask: it sees the first ``lengths[r]`` keys of its pages, one page after the other. That is enough. Query i
may see keys before ``L = clamp(i + q_offset + 1, 0, M)``, and of the blocks that it selects it sees those before block
``L // block_size`` whole, that one up to key L, and later ones not at all. Whether L stands for the query's position or
for the end of the keys makes no difference: at most one block is seen in part, and it has the largest id that counts.
With ids in ascending order it is the row's last page, and the row's length ends within it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# What a page's length has to be a multiple of.
PAGE_ALIGNMENT = 16


class Rows(NamedTuple):
    """What each of the R rows sees.

    ``tables`` ``[R, W]`` int32: the row's pages; what is behind them names a page too, so that it may be read.
    ``lengths`` ``[R]`` int64: keys seen, at least 1. ``empty`` ``[R]`` bool: in truth none, the result is void.
    """

    tables: Tensor
    lengths: Tensor
    empty: Tensor


def page_size(M: int, block_size: int) -> int:
    """Keys in a page: those of a block. A single block need not be longer than the keys in it."""
    return block_size if block_size < M else -(-M // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def table_width(M: int, topk: int, block_size: int) -> int:
    """Columns of a table: no row has more pages than there are ids, or blocks."""
    return min(topk, -(-M // block_size))


def pages(x: Tensor, size: int) -> Tensor:
    """See k or v ``[B, H, M, D]`` as pages ``[B * H * ceil(M / size), 1, size, D]``.

    A view if x is contiguous and size divides M. Otherwise a copy, with zeros behind the last key: no row's length
    reaches them, but a fused operator may load them, and what is uninitialised may be NaN.
    """
    B, H, M, D = x.shape
    count = -(-M // size)
    if count * size != M:
        padded = x.new_zeros(B, H, count * size, D)
        padded[:, :, :M] = x
        x = padded
    return x.contiguous().view(B * H * count, 1, size, D)


def rows(index: Tensor, M: int, block_size: int, q_offset: int) -> Rows:
    """Turn index ``[B, Hk, N, topk]`` into rows. Needs ``M > 0`` and ``topk > 0``."""
    B, Hk, N, topk = index.shape
    num_blocks = -(-M // block_size)
    device = index.device
    seen = (torch.arange(1, N + 1, device=device) + q_offset).clamp(0, M)[:, None]
    whole, rest = seen // block_size, seen % block_size
    counts = (index >= 0) & (index < whole + (rest > 0))
    # What does not count gets an id behind all others, and so do repetitions, found as neighbours.
    ids = torch.where(counts, index, num_blocks).int().sort(-1).values
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[..., 1:] = ids[..., 1:] == ids[..., :-1]
    ids = ids.masked_fill(repeated, num_blocks).sort(-1).values[..., : table_width(M, topk, block_size)]

    valid = ids < num_blocks
    count = valid.sum(-1, keepdim=True)
    in_part = (valid & (ids == whole)).any(-1, keepdim=True)
    lengths = count * block_size - torch.where(in_part, block_size - rest, 0)
    empty = count == 0
    first_page = torch.arange(B * Hk, dtype=torch.int32, device=device).view(B, Hk, 1, 1) * num_blocks
    tables = ids.masked_fill(~valid, 0) + first_page
    # index may have any strides, and what is made of it may have them too.
    return Rows(tables.reshape(B * Hk * N, -1).contiguous(), lengths.masked_fill(empty, 1).flatten(), empty.flatten())


def queries_to_rows(q: Tensor, Hk: int) -> Tensor:
    """``[B, Hq, N, D]`` -> ``[R, g, 1, D]``, contiguous."""
    B, Hq, N, D = q.shape
    return q.unflatten(1, (Hk, Hq // Hk)).transpose(2, 3).contiguous().view(B * Hk * N, Hq // Hk, 1, D)


def rows_to_queries(x: Tensor, B: int, Hk: int, N: int) -> Tensor:
    """``[R, g, 1, D]`` -> ``[B, Hq, N, D]``, contiguous."""
    return x.view(B, Hk, N, x.shape[1], x.shape[3]).transpose(2, 3).flatten(1, 2).contiguous()
