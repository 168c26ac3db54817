"""The points of the contest, and data for them: q, k, v and three patterns of index, made on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

SETS = ("statement", "handout")
PATTERNS = ("random", "local", "dense")

# Scores of (query, key block) pairs held at a time while an index is drawn: 64 MiB in fp32.
_CHUNK = 2**24
# Queries between two independent draws of the local pattern's scores: how fast its selection drifts.
_DRIFT = 64


@dataclass(frozen=True)
class Point:
    """One problem size. ``set`` and ``size`` are its name, the rest are the arguments' shapes and ``q_offset``."""

    set: str
    size: str
    B: int
    Hq: int
    Hk: int
    N: int
    M: int
    D: int
    Dv: int
    topk: int
    block_size: int
    q_offset: int = 0

    @property
    def num_blocks(self) -> int:
        """Key blocks, ``ceil(M / block_size)``; the last one may be partial."""
        return -(-self.M // self.block_size)

    @property
    def shape(self) -> dict[str, int]:
        """Everything but the name."""
        return {name: value for name, value in asdict(self).items() if name not in ("set", "size")}

    @property
    def density(self) -> float:
        """Share of the causal key blocks that is selected, when each query takes ``topk`` of its own, or all."""
        causal = _own_block(self, torch.arange(self.N)).clamp(-1, self.num_blocks - 1) + 1
        return float(causal.clamp(max=self.topk).sum() / causal.sum().clamp(min=1))


def _point(set: str, size: str, B: int, Hq: int, Hk: int, N: int, D: int, topk: int, block_size: int) -> Point:  # noqa: A002
    return Point(set, size, B, Hq, Hk, N, N, D, D, topk, block_size)


POINTS = (
    _point("statement", "small", B=1, Hq=16, Hk=1, N=128, D=64, topk=4, block_size=32),
    _point("statement", "medium", B=2, Hq=64, Hk=4, N=1024, D=64, topk=16, block_size=64),
    _point("statement", "large-1", B=4, Hq=64, Hk=4, N=4096, D=128, topk=32, block_size=64),
    _point("statement", "large-2", B=8, Hq=64, Hk=4, N=8192, D=128, topk=32, block_size=64),
    _point("handout", "small", B=1, Hq=16, Hk=1, N=128, D=64, topk=4, block_size=64),
    _point("handout", "medium", B=1, Hq=64, Hk=4, N=1024, D=64, topk=16, block_size=64),
    _point("handout", "large-1", B=1, Hq=64, Hk=4, N=4096, D=128, topk=32, block_size=64),
    _point("handout", "large-2", B=2, Hq=64, Hk=4, N=8192, D=128, topk=64, block_size=64),
)
SIZES = {
    "small": ("small",),
    "medium": ("medium",),
    "large": ("large-1", "large-2"),
    "large-1": ("large-1",),
    "large-2": ("large-2",),
    "all": ("small", "medium", "large-1", "large-2"),
}


def points(set_name: str, sizes: list[str]) -> list[Point]:
    """The points of one set, in its order; ``sizes`` are keys of ``SIZES``."""
    wanted = {name for size in sizes for name in SIZES[size]}
    return [point for point in POINTS if point.set == set_name and point.size in wanted]


def override(point: Point, size: str, **shape: Any) -> Point:
    """Change some fields. M follows N, and Dv follows D, where they were equal and are not given themselves."""
    if point.M == point.N and "N" in shape:
        shape.setdefault("M", shape["N"])
    if point.Dv == point.D and "D" in shape:
        shape.setdefault("Dv", shape["D"])
    return replace(point, size=size, **shape)


@dataclass(frozen=True)
class Case:
    """A point with its tensors: q ``[B, Hq, N, D]``, k ``[B, Hk, M, D]``, v ``[B, Hk, M, Dv]``, index as below."""

    point: Point
    pattern: str
    seed: int
    q: Tensor
    k: Tensor
    v: Tensor
    index: Tensor

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """The positional arguments of ``sparse_attention``."""
        return self.q, self.k, self.v, self.index, self.point.block_size

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"q_offset": self.point.q_offset}


