"""The TileLang backend: its lists against sets in Python, its plans, and every kind of kernel lowered and compiled.

Lowering needs no GPU; compiling needs nvcc. Lists are emulated where there is no Hopper GPU. All cases go through the
backend in test_backends, or in test_tilelang_emulated.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict

import pytest
import torch

pytest.importorskip("tilelang")

import sparse_attn
from bench import cases, model
from bench.dense import dense_attention
from sparse_attn.backends.tilelang_hopper import adapter, compiled
from sparse_attn.backends.tilelang_hopper.adapter import TileLangBackend, for_tma, packed, packed_block
from sparse_attn.backends.tilelang_hopper.block_lists import block_lists_kernel
from sparse_attn.backends.tilelang_hopper.exact import exact_kernel
from sparse_attn.backends.tilelang_hopper.order import order_kernel
from sparse_attn.backends.tilelang_hopper.plan import (
    BLOCKS,
    SHARED_BYTES,
    WINDOW,
    Tiles,
    choose,
    exact_tiles,
    expected_waste,
    ordered_tiles,
    plan,
)
from sparse_attn.backends.tilelang_hopper.union import union_kernel
from sparse_attn.contract import Device, Problem

from .cases import CASES, Inputs, make
from .conftest import hopper_is_here
from .hopper import NVCC, compile_source, lower, shared_bytes
from .test_backends import allowed, assert_close, assert_right, truth, truth_of_case

H200 = Device("cuda", "sm90", "NVIDIA H200")
on_hopper = pytest.mark.skipif(not hopper_is_here(), reason="needs a Hopper GPU")

# One of each kind that the code tells apart: rows by query and by head, one and two warpgroups, boxes of all sizes.
VARIANTS = {
    "contest": plan(16, 128, 128, 64),
    "contest_small": plan(16, 64, 64, 32),
    "group1": plan(1, 128, 128, 64),
    "group64_block128": plan(64, 128, 128, 128),
    "block16": plan(16, 128, 128, 16),
    "d256": plan(8, 256, 256, 64),
    "d192_dv128_block8": plan(16, 192, 128, 8),
    "ordered": ordered_tiles(plan(16, 128, 128, 64), 1),
    "ordered_group32_d256": ordered_tiles(plan(32, 256, 256, 64), 1),
}


# --- lowered and compiled without a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float16") for name in VARIANTS), ("contest", "bfloat16"), ("d256", "bfloat16")]
)
def test_union_kernels_compile(name: str, dtype: str) -> None:
    tiles = VARIANTS[name]
    source = lower(union_kernel(tiles, dtype)).source
    assert "wgmma" in source
    assert "tma_load" in source
    assert shared_bytes(source) <= tiles.shared_bytes <= SHARED_BYTES
    # No barrier but the one of each warpgroup that the kernel names: the compiler would let one wait for the other.
    assert len(re.findall("__sync_thread_partial|__syncthreads", source.partition("launch_bounds")[2])) == 2
    if NVCC is None:
        pytest.skip("lowered; needs nvcc to be compiled")
    compiled = compile_source(source)
    assert compiled.spills == 0
    assert compiled.warnings == []
    # All threads are started with as many, of 65536.
    assert compiled.registers * 128 * (tiles.warpgroups + 1) <= 65536


@pytest.mark.parametrize(("D", "dtype"), [(64, "float16"), (128, "float16"), (128, "bfloat16")])
def test_exact_kernels_compile(D: int, dtype: str) -> None:
    tiles = exact_tiles(16, D, D, 64)
    source = lower(exact_kernel(tiles, dtype)).source
    assert "wgmma" in source
    # Of a multiprocessor's 228 KiB, each block takes 1 KiB for the system.
    assert BLOCKS * (shared_bytes(source) + 1024) <= 228 * 1024
    # A fence waits for the list's next entry where that was asked for before it: one at each step's begin and end.
    assert source.count("fence_proxy_async") <= 4
    if NVCC is None:
        pytest.skip("lowered; needs nvcc to be compiled")
    compiled = compile_source(source)
    assert compiled.spills == 0
    assert compiled.warnings == []
    assert compiled.registers * 256 * BLOCKS <= 65536


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", ["contest", "group1", "d192_dv128_block8", "ordered", "ordered_group32_d256"])
def test_list_kernels_compile(name: str, index_dtype: str) -> None:
    source = lower(block_lists_kernel(VARIANTS[name], index_dtype)).source
    assert "__syncthreads" not in source
    assert "__syncwarp" in source
    if VARIANTS[name].ordered:  # which another kernel writes that may still be running
        assert source.index("cudaGridDependencySynchronize") < source.index("counts[")
    if NVCC is None:
        pytest.skip("lowered; needs nvcc to be compiled")
    assert compile_source(source).spills == 0


@pytest.mark.parametrize(("words", "index_dtype"), [(8, "int32"), (32, "int64")])
@pytest.mark.parametrize("name", ["ordered", "ordered_group32_d256"])
def test_order_kernels_compile(name: str, words: int, index_dtype: str) -> None:
    source = lower(order_kernel(VARIANTS[name], index_dtype, words)).source
    assert "__syncthreads" not in source
    if NVCC is None:
        pytest.skip("lowered; needs nvcc to be compiled")
    assert compile_source(source).spills == 0


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_spills_can_be_seen() -> None:
    """The check above can fail: sums of 256 features beside 128 keys are more than a thread of two warpgroups has."""
    tiles = Tiles(16, 8, 128, 64, 64, 256, 2, 2, 4)
    assert compile_source(lower(union_kernel(tiles, "float16")).source).spills > 0


# --- plans and arguments ----------------------------------------------------------------------------------------------


def test_tiles_fit() -> None:
    for g, D, Dv, block_size in itertools.product(
        (1, 2, 3, 5, 8, 12, 16, 33, 64, 100), range(8, 257, 8), (8, 64, 128, 136, 256), (8, 16, 48, 64, 96, 128, 256)
    ):
        tiles = plan(g, D, Dv, block_size)
        assert tiles.shared_bytes <= SHARED_BYTES
        assert tiles.queries <= 32
        assert tiles.queries * tiles.heads == 64 * tiles.warpgroups
        assert tiles.heads >= min(g, 64)
        assert block_size % tiles.box == 0
        assert tiles.BN % tiles.box == 0
        # A warpgroup keeps a stage of v over a step that it leaves out: with fewer, it would wait for itself.
        assert tiles.v_stages >= 4 or tiles.warpgroups == 1


def test_exact_kernel_is_for_slow_products() -> None:
    """By the number of multiprocessors, and where the union of 4 queries is expected to be much more than each took."""

    def chosen(sms: int, g: int, D: int, block_size: int, waste: float) -> Tiles | None:
        tiles, exact = choose(sms, g, D, D, block_size, 10**6, 10**6, waste)
        return tiles if exact else None

    assert chosen(78, 16, 128, 64, 1.9) == Tiles(16, 4, 64, 64, 128, 128, 1, 2, 2)
    assert chosen(78, 9, 64, 128, 1.9) == Tiles(16, 4, 64, 64, 64, 64, 1, 2, 2)
    for problem in ((132, 16, 128, 64, 1.9), (78, 16, 128, 64, 1.3), (78, 8, 128, 64, 1.9), (78, 16, 192, 64, 1.9)):
        assert chosen(*problem) is None
    assert chosen(78, 16, 128, 32, 1.9) is None


def test_queries_are_dealt_where_that_pays() -> None:
    """Many windows of queries that have little in common, blocks of which there are not too many."""
    assert WINDOW == model.WINDOW

    def chosen(sms: int, g: int, D: int, num_blocks: int, windows: int, waste: float) -> bool:
        tiles, exact = choose(sms, g, D, D, 64, num_blocks, windows, waste)
        assert not exact
        return tiles.ordered

    assert chosen(132, 16, 128, 128, 2048, 1.9)
    assert chosen(132, 32, 256, 1024, 256, 1.9)
    assert not chosen(132, 16, 128, 128, 2048, 1.3)
    assert chosen(78, 16, 128, 128, 2048, 1.3)
    assert not chosen(132, 16, 128, 1025, 2048, 1.9)
    assert not chosen(132, 16, 128, 128, 255, 1.9)
    assert not chosen(132, 8, 128, 128, 2048, 1.9)
    assert not chosen(132, 64, 128, 128, 2048, 1.9)


def test_expected_waste() -> None:
    """Against a random index."""
    point = cases.POINTS[3]
    one = cases.override(point, "one", B=1, Hq=16, Hk=1, N=2048, M=2048, topk=8)
    selected = model.selection(cases.make_index(one, "random", torch.device("cpu"), 0)[0, 0], 32)
    measured = 4 * model.walked(selected, 4) / model.walked(selected, 1)
    assert expected_waste(2048, 32, 8, 64, 0) == pytest.approx(measured, rel=0.02)
    assert expected_waste(1024, 16, 16, 64, 0) == expected_waste(1, 1, 1, 64, 63) == 1
    assert expected_waste(8, 1, 1, 64, -100) == 1


def test_what_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "missing_compiler", lambda: None)
    problem = Problem(H200, torch.float16, torch.int32, 1, 64, 4, 128, 128, 64, 64, 4, 64)
    unsupported = TileLangBackend().unsupported
    assert list(unsupported(problem)) == []
    assert list(unsupported(problem._replace(block_size=1, D=100, Hq=400))) == []
    (reason,) = unsupported(problem._replace(dtype=torch.float32))
    assert reason == "needs fp16 or bf16, got float32"
    (reason,) = unsupported(problem._replace(D=320))
    assert reason == "needs D <= 256, got D=320"
    (reason,) = unsupported(problem._replace(B=70000))
    assert reason == "needs B and Hk <= 65535, got B=70000, Hk=4"
    assert list(unsupported(problem._replace(M=2**30))) == []
    (reason,) = unsupported(problem._replace(topk=2**15, M=2**30))
    assert reason.startswith("needs at most 2**22 keys in the blocks that 32 queries may choose, got 67108864: M=")
    (reason,) = unsupported(problem._replace(M=2**28, block_size=1))
    assert reason.startswith("needs N + M + block_size of at most 2**31 - 2**16")
    monkeypatch.setattr(compiled, "missing_compiler", lambda: "needs nvcc")
    assert list(unsupported(problem)) == ["needs nvcc"]


def test_what_is_left_to_others() -> None:
    """Few queries, and selections too sparse for a union; by shape, with no look at index."""
    large = Problem(H200, torch.float16, torch.int32, 8, 64, 4, 8192, 8192, 128, 128, 32, 64)
    slow_for = TileLangBackend().slow_for
    assert list(slow_for(large)) == []
    assert list(slow_for(large._replace(B=1, N=1024, M=1024, D=64, Dv=64, topk=16))) == []
    few = slow_for(large._replace(B=2, N=1, topk=100, has_q_offset=True))
    assert few[0] == "is slow for few queries: fewer than 100 tiles of 8 leave a GPU idle, got 8"
    (reason,) = slow_for(large._replace(B=32, N=1, topk=100, has_q_offset=True))
    assert reason.startswith("is slow where neighbours share few blocks: 1.0 of 1 queries")
    assert list(slow_for(large._replace(B=1, N=65536, M=65536, topk=16))) == []
    (reason,) = slow_for(large._replace(N=65536, M=65536, topk=4))
    assert reason.startswith("is slow where neighbours share few blocks: 1.0 of 8 queries")
    assert slow_for(large._replace(D=100, block_size=100)) == [
        "copies k and v for blocks of 100 keys, to read blocks of 128",
        "copies tensors for D=100, which is no multiple of 8",
    ]


def test_compiled_function_where_it_is_kept() -> None:
    """Without TileLang's walk through the arguments; a release that keeps it elsewhere is called as it is."""

    class Adapter:
        def _get_executable(self) -> dict[str, str]:
            return {"main": "function"}

    class Kernel:
        adapter = Adapter()

    assert compiled._function(Kernel()) == "function"
    elsewhere = object()
    assert compiled._function(elsewhere) is elsewhere


