"""What a point asks for, counted: floating-point operations, and bytes that have to move at least once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .cases import Case, Point

# Ids looked at at a time.
_CHUNK = 2**22


def nominal_flop(point: Point) -> int:
    """The contest's count, ``2 * (D + Dv) * B * Hq * N * topk * block_size``: padding and masked keys included."""
    return 2 * (point.D + point.Dv) * point.B * point.Hq * point.N * point.topk * point.block_size


def selected_flop(point: Point, index: Tensor) -> int:
    """``2 * (D + Dv)`` for each (head, query, key) that the operator's mask admits; ``index`` ``[B, Hk, N, topk]``."""
    pairs = torch.zeros((), dtype=torch.int64, device=index.device)
    for lists in index.flatten(0, 1):
        for ids, valid, keys in _keys_seen(point, lists):
            valid[:, 1:] &= ids[:, 1:] != ids[:, :-1]
            pairs += keys.where(valid, 0).sum()
    return 2 * (point.D + point.Dv) * (point.Hq // point.Hk) * int(pairs)


def compulsory_bytes(case: Case) -> int:
    """Bytes that any kernel has to move: q, out and index once, and once those keys of k and v that some query sees.

    Keys are taken from the start of each block to the last one that any query, to which the block is selected, sees.
    """
    point, element, index = case.point, case.q.element_size(), case.index
    # Devices other than these two may have no such scatter: it is done on the CPU.
    at = index.device if index.device.type in ("cuda", "cpu") else torch.device("cpu")
    keys = torch.zeros((), dtype=torch.int64, device=at)
    for lists in index.to(at).flatten(0, 1):
        of_block = torch.zeros(point.num_blocks, dtype=torch.int64, device=at)
        for ids, valid, seen in _keys_seen(point, lists):
            of_block.scatter_reduce_(0, ids.where(valid, 0).flatten(), seen.where(valid, 0).flatten(), "amax")
        keys += of_block.sum()
    of_tensors = element * (point.D + point.Dv) * (point.B * point.Hq * point.N + int(keys))
    return of_tensors + index.numel() * index.element_size()


def _keys_seen(point: Point, lists: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For ``lists`` ``[N, topk]``, in chunks of rows: sorted ids; which name a block; how many of its keys are seen."""
    step = max(1, _CHUNK // max(1, point.topk))
    for start in range(0, point.N, step):
        ids = lists[start : start + step].sort(-1).values.long()
        seen = torch.arange(start, start + len(ids), device=lists.device) + (point.q_offset + 1)
        in_block = seen.clamp(max=point.M)[:, None] - ids * point.block_size
        yield ids, (ids >= 0) & (ids < point.num_blocks), in_block.clamp(0, point.block_size)