def make_case(point: Point, pattern: str, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    """Make the index, and q, k, v from a standard normal distribution, drawn in ``dtype`` on ``device``."""
    index = make_index(point, pattern, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)  # not the index's: it must not depend on q, k, v
    q, k, v = (
        torch.randn(point.B, heads, length, features, dtype=dtype, device=device, generator=generator)
        for heads, length, features in (
            (point.Hq, point.N, point.D),
            (point.Hk, point.M, point.D),
            (point.Hk, point.M, point.Dv),
        )
    )
    return Case(point, pattern, seed, q, k, v, index)


def make_index(point: Point, pattern: str, device: torch.device, seed: int) -> Tensor:
    """Make ``index`` ``[B, Hk, N, topk]``, int32. Every query's ids are distinct and causal, with -1 behind.

    * ``random``: the rule of the contest's handout. A random permutation of the causal blocks, cut to topk; the same
      list for all batches and heads. The query's own block need not be in it.
    * ``local``: what trained models select. Neighbouring queries share most blocks, the first and the query's own block
      are always in; every batch and head has a list of its own.
    * ``dense``: every causal block, in order (``topk`` must be ``point.num_blocks``).
    """
    B, Hk, N, topk = point.B, point.Hk, point.N, point.topk
    generator = torch.Generator(device).manual_seed(seed)
    if pattern == "local":
        index = torch.full((B, Hk, N, topk), -1, dtype=torch.int32, device=device)
        for lists in index.flatten(0, 1):
            knots = torch.randn(-(-N // _DRIFT) + 1, point.num_blocks, device=device, generator=generator)
            for rows in _rows(point, device):
                _select_best(lists, rows, _local_scores(point, rows, knots, generator), point)
        return index

    lists = torch.full((N, topk), -1, dtype=torch.int32, device=device)
    for rows in _rows(point, device):
        if pattern == "dense":
            blocks = torch.arange(point.num_blocks, dtype=torch.int32, device=device)
            lists[rows] = torch.where(blocks <= _own_block(point, rows)[:, None], blocks, -1)
        else:
            # The best of independent scores, best first, are a random permutation cut to topk.
            scores = torch.rand(len(rows), point.num_blocks, device=device, generator=generator)
            _select_best(lists, rows, scores, point)
    return lists.expand(B, Hk, N, topk).contiguous()


def _rows(point: Point, device: torch.device) -> Iterator[Tensor]:
    step = max(1, _CHUNK // point.num_blocks)
    for start in range(0, point.N, step):
        yield torch.arange(start, min(start + step, point.N), device=device)


def _own_block(point: Point, rows: Tensor) -> Tensor:
    """The block in which each query stands: negative before the first key, past the last block behind the last key."""
    return (rows + point.q_offset).div(point.block_size, rounding_mode="floor")


def _select_best(lists: Tensor, rows: Tensor, scores: Tensor, point: Point) -> None:
    """Write the causal blocks of the highest ``scores`` ``[n, num_blocks]`` to ``lists[rows]``, best first."""
    future = torch.arange(point.num_blocks, device=scores.device) > _own_block(point, rows)[:, None]
    best = scores.masked_fill_(future, -torch.inf).topk(min(point.topk, point.num_blocks))
    lists[rows, : best.indices.shape[1]] = best.indices.where(best.values > -torch.inf, -1).int()


def _local_scores(point: Point, rows: Tensor, knots: Tensor, generator: torch.Generator) -> Tensor:
    """Scores that change slowly from query to query: interpolated between rows of ``knots``, plus some noise."""
    before, share = rows // _DRIFT, (rows % _DRIFT / _DRIFT)[:, None]
    scores = torch.lerp(knots[before], knots[before + 1], share)
    scores += 0.1 * torch.randn(scores.shape, device=scores.device, generator=generator)
    scores[:, 0] = 1e4
    own = _own_block(point, rows).clamp(0, point.num_blocks - 1)
    return scores.scatter_(1, own[:, None], 1e5)
