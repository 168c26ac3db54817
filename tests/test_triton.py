"""The Triton backend's kernels one by one, whatever its plan would choose; its lists, its plans, and what compiles.

Kernels run on the GPU, or in Triton's interpreter (``TRITON_INTERPRET=1``). What concerns other GPUs than the one at
hand is compiled for them, or asked of the plan with a fabricated device.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from sparse_attn.backends.triton_cuda import adapter  # noqa: E402
from sparse_attn.backends.triton_cuda.adapter import TritonBackend  # noqa: E402
from sparse_attn.backends.triton_cuda.block_lists import block_lists  # noqa: E402
from sparse_attn.backends.triton_cuda.call import Call  # noqa: E402
from sparse_attn.backends.triton_cuda.plan import (  # noqa: E402
    Gather,
    Gpu,
    Plan,
    Shape,
    Union,
    _fit,
    gather_tiles,
    padded,
    plan,
    shared_bytes,
    union_tiles,
)
from sparse_attn.contract import Device, Problem  # noqa: E402

from .cases import CASES, Inputs, make  # noqa: E402
from .conftest import INTERPRETED  # noqa: E402
from .offline import compile_for, specialisation  # noqa: E402
from .test_backends import assert_close, truth, truth_of_case  # noqa: E402

A100, RTX3090, RTX4090, H200, H20 = Gpu(80, 108), Gpu(86, 82), Gpu(89, 128), Gpu(90, 132), Gpu(90, 78)
GPUS = {"sm80": A100, "sm86": RTX3090, "sm89": RTX4090, "sm90": H200}

runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA GPU or TRITON_INTERPRET=1"
)
compiles = pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler, got its interpreter")


def run(x: Inputs, chosen: Plan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one plan on x."""
    x = replace(x.to(device), block_size=min(x.block_size, x.k.shape[2]))
    scale = x.q.shape[3] ** -0.5 if x.sm_scale is None else x.sm_scale
    call = Call(x.q, x.k, x.v, x.index, x.block_size, scale, x.q_offset, True)
    for launch in call.launches(chosen):
        launch.run(call.like)
    return call.out, call.lse


