"""The backend's object: what it can run, and the way from the operator's arguments to two launches, or three."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract import Problem
from . import compiled
from .plan import BLOCKS, WINDOW, Tiles, choose, expected_waste, few_or_sparse

MAX_FEATURES = 256
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_INDEX_DTYPES = {torch.int32: "int32", torch.int64: "int64"}
# Positions, and the number of a tile, are 32-bit numbers.
_MAX_LENGTH = 2**31 - 2**16
# A tile has up to so many queries. Of the steps of 64 keys or more that it walks, pairs are multiplied in 32 bits.
_MAX_QUERIES = 32
_MAX_WALKED = 2**22
# Grids have at most so many blocks along y and z.
_MAX_GRID = 65535
_LOG2E = 1.4426950408889634
# Boxes of a block for which it is not worth a copy of k and v to have fewer.
_FEW_BOXES = 8
# Of keys and values in use at a time: a third of the L2 of an H100, H200 or H20.
_L2_BYTES = 16 * 2**20
# Features of a row: TMA copies rows that are multiples of 16 bytes.
_ALIGNED_FEATURES = 8


class TileLangBackend:
    """Forward pass of every problem in fp16 and bf16 with up to 256 features."""

    def unsupported(self, problem: Problem) -> Sequence[str]:
        missing = compiled.missing_compiler()
        reasons = [] if missing is None else [missing]
        if problem.dtype not in _DTYPES:
            reasons.append(f"needs fp16 or bf16, got {str(problem.dtype).removeprefix('torch.')}")
        reasons += [
            f"needs {name} <= {MAX_FEATURES}, got {name}={value}"
            for name, value in (("D", problem.D), ("Dv", problem.Dv))
            if value > MAX_FEATURES
        ]
        # Keys as they are read: blocks of 1 key become blocks of 8.
        size = problem.M if problem.block_size >= problem.M else packed_block(problem.block_size)
        keys = size * problem.num_blocks
        reach = problem.N + keys + size
        if reach > _MAX_LENGTH:
            reasons.append(
                f"needs N + M + block_size of at most 2**31 - 2**16, with blocks of a size that it reads, got {reach}"
            )
        walked = min(keys, _MAX_QUERIES * problem.topk * size)
        if walked > _MAX_WALKED:
            reasons.append(
                f"needs at most 2**22 keys in the blocks that {_MAX_QUERIES} queries may choose, got {walked}: "
                f"M={problem.M}, topk={problem.topk}"
            )
        if max(problem.B, problem.Hk) > _MAX_GRID:
            reasons.append(f"needs B and Hk <= {_MAX_GRID}, got B={problem.B}, Hk={problem.Hk}")
        rows = problem.B * problem.Hq * problem.N
        if rows >= 2**31:
            reasons.append(f"needs B * Hq * N < 2**31, got {rows}")
        return reasons

    def slow_for(self, problem: Problem) -> Sequence[str]:
        reasons = few_or_sparse(problem)
        if problem.block_size < problem.M and packed_block(problem.block_size) != problem.block_size:
            size = packed_block(problem.block_size)
            reasons.append(f"copies k and v for blocks of {problem.block_size} keys, to read blocks of {size}")
        reasons += [
            f"copies tensors for {name}={value}, which is no multiple of {_ALIGNED_FEATURES}"
            for name, value in (("D", problem.D), ("Dv", problem.Dv))
            if value % _ALIGNED_FEATURES
        ]
        return reasons

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        block_size: int,
        sm_scale: float,
        q_offset: int,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        B, Hq, N, _ = q.shape
        M, Dv = v.shape[2:]
        if 0 in (B, N, M, index.shape[3], Dv):
            out = torch.zeros(B, Hq, N, Dv, dtype=q.dtype, device=q.device)
            return out, torch.full((B, Hq, N), -math.inf, dtype=torch.float32, device=q.device) if return_lse else None
        here = q.device.index == torch.cuda.current_device()
        with contextlib.nullcontext() if here else torch.cuda.device(q.device):
            return _run(q, k, v, index, block_size, sm_scale, q_offset, return_lse)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    block_size: int,
    sm_scale: float,
    q_offset: int,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    B, Hq, N, D = q.shape
    _, Hk, M, Dv = v.shape
    device = q.device
    if sm_scale < 0:  # so that the largest score has the largest weight
        q, sm_scale = -q, -sm_scale
    scale = max(sm_scale * _LOG2E, 1e-37)  # above 0: it is a factor of -inf
    q_offset = min(max(q_offset, -N), M)  # the same beyond: nothing is seen, or everything
    call = _call(
        B, Hq, Hk, N, M, D, Dv, index.shape[3], block_size, q_offset // block_size, _multiprocessors(device)
    )  # fmt: skip
    block_size, packed_size = call.block_size, call.packed_size
    q = for_tma(q)
    k = for_tma(packed(k, block_size, packed_size))
    v = for_tma(packed(v, block_size, packed_size))

    listed = torch.empty(call.lists, call.capacity, dtype=torch.int32, device=device)
    masks = torch.empty(call.lists, call.capacity, dtype=torch.int32, device=device)
    counts = torch.empty(call.lists, call.tiles.facts, dtype=torch.int32, device=device)
    out = torch.empty(B, Hq, N, v.shape[3], dtype=q.dtype, device=device)
    # Something takes its place where it is not asked for. It is not kept: a CUDA graph's memory may be where it lies.
    lse = torch.empty(*((B, Hq, N) if return_lse else (1, 1, 1)), dtype=torch.float32, device=device)

    index_dtype = _INDEX_DTYPES[index.dtype]
    if call.tiles.ordered:
        num_blocks = -(-M // block_size)
        compiled.order(call.tiles, index_dtype, num_blocks)(
            index, counts, num_blocks, block_size, q_offset, call.tiles_of_head
        )
    compiled.block_lists(call.tiles, index_dtype)(
        index, listed, masks, counts, M, block_size, call.boxes_per_block, q_offset, call.tiles_of_head
    )
    (compiled.exact if call.exact else compiled.union)(call.tiles, _DTYPES[q.dtype])(
        q, k, v, listed, masks, counts, out, lse,
        scale, int(return_lse), M, block_size, call.boxes_per_block, q_offset, Hq // Hk, call.chunks,
        call.tiles_of_head, call.together, call.grid,
    )  # fmt: skip
    if v.shape[3] != Dv:
        out = out[..., :Dv].contiguous()
    return out, lse if return_lse else None


class _Call(NamedTuple):
    """What follows from a problem's shape: arguments of the kernels, and sizes of what they fill."""

    block_size: int
    packed_size: int
    tiles: Tiles
    exact: bool
    boxes_per_block: int
    tiles_of_head: int
    chunks: int
    lists: int
    capacity: int
    together: int
    grid: int


