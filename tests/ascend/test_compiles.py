"""The compile gate: the 910B kernel through the open steps of its compiler, in three versions, for every 910B."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import cases
from sparse_attn.backends.triton_ascend import adapter
from sparse_attn.backends.triton_ascend.plan import Tiles, tiles_for

from .compiler import COMPILERS, L0C, L1, TARGETS, UB, Compiled, compile_for
from .lowering import linalg

# What else is supported.
OTHERS: dict[str, dict[str, Any]] = {
    "one_query": {"N": 1, "q_offset": 1023}, "group1": {"Hq": 4}, "group5": {"Hq": 20}, "group32": {"Hq": 128},
    "group64": {"Hq": 256}, "d16": {"D": 16}, "d80": {"D": 80}, "d96": {"D": 96}, "d192": {"D": 192},
    "d256": {"D": 256}, "d256_group32": {"D": 256, "Hq": 128}, "dv32": {"Dv": 32}, "block1": {"block_size": 1},
    "block16": {"block_size": 16}, "block48": {"block_size": 48}, "block128": {"block_size": 128},
    "sparse": {"N": 8192, "M": 8192, "topk": 8},
}  # fmt: skip


def launch_of(
    B: int = 1, Hq: int = 64, Hk: int = 4, N: int = 1024, M: int = 1024, D: int = 128, Dv: int | None = None,
    topk: int = 16, block_size: int = 64, q_offset: int = 0, dtype: torch.dtype = torch.float16,
    tiles: Tiles | None = None,
) -> adapter.Launch:  # fmt: skip
    """The launch of a call; its values do not matter, nor do its lengths to what is compiled."""
    q = torch.empty(B, Hq, N, D, dtype=dtype)
    k, v = (torch.empty(B, Hk, M, n, dtype=dtype) for n in (D, D if Dv is None else Dv))
    index = torch.zeros(B, Hk, N, topk, dtype=torch.int32)
    return adapter.prepare(q, k, v, index, block_size, 0.1, q_offset, True, tiles)[2]


def tiles_of(point: cases.Point) -> Tiles:
    return tiles_for(point.Hq // point.Hk, point.N, point.M, point.D, point.Dv, point.block_size, point.B * point.Hk)


# What is compiled at the contest's points, each named by one of the points where it is.
KERNELS = {
    (point.D, point.block_size, tiles): f"{point.set}-{point.size}"
    for point in cases.POINTS
    for tiles in [tiles_of(point)]
}


def gate(launch: adapter.Launch, target: str, version: str) -> Compiled:
    compiled = compile_for(linalg(launch, target), target, version)
    assert not compiled.error, compiled.error
    # As "Due to UB overflow, automatically set enable-auto-multi-buffer to false": it would run, and slowly.
    assert not compiled.notes, compiled.notes
    assert 0 < compiled.ub <= UB
    assert 0 < compiled.l1 <= L1
    assert 0 < compiled.l0c <= L0C
    return compiled


@pytest.mark.parametrize("version", COMPILERS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("D", "block_size", "tiles"), KERNELS, ids=KERNELS.values())
def test_contest_points(D: int, block_size: int, tiles: Tiles, target: str, version: str) -> None:
    gate(launch_of(D=D, block_size=block_size, tiles=tiles), target, version)


@pytest.mark.parametrize("version", COMPILERS)
@pytest.mark.parametrize(("D", "block_size", "tiles"), KERNELS, ids=KERNELS.values())
def test_contest_points_in_bf16(D: int, block_size: int, tiles: Tiles, version: str) -> None:
    gate(launch_of(D=D, block_size=block_size, tiles=tiles, dtype=torch.bfloat16), "Ascend910B2", version)


@pytest.mark.parametrize("version", COMPILERS)
@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("D", [64, 128])
def test_every_tile(D: int, T: int, version: str) -> None:
    gate(launch_of(D=D, tiles=Tiles(16, T, 64)), "Ascend910B2", version)


@pytest.mark.parametrize("version", COMPILERS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes(name: str, version: str) -> None:
    gate(launch_of(**OTHERS[name]), "Ascend910B2", version)


@pytest.mark.parametrize("version", COMPILERS)
def test_the_gate_can_fail(version: str) -> None:
    """A tile too large for a vector core's buffer is noticed, as an error or as what was given up for it."""
    with pytest.raises(AssertionError, match=r"(?i)overflow"):
        gate(launch_of(tiles=Tiles(512, 1, 64), Hq=2048), "Ascend910B2", version)
