"""The shared cases: inputs that broke other libraries, the contest's points, and the corners of the contract.

Every backend meets every case, in every dtype, on every device. A case builds its inputs on the CPU from a fixed seed,
so that all devices get the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Inputs:
    """One call: q ``[B, Hq, N, D]``, k ``[B, Hk, M, D]``, v ``[B, Hk, M, Dv]``, index ``[B, Hk, N, topk]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    index: Tensor
    block_size: int
    sm_scale: float | None = None
    q_offset: int = 0

    @property
    def args(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.index, self.block_size, self.sm_scale

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"q_offset": self.q_offset}

    def to(self, device: torch.device) -> Inputs:
        """Move to ``device``; strides are kept (a copy to another device keeps them only when they are dense)."""
        if device.type == "cpu":
            return self
        return replace(self, **{n: _move(getattr(self, n), device) for n in ("q", "k", "v", "index")})


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[torch.dtype], Inputs]


CASES: dict[str, Case] = {}


def case(name: str, **arguments: Any) -> Callable[[Callable[..., Inputs]], Callable[..., Inputs]]:
    """Announce a builder of inputs under a name, called with a dtype and these arguments."""

    def announce(build: Callable[..., Inputs]) -> Callable[..., Inputs]:
        assert name not in CASES, f"two cases are called {name}"
        CASES[name] = Case(name, lambda dtype: build(dtype, **arguments))
        return build

    return announce


def _move(x: Tensor, device: torch.device) -> Tensor:
    """Copy the storage behind a view and take the same view of the copy: strides and surroundings stay."""
    size = x.untyped_storage().nbytes() // x.element_size()
    if size > 2**30:  # reserved, hardly used: copy the values alone
        return torch.empty(size, dtype=x.dtype, device=device).as_strided(x.shape, x.stride()).copy_(x)
    return x.as_strided((size,), (1,), 0).to(device).as_strided(x.shape, x.stride(), x.storage_offset())


# --- building blocks -------------------------------------------------------------------------------------------------


