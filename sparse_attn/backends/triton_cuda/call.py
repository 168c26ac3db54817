"""One call in the form in which the kernels take it: its launches, its results, and what its strides allow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .block_lists import BlockLists, block_lists
from .gather import gather_kernel, merge_kernel
from .launch import Launch
from .plan import Gather, Plan, Union, padded
from .union import halved_union_kernel, union_kernel

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton < 3.4: no TMA, pointers instead
    TensorDescriptor = None

# Row strides up to here are constants in a kernel: more rows than a tile has, times this, is below 2**31.
_MAX_CONSTANT_STRIDE = 2**20
# Tiles in a block up to here are constants, too: a block longer than that may be as long as the keys.
_MAX_CONSTANT_SUBTILES = 16
_LOG2E = 1.4426950408889634


class Call:
    """The arguments of one call in the form in which the kernels take them, and its results."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        block_size: int,
        sm_scale: float,
        q_offset: int,
        return_lse: bool,
    ) -> None:
        self.q, self.k, self.v, self.index = q, k, v, index
        self.block_size, self.q_offset, self.return_lse = block_size, q_offset, return_lse
        self.B, self.Hq, self.N, self.D = q.shape
        _, self.Hk, self.M, self.Dv = v.shape
        self.g = self.Hq // self.Hk
        self.negative = sm_scale < 0
        self.c = max(abs(sm_scale) * _LOG2E, 1e-37)  # above 0: it is a factor of -inf
        self.layout = layout_of(q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.element_size())
        self.strides = (*q.stride(), *k.stride(), *v.stride(), block_size)
        self.aligned = not (q.data_ptr() | k.data_ptr() | v.data_ptr() | index.data_ptr()) & 15
        # What else a kernel may be compiled for, see Launch.run.
        short = max(index.stride()) < 2**31
        self.like = (q.device, q.dtype, index.dtype) if self.aligned and short else None
        self.out = torch.empty((self.B, self.Hq, self.N, self.Dv), dtype=q.dtype, device=q.device)
        self.lse = None
        if return_lse:
            self.lse = torch.empty((self.B, self.Hq, self.N), dtype=torch.float32, device=q.device)

    def launches(self, chosen: Plan) -> list[Launch]:
        """What has to run, in this order, for ``out`` and ``lse`` to be filled."""
        launches, lists = [], None
        if chosen.union is not None:
            tiles = chosen.union
            lists, fill = block_lists(
                self.index, self.M, self.block_size, self.q_offset, tiles.T, tiles.halved, chosen.sharing
            )
            launches += [fill, self._union(tiles, lists, routed=chosen.gather is not None)]
        if chosen.gather is not None:
            launches += self._gather(chosen.gather, lists)
        return launches

    def _union(self, tiles: Union, lists: BlockLists, routed: bool) -> Launch:
        heads = 2 * tiles.R // tiles.T if tiles.halved else tiles.R // tiles.T
        tma = self._tma(tiles)
        descriptors = [_descriptor(x, tiles.BN) if tma else x for x in (self.k, self.v)]
        if not tiles.halved:
            descriptors.insert(0, _descriptor(self.q, tiles.T, heads) if tma else self.q)
        return Launch(
            halved_union_kernel if tiles.halved else union_kernel,
            (lists.tiles, self.B * self.Hk * -(-self.g // heads), 1),
            tiles.warps,
            (
                self.q, self.k, self.v, *descriptors, self.out, self.out if self.lse is None else self.lse,
                lists.entries, lists.fields, self.c,
            ),
            self.strides,
            (self.Hk, self.g, self.N, self.M, self.q_offset, lists.capacity),
            (
                *_union_constants(tiles, self.layout.rows, self.D, self.Dv, self.block_size),
                tma, self.negative, self.return_lse, routed, tiles.stages,
            ),
        )  # fmt: skip

    def _gather(self, tiles: Gather, lists: BlockLists | None) -> list[Launch]:
        splits, topk = tiles.splits, self.index.shape[3]
        out, lse = self.out, self.lse
        if splits > 1:
            out = torch.empty((splits, *self.out.shape), dtype=torch.float32, device=out.device)
            lse = torch.empty((splits, *self.out.shape[:3]), dtype=torch.float32, device=out.device)
        tma = self._tma(tiles)
        T, list_tiles, fields = (1, 0, self.index) if lists is None else (lists.T, lists.tiles, lists.fields)
        launch = Launch(
            gather_kernel,
            (self.N * splits, self.B * self.Hk * -(-self.g // tiles.R), 1),
            tiles.warps,
            (
                self.q, self.k, self.v, *(_descriptor(x, tiles.BN) if tma else x for x in (self.k, self.v)),
                self.index, out, out if lse is None else lse, fields, self.c,
            ),
            self.strides,
            (*self.index.stride(), self.Hk, self.g, self.N, self.M, topk, self.q_offset, list_tiles),
            (
                *_gather_constants(tiles, self.layout.rows, self.D, self.Dv, self.block_size, min(64, padded(topk)), T),
                tma, self.negative, lse is not None, lists is not None, tiles.pairs, tiles.stages,
            ),
        )  # fmt: skip
        if splits == 1:
            return [launch]
        rows, block = self.B * self.Hq * self.N, 4
        merge = Launch(
            merge_kernel,
            (-(-rows // block), 1, 1),
            4,
            (out, lse, self.out, self.out if self.lse is None else self.lse),
            (),
            (rows,),
            (self.Dv, padded(self.Dv), splits, block, self.return_lse),
        )
        return [launch, merge]

    def _tma(self, tiles: Union | Gather) -> bool:
        """Whether TMA copies tiles: asked for, no block ends inside one, nothing to negate, tensors that it takes."""
        even = self.block_size % tiles.BN == 0
        return tiles.tma and even and not self.negative and self.aligned and self.layout.describable


class Layout(NamedTuple):
    """What the strides of q, k and v allow.

    ``rows`` are the row strides of k and v where kernels may be made for them, else 0; ``describable`` says whether TMA
    takes all three.
    """

    rows: tuple[int, int]
    describable: bool


@lru_cache(maxsize=1024)
def layout_of(q_shape: Any, q: Any, k_shape: Any, k: Any, v_shape: Any, v: Any, size: int) -> Layout:
    """Of shapes and strides, and the bytes of an element: worked out once for all calls on tensors of one layout."""
    sizes = ((q_shape, q), (k_shape, k), (v_shape, v))
    describable = TensorDescriptor is not None and all(_describable(*x, size) for x in sizes)
    return Layout((_constant_row(k), _constant_row(v)), describable)


def _describable(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
    """What TMA asks of a tensor: features adjacent, everything else at multiples of 16 bytes (CUDA driver API)."""
    used = [stride for length, stride in zip(shape[:3], strides, strict=False) if length > 1]
    return strides[3] == 1 and all(0 < stride * size < 2**40 and stride * size % 16 == 0 for stride in used)


def _descriptor(x: Tensor, rows: int, heads: int = 1) -> Any:
    """A TMA descriptor for tiles of so many rows, of so many heads."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(_described(x.shape, x.stride(), x.dtype, rows, heads), base=x)
    return descriptor


@lru_cache(maxsize=1024)
def _described(shape: Any, strides: Any, dtype: torch.dtype, rows: int, heads: int) -> dict[str, Any]:
    """What a TMA descriptor has beside its tensor. Triton checks it at each one made by its constructor: 4 us."""
    # The stride of a dimension of length 1 may be anything, and is not used: it has to be one that TMA takes.
    strides = [stride if length > 1 else 16 for length, stride in zip(shape[:3], strides, strict=False)]
    block = [1, heads, rows, padded(shape[3])]
    fields = vars(TensorDescriptor(torch.empty(0, dtype=dtype), list(shape), [*strides, 1], block))
    return {name: value for name, value in fields.items() if name != "base"}


@lru_cache(maxsize=1024)
def _union_constants(tiles: Union, rows: tuple[int, int], D: int, Dv: int, block_size: int) -> tuple[Any, ...]:
    widths = D, Dv, padded(D), padded(Dv) // tiles.parts, tiles.parts
    return *widths, tiles.R, tiles.T, *_key_tiles(tiles, block_size), *rows


@lru_cache(maxsize=1024)
def _gather_constants(
    tiles: Gather, rows: tuple[int, int], D: int, Dv: int, block_size: int, ids: int, T: int
) -> tuple[Any, ...]:
    widths = D, Dv, padded(D), padded(Dv)
    return *widths, tiles.R, *_key_tiles(tiles, block_size), ids, T, tiles.splits, *rows


def _key_tiles(tiles: Union | Gather, block_size: int) -> tuple[int, int, int, bool]:
    """BN, BN where keys are masked, tiles in a block (0: as many as there are), and whether they end with it."""
    n = -(-block_size // tiles.BN)
    return tiles.BN, tiles.BN_masked, n if n <= _MAX_CONSTANT_SUBTILES else 0, block_size % tiles.BN == 0


def _constant_row(strides: Sequence[int]) -> int:
    """The row stride of k or v, if a kernel may be made for it: features adjacent, and not a length in disguise."""
    return strides[2] if strides[3] == 1 and 0 < strides[2] <= _MAX_CONSTANT_STRIDE else 0