def shape_of(x: Inputs) -> Shape:
    B, Hq, N, D = x.q.shape
    _, Hk, M, Dv = x.v.shape
    block_size = min(x.block_size, M)
    return Shape(x.q.dtype, B * Hk, Hq // Hk, N, M, D, Dv, x.index.shape[3], block_size, x.q_offset)


def forced(kind: str, x: Inputs, gpu: Gpu) -> Plan:
    """The plan that runs one kernel on a problem, whatever is best for it; by TMA on a GPU that has it."""
    g, block = shape_of(x).g, padded(shape_of(x).block_size)
    heads = min(padded(g, least=1), 64)
    one = Union(False, 64, min(64 // heads, 32), min(32, block), 16, 1, 4, 2, tma=gpu.is_hopper)
    # Groups of more than 32 heads leave a half no second query; of fewer than 4 leave it fewer rows than it has.
    half = min(max(1, 64 // heads), 16)
    halved = Union(True, 64, 2 * half, min(64, block), 16, 1, 4, 1, tma=gpu.is_hopper)
    gather = Gather(min(64, padded(g)), min(32, block), 16, 4, 2, tma=gpu.is_hopper)
    plans = {
        "union": Plan(one, None),
        "halved": Plan(halved, None),
        "gather": Plan(None, gather),
        "pairs": Plan(None, gather._replace(pairs=True, splits=2)),
        "split": Plan(None, gather._replace(splits=3)),
        "routed": Plan(one, gather, 1.5),
        "routed_halved": Plan(halved, gather, 1.5),
    }
    return plans[kind]


KINDS = ("union", "halved", "gather", "pairs", "split", "routed", "routed_halved")
# Every way in which a kernel can go wrong by itself; all cases go through the plan's own choice in test_backends.
FORCED_CASES = (
    "n_gt_m", "short_queries", "offset_negative", "offset_beyond_cache", "decode_speculative", "tiny1", "odd17",
    "group5", "group12", "group64", "d80", "dv_larger", "block1", "block48", "block100", "block128",
    "one_block_larger_than_m", "topk_beyond_blocks", "ids_out_of_range", "ids_int64", "minus_one_before_nan",
    "only_later_blocks", "duplicates", "layout_bnhd", "last_dim_strided", "unseen_keys_hold_nan", "large_scores",
    "scale_zero", "scale_negative",
)  # fmt: skip


@runs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", FORCED_CASES)
def test_every_kernel(case: str, kind: str, device: torch.device) -> None:
    x = CASES[case].build(torch.float16)
    expected = truth_of_case(case, torch.float16)
    rows = slice(None)
    if INTERPRETED and x.q.shape[2] > 130:  # the last queries only, or one case takes a minute
        rows = slice(-50, None)
        x = replace(x, q=x.q[:, :, rows], index=x.index[:, :, rows], q_offset=x.q_offset + x.q.shape[2] - 50)
    out, lse = run(x, forced(kind, x, adapter.gpu(device)), device)
    assert_close(out, expected.out[:, :, rows], expected.out_bound, "out")
    assert_close(lse, expected.lse[:, :, rows], expected.lse_bound, "lse")


@runs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_see_nothing_are_zero_whatever_they_hold(kind: str, device: torch.device) -> None:
    x = make(torch.float16, Hq=32, Hk=2, N=40, block_size=16, topk=2)
    x.index[:, :, 17] = -1
    expected = truth(x)
    x.q[:, :, 17] = torch.nan
    out, lse = run(x, forced(kind, x, adapter.gpu(device)), device)
    assert_close(out, expected.out, expected.out_bound, "out")
    assert torch.equal(lse.cpu().isinf(), expected.lse.isinf())


@runs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_nan(kind: str, device: torch.device) -> None:
    """A query of NaN that sees keys is no row that sees nothing: its result says so, and it alone."""
    x = make(torch.float16, Hq=8, Hk=2, N=40, block_size=16, topk=2)
    expected = truth(x)
    x.q[:, :, 17] = torch.nan
    out, lse = run(x, forced(kind, x, adapter.gpu(device)), device)
    assert out[:, :, 17].isnan().all()
    assert lse[:, :, 17].isnan().all()
    others = torch.arange(40) != 17
    assert_close(out[:, :, others], expected.out[:, :, others], expected.out_bound, "the other rows")


@runs_kernels
@pytest.mark.parametrize("kind", ["union", "halved", "gather"])
def test_rows_of_q_far_apart(kind: str, device: torch.device) -> None:
    """Offsets between the queries of one tile pass 2**31, for groups that make a tile of many queries."""
    x = make(torch.float16, Hq=4, Hk=1, N=20, D=16, block_size=16, topk=2)
    stride = 2**27 + 16  # 16 rows on: past 2**31
    far = torch.empty(19 * stride + 4 * 16, dtype=torch.float16).as_strided((1, 4, 20, 16), (0, 16, stride, 1))
    x = replace(x, q=far.copy_(x.q))
    expected = truth(x)
    out, _ = run(x, forced(kind, x, adapter.gpu(device)), device)
    assert_close(out, expected.out, expected.out_bound, "out")


@runs_kernels
def test_every_tile_takes_one_route(device: torch.device) -> None:
    """Half of the tiles share blocks and half do not: both kernels run, each row is written once."""
    x = make(torch.float16, Hq=32, Hk=2, N=64, M=512, block_size=16, topk=2, q_offset=448)
    x.index[:, :, :32] = torch.tensor([3, 9], dtype=torch.int32)
    x.index[:, :, 32:] = torch.arange(64, dtype=torch.int32).reshape(32, 2) % 28
    chosen = forced("routed", x, adapter.gpu(device))
    lists, fill = block_lists(x.index.to(device), 512, 16, 448, chosen.union.T, chosen.union.halved, chosen.sharing)
    fill.run()
    routes = lists.fields[:, 4].reshape(2, -1).cpu()
    assert (routes[:, : 32 // lists.T] == 0).all()
    assert (routes[:, 32 // lists.T :] == 1).all()
    expected = truth(x)
    for sharing in (1.5, 0.1, 100.0):  # as above; all by the union; all by the gather
        out, _ = run(x, chosen._replace(sharing=sharing), device)
        assert_close(out, expected.out, expected.out_bound, f"out with sharing {sharing}")


# --- block lists ------------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize(
    ("N", "M", "block_size", "topk", "T", "halves", "q_offset"),
    [(100, 100, 16, 5, 8, True, 0), (100, 100, 16, 5, 8, False, 0), (70, 90, 16, 3, 2, True, 30),
     (20, 300, 16, 9, 32, True, 290), (40, 64, 64, 3, 4, False, -10), (9, 20000, 8, 12, 4, True, 19000)],
)  # fmt: skip
def test_block_lists(
    N: int, M: int, block_size: int, topk: int, T: int, halves: bool, q_offset: int, device: torch.device
) -> None:
    """Against sets and dictionaries in Python: what each list holds, in which segment, and each tile's route."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = -(-M // block_size)
    index = torch.randint(-2, num_blocks + 3, (2, 2, N, topk), generator=generator, dtype=torch.int32)
    lists, fill = block_lists(index.to(device), M, block_size, q_offset, T, halves, 1.5)
    fill.run()
    entries, fields = lists.entries.cpu(), lists.fields.cpu()
    assert lists.entries.numel() * 8 + lists.fields.numel() * 4 <= 4 * index.numel() * 4 + 64 * len(fields)
    low = (1 << T // 2) - 1
    for row, (b, h, tile) in enumerate(itertools.product(range(2), range(2), range(-(-N // T)))):
        expected: dict[int, int] = {}
        for i in range(tile * T, min(N, tile * T + T)):
            for block in set(index[b, h, i].tolist()):
                if 0 <= block < num_blocks and block * block_size <= i + q_offset:
                    expected[block] = expected.get(block, 0) | 1 << i - tile * T
        got: dict[int, int] = {}
        start = 0
        for segment, end in enumerate(fields[row, :4].tolist()):
            for entry in entries[row, start:end].tolist():
                block, mask = entry >> 32, entry & 0xFFFFFFFF
                assert block not in got
                got[block] = mask
                last = (block + 1) * block_size
                if last - 1 > tile * T + q_offset or last > M:
                    assert segment == 3
                elif not halves or (mask & low and mask & ~low):
                    assert segment == 0
                else:
                    assert segment == (1 if mask & low else 2)
            start = end
        assert got == expected
        pairs = sum(mask.bit_count() for mask in got.values())
        assert fields[row, 4] == (pairs < 1.5 * len(got))


# --- plans, on devices that are not at hand ---------------------------------------------------------------------------


def statement_large2(**changes: object) -> Shape:
    return Shape(torch.float16, 32, 16, 8192, 8192, 128, 128, 32, 64, 0)._replace(**changes)


def shapes() -> list[Shape]:
    return [
        statement_large2(dtype=dtype, g=g, D=D, Dv=D, block_size=block_size, N=N, topk=topk, q_offset=8192 - N)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for g in (1, 3, 5, 8, 16, 32, 64, 100)
        for D in (16, 64, 96, 128, 192, 256)
        for block_size in (1, 16, 48, 64, 256, 8192)
        for N, topk in ((8192, 64), (8192, 2), (5, 16), (1, 16))
    ]


@pytest.mark.parametrize("gpu", [*GPUS.values(), H20, Gpu(120, 170), Gpu(130, 200)], ids=str)
def test_tiles_fit(gpu: Gpu) -> None:
    for shape in shapes():
        for tiles in filter(None, plan(shape, gpu)[:2]):
            assert shared_bytes(tiles, shape) <= gpu.shared_bytes, (tiles, shape)
            assert tiles.R & (tiles.R - 1) == 0
            assert tiles.R >= 16
            assert tiles.BN >= 16
            if isinstance(tiles, Union):
                assert 2 <= tiles.T <= 32
                rows = tiles.R * (2 if tiles.halved else 1)
                assert tiles.T * min(shape.g, rows // tiles.T) <= rows
                assert not tiles.halved or tiles.T // 2 * shape.g <= tiles.R
                assert not tiles.halved or gpu.is_hopper
            assert not tiles.tma or gpu.is_hopper


def test_plan_by_shape() -> None:
    dense = statement_large2()
    assert plan(dense, H200) == Plan(union_tiles(dense, H200), None)
    assert union_tiles(dense, H200).halved
    sparse = statement_large2(N=65536, M=65536, topk=16, heads=4)
    for gpu in GPUS.values():
        assert plan(sparse, gpu).union is not None
        assert plan(sparse, gpu).gather is not None
        assert plan(sparse, gpu).sharing > 0
        decode = plan(statement_large2(N=1, M=65536, topk=16, q_offset=65535, heads=128), gpu)
        assert decode.union is None
        assert decode.gather.splits == 1  # 128 programs
        assert decode.gather.tma == gpu.is_hopper
        lonely = plan(statement_large2(N=1, M=65536, topk=16, q_offset=65535, heads=4), gpu)
        assert lonely.gather.splits == 8
        small = plan(Shape(torch.float16, 1, 16, 128, 128, 64, 64, 4, 32, 0), gpu)
        assert small == Plan(None, small.gather)
        assert small.gather.splits == 1  # one launch
        assert not small.gather.tma  # nor descriptors, which take the host longer than the rest takes the device


def test_large_tiles_shrink_with_shared_memory() -> None:
    tiles = Gather(16, 64, 16, 4, 3, pairs=True)
    fitted = [_fit(tiles, statement_large2(), gpu) for gpu in (H200, A100, RTX3090)]
    assert [(x.stages, x.BN) for x in fitted] == [(3, 64), (3, 64), (2, 64)]


def test_what_is_not_supported() -> None:
    a100 = Device("cuda", "sm80", "NVIDIA A100")
    problem = Problem(a100, torch.float16, torch.int32, 1, 64, 4, 128, 128, 64, 64, 4, 64)
    unsupported = TritonBackend().unsupported
    assert list(unsupported(problem)) == []
    (reason,) = unsupported(problem._replace(device=Device("cuda", "sm75", "NVIDIA T4")))
    assert reason == "needs compute capability 8.0 or newer, got NVIDIA T4 (sm75)"
    (reason,) = unsupported(problem._replace(D=320))
    assert reason == "needs D <= 256, got D=320"
    assert len(unsupported(problem._replace(Dv=512, B=2**20))) == 2


# --- compiled for GPUs that are not at hand ---------------------------------------------------------------------------


def call_of(shape: Shape, Hk: int = 4) -> Call:
    """A call on tensors without memory."""

    def tensor(*size: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    B = shape.heads // Hk
    return Call(
        tensor(B, Hk * shape.g, shape.N, shape.D), tensor(B, Hk, shape.M, shape.D), tensor(B, Hk, shape.M, shape.Dv),
        tensor(B, Hk, shape.N, shape.topk, dtype=torch.int32), shape.block_size, 0.1, shape.q_offset, False,
    )  # fmt: skip


MAIN = {
    "dense": statement_large2(),
    "sparse": statement_large2(N=65536, M=65536, topk=16, heads=4),
    "decode": statement_large2(N=1, M=65536, topk=16, q_offset=65535, heads=4),
    "decode_32": statement_large2(N=1, M=65536, topk=16, q_offset=65535, heads=128),
}


@compiles
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_main_kernels_compile_without_spills(gpu: Gpu, name: str, D: int, dtype: torch.dtype) -> None:
    """No local memory in a loop with matrix products; a few words outside of them; shared memory within the limit."""
    shape = MAIN[name]._replace(D=D, Dv=D, dtype=dtype)
    chosen = plan(shape, gpu)
    for launch in call_of(shape).launches(chosen):
        compiled = compile_for(launch, gpu.capability)
        assert compiled.shared <= gpu.shared_bytes
        kernel = launch.kernel.__name__
        if kernel == "build_block_lists":
            continue
        # In each step of the union kernel for D = 128, ptxas for sm_86 and sm_89 reads up to three words from memory.
        other = gpu.capability in (86, 89)
        assert compiled.stack <= 16, f"{kernel}: {compiled.stack} bytes of stack"
        assert compiled.spills_in_loops <= (3 if other else 0), f"{kernel}: {compiled.spills_in_loops} spills in loops"
        if kernel != "merge_kernel":
            estimate = shared_bytes(chosen.union if "union" in kernel else chosen.gather, shape)
            assert compiled.shared <= estimate, f"{kernel}: more shared memory than the plan counts with"
        assert compiled.waits_for_wgmma < 1, f"{kernel}: ptxas made wgmma wait for each other"
        uses_wgmma = "wgmma.mma_async" in compiled.ptx
        assert uses_wgmma == ("union" in kernel and gpu.is_hopper)


@compiles
def test_spills_can_be_seen() -> None:
    """The check above can fail: a tile too large for its warps spills, and is noticed."""
    shape = MAIN["dense"]
    launch = call_of(shape).launches(Plan(Union(False, 128, 8, 64, 64, 1, 2, 2), None))[1]
    compiled = compile_for(launch, 80)
    assert compiled.stack > 16
    assert compiled.spills_in_loops > 0


@compiles
@pytest.mark.parametrize("gpu", [A100, RTX3090, H200], ids=["sm80", "sm86", "sm90"])
@pytest.mark.parametrize(
    "changes",
    [{"D": 256, "Dv": 256}, {"D": 192, "Dv": 128}, {"D": 96, "Dv": 96}, {"dtype": torch.float32}, {"g": 1}, {"g": 5},
     {"g": 64}, {"block_size": 16}, {"block_size": 48}, {"block_size": 256}],
    ids=str,
)  # fmt: skip
def test_other_kernels_fit(gpu: Gpu, changes: dict[str, object]) -> None:
    shape = statement_large2(**changes)
    tiles = [Plan(union_tiles(shape, gpu), None), Plan(None, gather_tiles(shape, gpu))]
    for launch in itertools.chain.from_iterable(call_of(shape).launches(each) for each in tiles):
        assert compile_for(launch, gpu.capability).shared <= gpu.shared_bytes


@compiles
def test_lengths_do_not_compile_anew() -> None:
    """A handful of kernels for any number of lengths: lengths are neither constants nor something to specialise on."""
    kernels: dict[str, set[object]] = {}
    for length in range(128, 141):
        for N, q_offset in ((length, 0), (1, length - 1), (3, length - 3)):
            shape = Shape(torch.float16, 8, 16, N, length, 64, 64, 2, 32, q_offset)
            for launch in call_of(shape).launches(plan(shape, H200)):
                kernels.setdefault(launch.kernel.__name__, set()).add(specialisation(launch))
    for name, versions in kernels.items():
        assert len(versions) <= 3, f"{name}: {len(versions)} versions for 39 problems"


@compiles
def test_calls_that_are_alike_are_compiled_alike() -> None:
    """What ``Launch.run`` takes for the same is the same to Triton, or kernels would get what they are not made for."""
    by_key: dict[object, set[object]] = {}
    generator = torch.Generator().manual_seed(0)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    for _ in range(1500):
        g, D, N, M = pick(1, 4, 16), pick(64, 100, 128), pick(1, 3, 16, 200), pick(1, 64, 1000)
        dtype = (torch.float16, torch.bfloat16)[pick(0, 1)]
        Hk, B, topk, shift = pick(1, 2), pick(1, 3), pick(1, 5, 16), pick(0, 0, 0, 1)
        q = torch.empty(B, Hk * g, N, D + shift, dtype=dtype)[..., shift:]
        k, v = (torch.empty(B, Hk, M, D, dtype=dtype) for _ in range(2))
        index = torch.empty(B, Hk, N, topk, dtype=(torch.int32, torch.int64)[pick(0, 1)])
        if pick(0, 1):
            k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        call = Call(q, k, v, index, min(M, 32), 0.1, pick(0, 7), bool(pick(0, 1)))
        shape = Shape(dtype, B * Hk, g, N, M, D, D, topk, min(M, 32), 0)
        for launch in call.launches(plan(shape, GPUS[("sm80", "sm90")[pick(0, 1)]])):
            if call.like is not None:
                key = (launch.kernel.fn, launch.warps, launch.strides, launch.constants, call.like)
                by_key.setdefault(key, set()).add(specialisation(launch))
    assert len(by_key) > 300
    assert all(len(versions) == 1 for versions in by_key.values())


def test_decoding_keeps_its_plan() -> None:
    """While M grows, from nothing."""
    shapes = [Shape(torch.float16, 32, 16, 1, M, 128, 128, 16, 64, M - 1) for M in range(1, 70000, 37)]
    for gpu in GPUS.values():
        assert len({plan(shape, gpu) for shape in shapes}) == 1


@compiles
def test_decoding_never_compiles_anew() -> None:
    versions = set()
    for M in range(4000, 4100):
        shape = Shape(torch.bfloat16, 32, 16, 1, M, 128, 128, 16, 64, M - 1)
        cache = call_of(shape._replace(M=8192))  # a view into a cache allocated once, as servers have it
        call = Call(cache.q, cache.k[:, :, :M], cache.v[:, :, :M], cache.index, 64, 0.1, M - 1, False)
        versions |= {specialisation(launch) for launch in call.launches(plan(shape, A100))}
    assert len(versions) == 2  # one for each kernel: 8 programs' worth of splits, and the merge of them
