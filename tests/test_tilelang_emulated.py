"""The TileLang backend on a CPU: the CUDA C++ of its kernels, run by ``emulated_hopper.h``, on the shared cases.

Kernels that one or two cases need are left out unless ``SPARSE_ATTN_TEST_EMULATED=all``: each takes TileLang 10 to 20
seconds. On a Hopper GPU the cases go through the backend itself, in test_backends.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("tilelang")

from sparse_attn.backends.tilelang_hopper import adapter
from sparse_attn.backends.tilelang_hopper.adapter import TileLangBackend
from sparse_attn.backends.tilelang_hopper.plan import Tiles, plan

from .cases import CASES, Inputs, make
from .conftest import hopper_is_here
from .test_backends import assert_close, truth, truth_of_case
from .test_tilelang import exact_tiles_of

pytestmark = [
    pytest.mark.skipif(hopper_is_here(), reason="a Hopper GPU is here: test_backends runs the cases on it"),
    pytest.mark.usefixtures("hopper"),
]


def union_tiles_of(x: Inputs) -> Tiles | None:
    """Tiles of the kernel that runs this on an H200, None if nothing is to be computed."""
    B, Hq, N, D = x.q.shape
    _, Hk, M, Dv = x.v.shape
    topk = x.index.shape[3]
    if 0 in (B, N, M, topk, Dv):
        return None
    return adapter._call(B, Hq, Hk, N, M, D, Dv, topk, x.block_size, 0, 132).tiles


def by_kernel(tiles_of: Callable[[Inputs], Tiles | None]) -> list[str]:
    """Cases that ``tiles_of`` has tiles for, those with the same ones together."""
    tiles = {name: tiles_of(case.build(torch.float16)) for name, case in CASES.items()}
    users = Counter(tiles.values())
    least = 1 if os.environ.get("SPARSE_ATTN_TEST_EMULATED") == "all" else 3
    return sorted((name for name in CASES if tiles[name] and users[tiles[name]] >= least), key=lambda x: tiles[x])


def check(x: Inputs, case: str | None = None) -> None:
    expected = truth(x) if case is None else truth_of_case(case, x.q.dtype)
    scale = x.q.shape[3] ** -0.5 if x.sm_scale is None else x.sm_scale
    out, lse = TileLangBackend()(*x.args[:5], scale, x.q_offset, True)
    assert_close(out, expected.out, expected.out_bound, "out")
    assert_close(lse, expected.lse, expected.lse_bound, "lse")


@pytest.mark.parametrize("case", by_kernel(union_tiles_of))
def test_case(case: str) -> None:
    check(CASES[case].build(torch.float16), case)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((name, torch.float16) for name in by_kernel(exact_tiles_of)), ("contest_large2_statement", torch.bfloat16)],
)
def test_exact_kernel(case: str, dtype: torch.dtype, exact_everywhere: None) -> None:
    check(CASES[case].build(dtype), case)


def test_maxima_that_grow(exact_everywhere: None) -> None:
    """Scores that outgrow those before them, again and again: each time what was summed up refers to a new maximum."""
    x = make(torch.float16, Hq=16, Hk=1, N=8, M=1024, D=128, topk=16, block_size=64, q_offset=1016, select_all=True)
    x.k.mul_(torch.arange(1.0, 17).repeat_interleave(64).view(1024, 1))
    check(x)


@pytest.mark.parametrize("case", ["contest_large1", "contest_large2_statement"])
def test_bfloat16(case: str) -> None:
    check(CASES[case].build(torch.bfloat16), case)


def test_a_kernel_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two stages of v, a warpgroup keeps one for the step that the other needs it for."""
    monkeypatch.setattr(adapter, "_call", adapter._call.__wrapped__)
    monkeypatch.setattr(adapter, "plan", lambda *problem: plan(*problem)._replace(v_stages=2))
    x = make(torch.float16, Hq=16, Hk=1, N=8, M=1024, topk=8, block_size=64, q_offset=1016)
    x.index[:] = torch.arange(8) * 2 + torch.arange(8).view(8, 1) // 4  # one has the even blocks, one the odd ones
    with pytest.raises(RuntimeError, match=r"block \(0, 0, 0\) hangs"):
        check(x)
