"""The TileLang backend on a CPU: the CUDA C++ of its kernels, run by ``emulated_hopper.h``, on the shared cases.

A kernel takes TileLang 10 to 20 seconds: cases that share theirs with less than two others are skipped, but for some
that a kernel got wrong once, unless ``SPARSE_ATTN_TEST_EMULATED=all``. On a Hopper GPU the cases go through the backend
itself, in test_backends.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from sparse_attn.backends.tilelang_hopper import adapter, compiled
from sparse_attn.backends.tilelang_hopper.adapter import TileLangBackend
from sparse_attn.backends.tilelang_hopper.exact import exact_kernel
from sparse_attn.backends.tilelang_hopper.plan import Tiles, exact_tiles, plan
from sparse_attn.backends.tilelang_hopper.union import union_kernel

from .cases import CASES, Inputs, make
from .conftest import hopper_is_here
from .emulated import emulated, launched
from .test_backends import assert_close, truth, truth_of_case
from .test_tilelang import exact_tiles_of, ordered_tiles_of, union_tiles_of

pytestmark = [
    pytest.mark.skipif(hopper_is_here(), reason="a Hopper GPU is here: test_backends runs the cases on it"),
    pytest.mark.usefixtures("hopper"),
]


# Beginnings of their names.
ONCE_WRONG = ("unseen_keys", "keys_behind", "loud_blocks")


def by_kernel(tiles_of: Callable[[Inputs], Tiles | None]) -> list[Any]:
    """Cases that ``tiles_of`` has tiles for, those with the same ones together."""
    tiles = {name: tiles_of(case.build(torch.float16)) for name, case in CASES.items()}
    users = Counter(tiles.values())
    everything = os.environ.get("SPARSE_ATTN_TEST_EMULATED") == "all"
    few = pytest.mark.skip(reason="few cases have this kernel: SPARSE_ATTN_TEST_EMULATED=all runs them")
    return [
        pytest.param(name, marks=() if everything or users[tiles[name]] > 2 or name.startswith(ONCE_WRONG) else few)
        for name in sorted((name for name in CASES if tiles[name]), key=lambda name: tiles[name])
    ]


KERNELS = {
    "union": ["block_lists", "union"],
    "ordered": ["order", "block_lists", "union"],
    "exact": ["block_lists", "exact"],
}


def check(x: Inputs, kernels: str, case: str | None = None) -> None:
    expected = truth(x) if case is None else truth_of_case(case, x.q.dtype)
    scale = x.q.shape[3] ** -0.5 if x.sm_scale is None else x.sm_scale
    launched.clear()
    out, lse = TileLangBackend()(*x.args[:5], scale, x.q_offset, True)
    assert launched == [f"sparse_attn_{name}_kernel" for name in KERNELS[kernels]]
    assert_close(out, expected.out, expected.out_bound, "out")
    assert_close(lse, expected.lse, expected.lse_bound, "lse")


@pytest.mark.parametrize("case", by_kernel(union_tiles_of))
def test_case(case: str) -> None:
    check(CASES[case].build(torch.float16), "union", case)


@pytest.mark.parametrize("case", by_kernel(exact_tiles_of))
def test_exact_kernel(case: str, exact_everywhere: None) -> None:
    check(CASES[case].build(torch.float16), "exact", case)


def test_exact_kernel_in_bfloat16(exact_everywhere: None) -> None:
    check(CASES["contest_large1"].build(torch.bfloat16), "exact", "contest_large1")


def test_maxima_that_grow(exact_everywhere: None) -> None:
    """Scores that outgrow those before them, again and again: each time what was summed up refers to a new maximum."""
    x = make(torch.float16, Hq=16, Hk=1, N=8, M=1024, D=128, topk=16, block_size=64, q_offset=1016, select_all=True)
    x.k.mul_(torch.arange(1.0, 17).repeat_interleave(64).view(1024, 1))
    check(x, "exact")


@pytest.mark.parametrize("case", by_kernel(ordered_tiles_of))
def test_ordered(case: str, ordered_everywhere: None) -> None:
    check(CASES[case].build(torch.float16), "ordered", case)


@pytest.mark.parametrize(
    ("group", "D", "block_size", "q_offset"),
    [(32, 64, 32, -40), (16, 256, 64, 90)],  # two queries to a warpgroup, two warpgroups; four, one
)
def test_ordered_in_windows(group: int, D: int, block_size: int, q_offset: int, ordered_everywhere: None) -> None:
    """Two windows, and queries behind them; queries that see nothing; loud blocks of others; int64 ids."""
    M = 300 + q_offset
    x = make(torch.bfloat16, B=2, Hq=group, Hk=1, N=300, M=M, D=D, topk=4, block_size=block_size, q_offset=q_offset)
    x.k[:, :, torch.arange(M) // block_size % 2 == 0] *= 8
    check(replace(x, index=x.index.long()), "ordered")


@pytest.mark.parametrize("case", ["contest_large1", "contest_large2_statement"])
def test_bfloat16(case: str) -> None:
    check(CASES[case].build(torch.bfloat16), "union", case)


def test_a_kernel_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two stages of v, a warpgroup keeps one for the step that the other needs it for."""
    monkeypatch.setattr(adapter, "_call", adapter._call.__wrapped__)
    monkeypatch.setattr(adapter, "choose", lambda _, *tile: (plan(*tile[:4])._replace(v_stages=2), False))
    x = make(torch.float16, Hq=16, Hk=1, N=8, M=1024, topk=8, block_size=64, q_offset=1016)
    x.index[:] = torch.arange(8) * 2 + torch.arange(8).view(8, 1) // 4  # one has the even blocks, one the odd ones
    with pytest.raises(RuntimeError, match=r"block \(0, 0, 0\) hangs"):
        check(x, "union")


