"""The backend's object: what it can run, and the way from the operator's arguments to two launches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract import Problem
from . import compiled
from .plan import exact_tiles, few_or_sparse, plan, wastes

MAX_FEATURES = 256
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_INDEX_DTYPES = {torch.int32: "int32", torch.int64: "int64"}
# Positions, and the number of a tile, are 32-bit numbers.
_MAX_LENGTH = 2**31 - 2**16
# A tile's ids, of up to 32 queries, are counted in 32 bits.
_MAX_TOPK = 2**26
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
        reach = problem.N + problem.M + min(problem.block_size, problem.M)
        if reach > _MAX_LENGTH:
            reasons.append(f"needs N + M + block_size of at most 2**31 - 2**16, got {reach}")
        if problem.topk >= _MAX_TOPK:
            reasons.append(f"needs topk < 2**26, got topk={problem.topk}")
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
            return out, torch.full((B, Hq, N), -math.inf, device=q.device) if return_lse else None
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
    B, Hq, N, _ = q.shape
    _, Hk, M, Dv = v.shape
    topk, g = index.shape[3], Hq // Hk
    if block_size >= M:  # one block, of any length
        block_size = packed_size = -(-M // 128) * 128
    else:
        packed_size = packed_block(block_size)
    if sm_scale < 0:  # so that the largest score has the largest weight
        q, sm_scale = -q, -sm_scale
    scale = max(sm_scale * _LOG2E, 1e-37)  # above 0: it is a factor of -inf
    q_offset = min(max(q_offset, -N), M)  # the same beyond: nothing is seen, or everything
    q = for_tma(q)
    k, v = (for_tma(packed(x, block_size, packed_size)) for x in (k, v))
    device = q.device
    D, sms = q.shape[3], _multiprocessors(device)
    exact = exact_tiles(sms, g, D, v.shape[3], packed_size)
    if exact and not wastes(N, M, topk, block_size, q_offset):
        exact = None
    tiles = exact or plan(g, D, v.shape[3], packed_size)

    boxes_per_block = packed_size // tiles.box
    tiles_of_head = -(-N // tiles.queries)
    boxes = -(-M // block_size) * boxes_per_block
    # Two steps more than there are boxes: masked steps are padded, and what follows the last step is read, too.
    capacity = min(boxes, tiles.queries * topk * boxes_per_block) + 2 * (tiles.BN // tiles.box)
    lists = B * Hk * tiles_of_head
    listed, masks = (torch.empty(lists, capacity, dtype=torch.int32, device=device) for _ in range(2))
    counts = torch.empty(lists, 4, dtype=torch.int32, device=device)
    out = torch.empty(B, Hq, N, v.shape[3], dtype=q.dtype, device=device)
    lse = torch.empty(B, Hq, N, dtype=torch.float32, device=device) if return_lse else None

    compiled.block_lists(tiles, _INDEX_DTYPES[index.dtype])(
        index, listed, masks, counts, M, block_size, boxes_per_block, q_offset, tiles_of_head
    )
    chunks = -(-g // tiles.heads)
    (compiled.exact if exact else compiled.union)(tiles, _DTYPES[q.dtype])(
        q, k, v, listed, masks, counts, out, _nothing(device) if lse is None else lse,
        scale, int(return_lse), M, block_size, boxes_per_block, q_offset, g, chunks, tiles_of_head,
        together(M, D + v.shape[3]) * chunks, min(sms * (2 if exact else 1), lists * chunks),
    )  # fmt: skip
    if v.shape[3] != Dv:
        out = out[..., :Dv].contiguous()
    return out, lse


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
        refused = [s <= 0 or s >= 2**39 or s % _ALIGNED_FEATURES != 0 for s in strides]
        if not any(refused):
            return x
        if not any(no and length > 1 for no, length in zip(refused, x.shape, strict=False)):
            # The stride of a dimension of length 1 may be anything, and is not used: it has to be one that TMA takes.
            strides = [features if no else s for no, s in zip(refused, strides, strict=True)]
            return x.as_strided(x.shape, (*strides, 1))
    return x.clone(memory_format=torch.contiguous_format)


@cache
def _nothing(device: torch.device) -> Tensor:
    """In the place of a result that is not asked for."""
    return torch.empty(1, 1, 1, dtype=torch.float32, device=device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


backend = TileLangBackend()