def test_tensors_for_tma() -> None:
    x = torch.randn(2, 3, 5, 64, dtype=torch.float16)
    assert for_tma(x).data_ptr() == x.data_ptr()
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert for_tma(transposed).data_ptr() == transposed.data_ptr()
    for odd in (x[..., 1:], x[..., :60], x.transpose(2, 3), x.expand(2, 3, 5, 64)[:1].expand(4, 3, 5, 64)):
        ready = for_tma(odd)
        assert torch.equal(ready[..., : odd.shape[3]], odd)
        assert ready.shape[3] % 8 == 0
        assert not ready[..., odd.shape[3] :].any()
        assert ready.data_ptr() % 16 == 0
        assert ready.stride(3) == 1
        assert all(s % 8 == 0 for s in ready.stride()[:3])
    lonely = torch.randn(1, 1, 5, 64, dtype=torch.float16).as_strided((1, 1, 5, 64), (7, 3, 64, 1))
    assert for_tma(lonely).stride() == (64, 64, 64, 1)
    assert for_tma(lonely).data_ptr() == lonely.data_ptr()
    assert not for_tma(x.clone().requires_grad_()).requires_grad


@pytest.mark.parametrize("case", CASES)
def test_every_problem_is_judged(case: str) -> None:
    """What speaks against a problem is worked out for each of them, those without keys or queries included."""
    x = CASES[case].build(torch.float16)
    problem = sparse_attn.problem_of(*x.args, **x.kwargs)
    for has_q_offset in (False, True):
        assert all(TileLangBackend().slow_for(problem._replace(has_q_offset=has_q_offset, device=H200)) or ["fast"])