# --- the emulation itself: what is wrong has to show ------------------------------------------------------------------


def without_waits_for(barrier: str) -> Callable[[str], str]:
    """Nobody waits for it."""
    return lambda source: _changed(source, barrier, r"{}\[[^;]*\]\.wait\([^;]*;", "")


def freed_too_early(barrier: str) -> Callable[[str], str]:
    """Given back before the products that read it are done."""
    product = r"(tl::wait_wgmma<[01]>\(\);)(\s*)({}\[[^;]*\]\.arrive\(\);)"
    return lambda source: _changed(source, barrier, product, r"\3\2\1")


def without_barrier(source: str) -> str:
    """Warps do not wait for each other before products that read what all of them wrote."""
    head, declared, body = source.partition("launch_bounds")
    changed = re.sub(r"tl::__sync_thread_partial\(10, 128\);", "", body)
    assert changed != body
    return head + declared + changed


def _changed(source: str, barrier: str, pattern: str, replacement: str) -> str:
    names = re.findall(r"auto (\w+) = reinterpret_cast<Barrier\*>", source)
    order = ("k_ready", "k_free", "v_ready", "v_free", "q_ready", "q_free")
    pattern = pattern.format(dict(zip(order, names, strict=True))[barrier])
    changed = re.sub(pattern, replacement, source)
    assert changed != source
    return changed


MISTAKES = {
    **{f"no_wait_for_{barrier}": without_waits_for(barrier) for barrier in ("k_ready", "v_ready", "q_ready")},
    **{f"overwritten_{barrier}": without_waits_for(barrier) for barrier in ("k_free", "v_free", "q_free")},
    **{f"freed_too_early_{barrier}": freed_too_early(barrier) for barrier in ("k_free", "v_free")},
    "no_barrier": without_barrier,
}


# The union kernel's only barriers are around zeros that it writes. And its ring of k, which is the shorter one, holds
# back loads of v so that nobody has to wait for a stage of it.
HARMLESS = {("union", "no_barrier"), ("union", "overwritten_v_free"), ("union", "freed_too_early_v_free")}


@pytest.mark.parametrize(
    ("kernel", "mistake"), [pair for pair in itertools.product(("union", "exact"), MISTAKES) if pair not in HARMLESS]
)
def test_a_mistake_shows(kernel: str, mistake: str, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    if kernel == "exact":
        request.getfixturevalue("exact_everywhere")
    kernel_of = {"union": union_kernel, "exact": exact_kernel}[kernel]
    tiles = {"union": plan(16, 128, 128, 64), "exact": exact_tiles(16, 128, 128, 64)}[kernel]
    mistaken = emulated(kernel_of, tiles, "float16", edit=MISTAKES[mistake])
    seed = 0

    def compiled_kernel(wanted: Any, *variant: Any) -> Any:
        if wanted is not kernel_of:
            return emulated(wanted, *variant)
        assert variant == (tiles, "float16")
        return lambda *args: mistaken(*args, seed=seed)

    monkeypatch.setattr(compiled, "_compile", compiled_kernel)
    x = make(torch.float16, Hq=16, Hk=1, N=40, M=2048, D=128, topk=24, block_size=64, q_offset=2008)
    for seed in range(20):  # noqa: B007 -- the function above reads it
        try:
            check(x, kernel)
        except (AssertionError, RuntimeError) as error:
            shown = str(error)
            break
    else:
        pytest.fail(f"{kernel}: {mistake} did not show in {seed + 1} runs")
    assert re.match("out: |lse: |block .* (hangs|ends)", shown)