@lru_cache(maxsize=4096)
def _call(
    B: int, Hq: int, Hk: int, N: int, M: int, D: int, Dv: int, topk: int, block_size: int, first_block: int, sms: int
) -> _Call:
    """Work it out, once: ``first_block`` is the block in which the first query stands."""
    g = Hq // Hk
    D, Dv = (-(-x // _ALIGNED_FEATURES) * _ALIGNED_FEATURES for x in (D, Dv))
    if block_size >= M:  # one block, of any length
        block_size = packed_size = -(-M // 128) * 128
    else:
        packed_size = packed_block(block_size)
    num_blocks = -(-M // block_size)
    waste = expected_waste(N, num_blocks, topk, block_size, first_block)
    tiles, exact = choose(sms, g, D, Dv, packed_size, num_blocks, B * Hk * (N // WINDOW), waste)
    boxes_per_block = packed_size // tiles.box
    boxes = num_blocks * boxes_per_block
    tiles_of_head = -(-N // tiles.queries)
    lists = B * Hk * tiles_of_head
    chunks = -(-g // tiles.heads)
    return _Call(
        block_size=block_size,
        packed_size=packed_size,
        tiles=tiles,
        exact=exact,
        boxes_per_block=boxes_per_block,
        tiles_of_head=tiles_of_head,
        chunks=chunks,
        lists=lists,
        # Two steps more than there are boxes: masked steps are padded, and what follows the last step is read, too.
        capacity=min(boxes, tiles.queries * topk * boxes_per_block) + 2 * (tiles.BN // tiles.box),
        together=min(together(M, D + Dv), B * Hk) * chunks,
        grid=min(sms * (BLOCKS if exact else 1), lists * chunks),
    )


def together(M: int, features: int) -> int:
    """Key/value heads whose keys and values are to be in the L2 at the same time."""
    return max(1, _L2_BYTES // (2 * M * features))


def packed_block(block_size: int) -> int:
    """Keys of a block as they are read: ``block_size`` or more.

    Not where a box of 8 keys or more divides it, and few of them make it up: lists name every box.
    """
    if block_size % 8 == 0 and block_size // min(128, block_size & -block_size) <= _FEW_BOXES:
        return block_size
    return -(-block_size // 8) * 8 if block_size < 64 else -(-block_size // 64) * 64


def packed(x: Tensor, block_size: int, packed_size: int) -> Tensor:
    """k or v with blocks of ``packed_size`` keys, zeros at their ends: x itself where that is their size."""
    if block_size == packed_size:
        return x
    B, H, M, D = x.shape
    blocks = -(-M // block_size)
    x = F.pad(x, (0, 0, 0, blocks * block_size - M)).view(B, H, blocks, block_size, D)
    return F.pad(x, (0, 0, 0, packed_size - block_size)).view(B, H, blocks * packed_size, D)


def for_tma(x: Tensor) -> Tensor:
    """q, k or v as TMA takes it: x, or its copy, with zeros behind the last feature if they are no multiple of 8."""
    if x.requires_grad:
        x = x.detach()  # what is exported to another library must not ask for gradients
    features = -(-x.shape[3] // _ALIGNED_FEATURES) * _ALIGNED_FEATURES
    if features != x.shape[3]:
        return F.pad(x, (0, features - x.shape[3])).contiguous()
    *strides, last = x.stride()
    if last == 1 and x.data_ptr() % 16 == 0:
        a, b, c = strides
        # Multiples of 16 bytes, by their lowest bits all at once.
        if (a | b | c) % _ALIGNED_FEATURES == 0 and min(strides) > 0 and max(strides) < 2**39:
            return x
        refused = [s <= 0 or s >= 2**39 or s % _ALIGNED_FEATURES != 0 for s in strides]
        if not any(no and length > 1 for no, length in zip(refused, x.shape, strict=False)):
            # The stride of a dimension of length 1 may be anything, and is not used: it has to be one that TMA takes.
            strides = [features if no else s for no, s in zip(refused, strides, strict=True)]
            return x.as_strided(x.shape, (*strides, 1))
    return x.clone(memory_format=torch.contiguous_format)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


backend = TileLangBackend()