def random_index(
    B: int, Hk: int, N: int, M: int, topk: int, block_size: int, q_offset: int, generator: torch.Generator
) -> Tensor:
    """A random choice among the causal blocks of each query, ``-1`` behind if there are fewer: ``[B, Hk, N, topk]``."""
    nb = -(-M // block_size)
    position = torch.arange(N) + q_offset
    order = torch.rand(B, Hk, N, nb, generator=generator)
    causal = torch.arange(nb) * block_size <= position[:, None]
    ids = order.masked_fill(~causal, 2.0).argsort(-1)[..., :topk]
    ids = torch.where(causal.expand_as(order).gather(-1, ids), ids, -1)
    return torch.nn.functional.pad(ids, (0, topk - ids.shape[-1]), value=-1).int()


def make(
    dtype: torch.dtype,
    *,
    B: int = 1,
    Hq: int = 4,
    Hk: int = 2,
    N: int = 128,
    M: int | None = None,
    D: int = 64,
    Dv: int | None = None,
    topk: int = 2,
    block_size: int = 32,
    q_offset: int = 0,
    select_all: bool = False,
    sm_scale: float | None = None,
    seed: int = 0,
) -> Inputs:
    """Random inputs; ``select_all`` selects every block instead of a random few."""
    generator = torch.Generator().manual_seed(seed)
    M = N if M is None else M
    q = torch.randn(B, Hq, N, D, generator=generator).to(dtype)
    k = torch.randn(B, Hk, M, D, generator=generator).to(dtype)
    v = torch.randn(B, Hk, M, Dv or D, generator=generator).to(dtype)
    nb = -(-M // block_size)
    if select_all:
        index = torch.arange(nb, dtype=torch.int32).expand(B, Hk, N, nb).contiguous()
    else:
        index = random_index(B, Hk, N, M, topk, block_size, q_offset, generator)
    return Inputs(q, k, v, index, block_size, sm_scale, q_offset)


def _each(prefix: str, name: str, values: Any, **fixed: Any) -> None:
    """One case for each value of one argument of ``make``."""
    for value in values:
        case(f"{prefix}{value}", **fixed, **{name: value})(make)


# --- the contest's points, with fewer queries and keys at the same density -------------------------------------------

case("contest_small_statement", Hq=16, Hk=1, N=128, D=64, topk=4, block_size=32)(make)
case("contest_small_handout", Hq=16, Hk=1, N=128, D=64, topk=4, block_size=64)(make)
case("contest_medium", B=2, Hq=64, Hk=4, N=128, D=64, topk=2, block_size=64)(make)
case("contest_large1", Hq=64, Hk=4, N=256, D=128, topk=2, block_size=64)(make)
case("contest_large2_statement", B=2, Hq=32, Hk=2, N=512, D=128, topk=2, block_size=64)(make)
case("contest_large2_handout", Hq=32, Hk=2, N=512, D=128, topk=4, block_size=64)(make)
case("wide_batch", B=4, Hq=16, Hk=1, N=128, D=128, topk=2, block_size=32)(make)

# --- lengths ---------------------------------------------------------------------------------------------------------

case("n_gt_m", N=256, M=128, block_size=64, select_all=True)(make)
case("n_lt_m", N=64, M=192, block_size=64, select_all=True)(make)
case("one_query_many_keys", N=1, M=513, block_size=64, topk=4)(make)
case("one_query_many_keys_at_end", N=1, M=513, block_size=64, topk=4, q_offset=512)(make)
case("short_queries", B=2, N=7, M=130, block_size=64, select_all=True)(make)
case("last_block_partial", B=4, Hq=8, Hk=2, N=507, D=128, topk=2, block_size=64)(make)
case("ragged", B=2, Hq=8, N=203, M=331, D=64, topk=3, block_size=32, q_offset=128)(make)
case("decode_gqa", B=2, Hq=8, Hk=2, N=1, M=128, topk=2, q_offset=127)(make)
case("decode_gqa_at_start", B=2, Hq=8, Hk=2, N=1, M=128, topk=2)(make)
case("decode_speculative", B=2, Hq=16, Hk=2, N=5, M=1003, topk=6, block_size=64, q_offset=998)(make)
case("decode_into_unused_cache", B=2, Hq=16, Hk=2, N=3, M=512, topk=4, block_size=64, q_offset=100)(make)
case("long_cache", Hq=16, Hk=1, N=2, M=65536, topk=16, block_size=64, q_offset=65534)(make)
case("offset_beyond_cache", N=16, M=64, topk=2, q_offset=100)(make)
case("offset_negative", N=64, M=64, topk=2, q_offset=-20)(make)
case("offset_before_everything", N=16, M=64, topk=2, q_offset=-100)(make)
_each("tiny", "N", range(1, 9), B=2, topk=1, block_size=64)
_each("odd", "N", (2, 17, 63, 65, 200, 250), B=2, block_size=64, select_all=True)

# --- heads, features, blocks -----------------------------------------------------------------------------------------

for _g in (1, 2, 3, 4, 5, 8, 12, 16, 32, 64):
    case(f"group{_g}", Hq=2 * _g, Hk=2, N=128, topk=2)(make)
_each("d", "D", (16, 32, 64, 80, 96, 100, 112, 128, 192, 256), N=100, block_size=64, topk=1)
case("dv_smaller", N=100, D=64, Dv=32)(make)
case("dv_larger", N=100, D=64, Dv=128)(make)
_each("block", "block_size", (1, 16, 48, 64, 100, 128, 256), N=300, topk=2)
case("block600", Hq=8, N=40, M=1300, topk=2, block_size=600, q_offset=1260)(make)
case("one_block_larger_than_m", N=40, M=40, block_size=2**20, topk=1)(make)
case("topk_beyond_blocks", N=64, topk=9, block_size=32)(make)

# --- what index may hold ---------------------------------------------------------------------------------------------


@case("ids_out_of_range")
def _ids_out_of_range(dtype: torch.dtype) -> Inputs:
    x = make(dtype, N=128, M=120, topk=3)
    strange = torch.tensor([2**31 - 1, 4, 4 + 7, 120, 2143289344, -(2**31)], dtype=torch.int32)
    index = torch.cat([strange[:3], strange[3:]]).expand(*x.index.shape[:3], 6)
    return replace(x, index=torch.cat([index[..., :3], x.index, index[..., 3:]], -1))


@case("ids_int64")
def _ids_int64(dtype: torch.dtype) -> Inputs:
    x = make(dtype, N=128, topk=3)
    # The low halves of the strange ones are the ids 0 and 1: an id cut to 32 bits would be taken for a block.
    strange = torch.tensor([2**32, 2**32 + 1, -(2**63), 2**63 - 1]).expand(*x.index.shape[:3], 4)
    own = torch.full((*x.index.shape[:3], 1), 2)
    return replace(x, index=torch.cat([strange, own, x.index.masked_fill(x.index < 2, -1).long()], -1))


@case("minus_one_anywhere")
def _minus_one_anywhere(dtype: torch.dtype) -> Inputs:
    x = make(dtype, N=128)
    rows = torch.tensor([[-1, 3, -1, 0], [-1, -1, -1, 1], [2, -1, 0, -1], [-1, -1, 2, 3]], dtype=torch.int32)
    return replace(x, index=rows.repeat(32, 1).expand(1, 2, 128, 4).contiguous())


@case("minus_one_before_nan")
def _minus_one_before_nan(dtype: torch.dtype) -> Inputs:
    """An address made of id -1 would reach the block before the first, in front of the tensor: it holds NaN."""
    x = make(dtype, Hq=2, Hk=1, N=96)
    views = {}
    for name in ("k", "v"):
        dense = getattr(x, name)
        padded = torch.full((1, 1, 96 + 64, 64), torch.nan, dtype=dtype)
        padded[:, :, 32:128] = dense
        views[name] = padded[:, :, 32:128]
    index = torch.tensor([-1, 0, -1, 1], dtype=torch.int32).expand(1, 1, 96, 4).contiguous()
    return replace(x, **views, index=index)


@case("empty_rows_inside_tiles")
def _empty_rows(dtype: torch.dtype) -> Inputs:
    x = make(dtype, Hq=8, N=128, topk=2, seed=3)
    index = x.index.clone()
    index[:, :, ::7] = -1
    index[:, :, 64] = -1
    return replace(x, index=index)


@case("loud_blocks_of_others16", block_size=16)
@case("loud_blocks_of_others32", block_size=32)
@case("loud_blocks_of_others64", block_size=64)
@case("loud_blocks_of_others_group4", block_size=32, Hq=4)
def _loud_blocks_of_others(dtype: torch.dtype, block_size: int, Hq: int = 16) -> Inputs:
    """Neighbours select blocks whose scores are so much larger that this query's weights vanish beside theirs."""
    M = 16 * block_size
    x = make(dtype, Hq=Hq, Hk=1, N=32, M=M, block_size=block_size, q_offset=M - 32)
    blocks = torch.arange(M) // block_size
    k = x.k * torch.where(blocks % 2 == 0, 1, 10)[:, None].to(dtype)
    rows = 2 * torch.arange(7, dtype=torch.int32) + torch.arange(2, dtype=torch.int32)[:, None]
    return replace(x, k=k, index=rows.repeat(16, 1).expand(1, 1, 32, 7).contiguous())


@case("nothing_selected")
def _nothing_selected(dtype: torch.dtype) -> Inputs:
    x = make(dtype, N=70)
    return replace(x, index=torch.full_like(x.index, -1))


@case("only_later_blocks")
def _only_later_blocks(dtype: torch.dtype) -> Inputs:
    """Every query selects blocks behind it alone: valid ids that causality empties."""
    x = make(dtype, N=96)
    later = (torch.arange(96) // 32 + 1).clamp(max=2).int()
    return replace(x, index=later[None, None, :, None].expand(1, 2, 96, 2).contiguous())


@case("duplicates")
def _duplicates(dtype: torch.dtype) -> Inputs:
    x = make(dtype, N=128, topk=2, seed=5)
    return replace(x, index=torch.cat([x.index, x.index[..., :1], x.index, x.index.flip(-1)], -1))


@case("duplicates_across_rows")
def _duplicates_across_rows(dtype: torch.dtype) -> Inputs:
    x = make(dtype, N=128)
    return replace(x, index=torch.tensor([1, 0, 1, 1], dtype=torch.int32).expand(1, 2, 128, 4).contiguous())


@case("topk_beyond_64")
def _topk_beyond_64(dtype: torch.dtype) -> Inputs:
    """More ids than are looked at together, with duplicates far apart and ids that mean nothing between them."""
    x = make(dtype, Hq=8, N=24, M=2100, topk=70, block_size=16, q_offset=2000, seed=9)
    strange = torch.tensor([-1, 2**31 - 1, 5000, -7], dtype=torch.int32).expand(*x.index.shape[:3], 4)
    return replace(x, index=torch.cat([x.index[..., :66], strange, x.index.flip(-1)], -1))


@case("topk_zero")
def _topk_zero(dtype: torch.dtype) -> Inputs:
    x = make(dtype, N=33)
    return replace(x, index=x.index[..., :0])


@case("own_block_only")
def _own_block_only(dtype: torch.dtype) -> Inputs:
    x = make(dtype, N=160)
    return replace(x, index=(torch.arange(160) // 32).int()[None, None, :, None].expand(1, 2, 160, 1).contiguous())


@case("batches_differ")
def _batches_differ(dtype: torch.dtype) -> Inputs:
    return make(dtype, B=3, N=150, topk=2, seed=7)


# --- empty tensors ---------------------------------------------------------------------------------------------------

case("no_queries", N=0, M=64)(make)
case("no_keys", N=16, M=0)(make)
case("no_batch", B=0, N=16)(make)

# --- memory: strides, offsets, surroundings --------------------------------------------------------------------------


@case("strange_batch_stride", stride=1)
@case("strange_batch_stride_zero", stride=0)
@case("strange_batch_stride_huge", stride=2**40)
def _strange_batch_stride(dtype: torch.dtype, stride: int) -> Inputs:
    """With B = 1 the first stride is never used; other libraries took a product with it for a size."""
    x = make(dtype, B=1, Hq=2, Hk=2, N=256, block_size=64, topk=2)
    views = {n: getattr(x, n).as_strided((1, 2, 256, 64), (stride, 256 * 64, 64, 1)) for n in ("q", "k", "v")}
    return replace(x, **views)


@case("layout_bnhd")
def _layout_bnhd(dtype: torch.dtype) -> Inputs:
    """Tensors laid out ``[B, N, H, D]``, as most models have them, seen through a transpose."""
    x = make(dtype, B=2, Hq=8, N=130)
    views = {n: getattr(x, n).transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v", "index")}
    return replace(x, **views)


@case("packed_qkv")
def _packed_qkv(dtype: torch.dtype) -> Inputs:
    """q, k and v as slices of one projection ``[B, N, (Hq + 2 Hk) * D]``."""
    x = make(dtype, B=2, Hq=4, Hk=2, N=130)
    packed = torch.cat([x.q, x.k, x.v], 1).transpose(1, 2).contiguous().transpose(1, 2)
    return replace(x, q=packed[:, :4], k=packed[:, 4:6], v=packed[:, 6:])


@case("last_dim_strided")
def _last_dim_strided(dtype: torch.dtype) -> Inputs:
    x = make(dtype, N=70)
    views = {n: getattr(x, n).mT.contiguous().mT for n in ("q", "k", "v", "index")}
    return replace(x, **views)


@case("every_second_feature")
def _every_second_feature(dtype: torch.dtype) -> Inputs:
    x = make(dtype, N=70, D=128)
    return replace(x, q=x.q[..., ::2], k=x.k[..., ::2], v=x.v[..., 1::2])


@case("expanded")
def _expanded(dtype: torch.dtype) -> Inputs:
    """Strides of 0: one index for all heads and batches, one key/value cache for all batches."""
    x = make(dtype, B=2, Hq=8, Hk=2, N=96)
    return replace(x, k=x.k[:1].expand_as(x.k), v=x.v[:1].expand_as(x.v), index=x.index[:1, :1].expand_as(x.index))


@case("int32_offsets_batch", axis=0)
@case("int32_offsets_head", axis=1)
@case("int32_offsets_row", axis=2)
def _int32_offsets(dtype: torch.dtype, axis: int) -> Inputs:
    """Strides whose product with b, h or i (or j) passes 2**31 elements.

    The storage is reserved, not written: the system backs it with memory only where the case puts values.
    """
    x = make(dtype, B=2, Hq=2, Hk=2, N=64, D=16, block_size=32, topk=2)
    views = {}
    for name in ("q", "k", "v", "index"):
        dense = getattr(x, name)
        strides = list(dense.stride())
        strides[axis] = 2**31 // (dense.shape[axis] - 1) + 64
        last = sum((n - 1) * stride for n, stride in zip(dense.shape, strides, strict=True))
        views[name] = torch.empty(last + 1, dtype=dense.dtype).as_strided(dense.shape, strides).copy_(dense)
    return replace(x, **views)


@case("unseen_keys_hold_nan")
@case("unseen_keys_hold_nan_d192", D=192)
def _unseen_keys_hold_nan(dtype: torch.dtype, D: int = 64) -> Inputs:
    """A cache whose tail was never written, and blocks that nobody selected: NaN there must not reach any output."""
    x = make(dtype, B=2, Hq=8, N=5, M=500, D=D, block_size=64, topk=2, q_offset=300)
    index = torch.tensor([0, 4], dtype=torch.int32).expand(2, 2, 5, 2).contiguous()
    k, v = x.k.clone(), x.v.clone()
    for tensor in (k, v):
        tensor[:, :, 64:256] = torch.nan
        tensor[:, :, 305:] = torch.nan
    return replace(x, k=k, v=v, index=index)


@case("keys_behind_rows_that_see_nothing")
@case("keys_behind_rows_that_see_nothing_block8", block_size=8)
@case("keys_behind_rows_that_see_nothing_block24", block_size=24)
@case("keys_behind_rows_that_see_nothing_block16_dv192", block_size=16, Dv=192)
def _keys_behind_rows_that_see_nothing(dtype: torch.dtype, block_size: int = 32, Dv: int = 64) -> Inputs:
    """Padded queries behind the real ones, in front of a cache whose tail was never written: NaN there goes nowhere."""
    x = make(dtype, Hq=8, Hk=1, N=8, M=32, Dv=Dv, topk=1, block_size=block_size)
    index = torch.tensor([0, 0, 0, 0, -1, -1, -1, -1], dtype=torch.int32)[None, None, :, None].clone()
    k, v = x.k.clone(), x.v.clone()
    for tensor in (k, v):
        tensor[:, :, 4:] = torch.nan
    return replace(x, k=k, v=v, index=index)


# --- numbers ---------------------------------------------------------------------------------------------------------


@case("peaked")
def _peaked(dtype: torch.dtype) -> Inputs:
    x = make(dtype, Hq=16, Hk=1, N=128, D=128, topk=2)
    return replace(x, q=x.q * 8)


@case("large_scores")
def _large_scores(dtype: torch.dtype) -> Inputs:
    """Scores in the thousands: exp overflows unless the maximum is taken off first, in fp32."""
    x = make(dtype, N=128, sm_scale=1.0)
    return replace(x, q=x.q * 16, k=x.k * 16)


case("scale_zero", N=96, sm_scale=0.0)(make)
case("scale_negative", N=96, sm_scale=-0.3)(make)