def test_sizes_of_packed_blocks() -> None:
    """Blocks stay as they are where a box of some size divides them; lists must not get long for a few keys' sake."""
    sizes = {1: 8, 7: 8, 8: 8, 16: 16, 24: 24, 48: 48, 50: 56, 64: 64, 96: 96, 100: 128, 136: 192, 256: 256, 1000: 1024}
    assert {size: packed_block(size) for size in sizes} == sizes
    assert packed_block(8192) == 8192


def test_packed_blocks() -> None:
    x = torch.arange(1.0, 8).view(1, 1, 7, 1)
    assert packed(x, 4, 4) is x
    assert packed(x, 3, 4).flatten().tolist() == [1, 2, 3, 0, 4, 5, 6, 0, 7, 0, 0, 0]


# --- block lists ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("N", "M", "block_size", "topk", "g", "q_offset"),
    [(100, 100, 16, 5, 16, 0), (70, 90, 64, 3, 4, 30), (20, 300, 24, 9, 1, 290), (40, 64, 64, 3, 16, -10),
     (9, 20000, 8, 12, 16, 19000), (300, 4096, 64, 20, 16, 3796), (64, 700, 256, 2, 64, 636),
     (300, 1300, 320, 4, 16, 700), (300, 250, 320, 1, 16, -60), (260, 900, 48, 7, 20, 600)],
)  # fmt: skip
@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("ordered", [False, True])
def test_block_lists(
    N: int, M: int, block_size: int, topk: int, g: int, q_offset: int, D: int, ordered: bool, hopper: torch.device
) -> None:
    """Against sets and dictionaries in Python: what each list holds, and in which steps."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = -(-M // block_size)
    index = torch.randint(
        -2, num_blocks + 3, (2, 2, N, topk), generator=generator, dtype=torch.int64 if ordered else torch.int32
    )
    tiles = plan(g, D, D, block_size)
    T, P, BX, per_block = tiles.queries, tiles.BN // tiles.box, tiles.box, block_size // tiles.box
    count = -(-N // T)
    capacity = min(num_blocks * per_block, T * topk * per_block) + 2 * P
    boxes, masks = (torch.full((4 * count, capacity), -7, dtype=torch.int32, device=hopper) for _ in range(2))
    if ordered:
        tiles = ordered_tiles(tiles, num_blocks)
        if tiles is None:
            pytest.skip("these tiles have adjacent queries only")
    counts = torch.full((4 * count, tiles.facts), -7, dtype=torch.int32, device=hopper)
    if ordered:
        compiled.order(tiles, "int64", num_blocks)(index.to(hopper), counts, num_blocks, block_size, q_offset, count)
    compiled.block_lists(tiles, "int64" if ordered else "int32")(
        index.to(hopper), boxes, masks, counts, M, block_size, per_block, q_offset, count
    )
    boxes, masks, counts = (x.cpu().tolist() for x in (boxes, masks, counts))
    half = T // tiles.warpgroups
    low = (1 << half) - 1
    dealt: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, (b, h, tile) in enumerate(itertools.product(range(2), range(2), range(count))):
        expected: dict[int, int] = {}
        queries = list(range(tile * T, tile * T + T))
        if ordered:
            places = [word >> 8 * i & 255 for word in counts[row][4:] for i in range(half)]
            queries = [tile * T // WINDOW * WINDOW + place for place in places]
            assert all(queries[w : w + half] == sorted(queries[w : w + half]) for w in range(0, T, half))
        dealt[b, h] += queries
        for bit, i in enumerate(queries):
            if i >= N:
                continue
            for block in set(index[b, h, i].tolist()):
                for box in range(block * per_block, (block + 1) * per_block):
                    if 0 <= block < num_blocks and box * BX <= i + q_offset:
                        expected[box] = expected.get(box, 0) | 1 << bit
        masked, both, first, second = counts[row][:4]
        got = {}
        steps = []
        for step in range(masked + both + first + second):
            entries = [(boxes[row][step * P + x], masks[row][step * P + x] & 0xFFFFFFFF) for x in range(P)]
            steps.append(entries)
            for box, mask in entries:
                if mask:
                    assert box not in got
                    got[box] = mask
        assert got == expected
        assert bool(masked) == bool(expected)
        kinds = []
        for entries in steps[masked:]:
            assert all(mask for _, mask in entries)
            for box, _ in entries:
                assert (box + 1) * BX - 1 <= min(queries) + q_offset
                assert (box + 1) * BX <= M
            needs = {(bool(mask & low), bool(mask >> half)) for _, mask in entries}
            assert len(needs) == 1
            kinds.append(needs.pop() if tiles.warpgroups == 2 else (True, True))
        assert (kinds.count((True, True)), kinds.count((True, False)), kinds.count((False, True))) == (
            both,
            first,
            second,
        )
        # Until one of the warpgroups has no more of its own, it leaves out at most one step in a row.
        for own, more in ((0, second - first), (1, first - second)):
            gaps = "".join("x" if kind[own] else "." for kind in kinds[: len(kinds) - max(0, more)])
            assert ".." not in gaps
        # What is padded is a box that nobody selected.
        assert sum(not mask for entries in steps for _, mask in entries) < P
    for queries in dealt.values():
        assert sorted(i for i in queries if i < N) == list(range(N))


@pytest.mark.parametrize(("topk", "blocks"), [(6, 64), (24, 64), (16, 300)])
def test_order(topk: int, blocks: int, hopper: torch.device) -> None:
    """Each warpgroup's queries: the first that is left, and then whichever adds fewest blocks, the first of those."""
    N, block_size, q_offset = 300, 64, 64 * blocks - 300
    generator = torch.Generator().manual_seed(0)
    index = torch.rand(1, 2, N, blocks, generator=generator).argsort(-1)[..., :topk].to(torch.int32)
    tiles = ordered_tiles(plan(16, 128, 128, block_size), blocks)
    counts = torch.full((2 * -(-N // 8), tiles.facts), -7, dtype=torch.int32, device=hopper)
    compiled.order(tiles, "int32", blocks)(index.to(hopper), counts, blocks, block_size, q_offset, -(-N // 8))
    for h, found in enumerate(counts[:, 4:].reshape(2, -1).tolist()):
        for window in range(N // WINDOW):
            first = window * WINDOW
            left = list(range(WINDOW))
            chosen = [
                {b for b in index[0, h, first + i].tolist() if b * block_size <= first + i + q_offset} for i in left
            ]
            for word in found[window * WINDOW // 4 : (window + 1) * WINDOW // 4]:
                group: list[int] = []
                union: set[int] = set()
                for _ in range(4):
                    best = min(left, key=lambda i: (len(chosen[i] - union) if group else 0, i))
                    left.remove(best)
                    group.append(best)
                    union |= chosen[best]
                assert [word >> 8 * i & 255 for i in range(4)] == sorted(group)
        assert found[N // WINDOW * WINDOW // 4] == 0x03020100


# --- on a Hopper GPU --------------------------------------------------------------------------------------------------


def exact_tiles_of(x: Inputs) -> Tiles | None:
    """Tiles of the exact kernel, if it can run this."""
    problem = sparse_attn.problem_of(*x.args, **x.kwargs)
    D, Dv = (-(-n // 8) * 8 for n in (problem.D, problem.Dv))
    empty = 0 in (problem.B, problem.N, problem.M, problem.topk, problem.Dv)
    size = -(-problem.M // 128) * 128 if problem.block_size >= problem.M else packed_block(problem.block_size)
    return None if empty else exact_tiles(problem.group, D, Dv, size)


def union_tiles_of(x: Inputs) -> Tiles | None:
    """Tiles of the kernel that runs this on an H200, None if nothing is to be computed."""
    B, Hq, N, D = x.q.shape
    _, Hk, M, Dv = x.v.shape
    topk = x.index.shape[3]
    if 0 in (B, N, M, topk, Dv):
        return None
    return adapter._call(B, Hq, Hk, N, M, D, Dv, topk, x.block_size, 0, 132).tiles


def ordered_tiles_of(x: Inputs) -> Tiles | None:
    """Tiles of the kernel that runs this on an H200, None if it takes queries only in their order."""
    tiles = union_tiles_of(x)
    return tiles and ordered_tiles(tiles, -(-x.k.shape[2] // x.block_size))


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("case", [name for name in CASES if exact_tiles_of(CASES[name].build(torch.float16))])
def test_exact_kernel(case: str, dtype: torch.dtype, device: torch.device, exact_everywhere: None) -> None:
    assert_right("tilelang", CASES[case].build(dtype), truth_of_case(case, dtype), device)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("case", [name for name in CASES if ordered_tiles_of(CASES[name].build(torch.float16))])
def test_ordered(
    case: str, dtype: torch.dtype, device: torch.device, ordered_everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered, order = [], compiled.order
    monkeypatch.setattr(compiled, "order", lambda *variant: ordered.append(variant) or order(*variant))
    assert_right("tilelang", CASES[case].build(dtype), truth_of_case(case, dtype), device)
    assert ordered


@on_hopper
@pytest.mark.parametrize("choice", ["exact_everywhere", "ordered_everywhere"])
def test_at_scale(choice: str, device: torch.device, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(choice)
    point = cases.POINTS[3]
    case = cases.make_case(cases.override(point, "one", B=2), "random", torch.float16, device, 0)
    with sparse_attn.use_backend("tilelang"):
        out = sparse_attn.sparse_attention(*case.args)
    rows = torch.arange(37, 8192, 97, device=device)
    expected, _ = dense_attention(*case.args, rows=rows)
    eager, _ = dense_attention(*case.args, rows=rows, dtype=torch.float16)
    assert_close(out[:, :, rows], expected.cpu(), allowed(eager, expected, torch.float16, terms=8192), "out")


@pytest.mark.parametrize("ordered", [False, True])
def test_rows_that_see_nothing_are_zero_whatever_they_hold(
    ordered: bool, hopper: torch.device, request: pytest.FixtureRequest
) -> None:
    if ordered:
        request.getfixturevalue("ordered_everywhere")
    x = make(torch.float16, Hq=32, Hk=2, N=300, block_size=16, topk=8)
    x.index[:, :, 17::29] = -1
    expected = truth(x)
    x.q[:, :, 17::29] = torch.nan
    x.q[:, :, 46] = torch.inf
    x = x.to(hopper)
    out, lse = TileLangBackend()(x.q, x.k, x.v, x.index, 16, x.q.shape[3] ** -0.5, 0, True)
    assert_close(out, expected.out, expected.out_bound, "out")
    assert_close(lse, expected.lse, expected.lse_bound, "lse")


@on_hopper
def test_weights_sum_to_one_over_many_steps(device: torch.device) -> None:
    """With large scores, what a maximum that stays is multiplied by must be 1: its rounding errors would add up."""
    M = 65536
    q = torch.randn(1, 16, 8, 64, device=device).mul(30).half()
    k = torch.randn(1, 1, M, 64, device=device).half()
    v = torch.ones(1, 1, M, 64, device=device).half()
    index = torch.arange(M // 64, device=device, dtype=torch.int32).expand(1, 1, 8, -1)
    out, lse = TileLangBackend()(q, k, v, index, 64, 1.0, M - 8, True)
    assert (out - 1).abs().max() < 1e-3
    scores = torch.einsum("hnd,md->hnm", q[0].double(), k[0, 0].double())
    scores.masked_fill_(torch.arange(M, device=device) > torch.arange(M - 8, M, device=device)[:, None], -torch.inf)
    assert (lse[0] - scores.logsumexp(-1)).abs().max() < 1e-5 * scores.max()
