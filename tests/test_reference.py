"""The reference alone: against dense attention on inputs that hypothesis makes up, in bounded memory, in true fp32."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import sparse_attn
from bench.dense import dense_attention
from sparse_attn.backends import reference

from .cases import CASES, Inputs, make
from .test_backends import assert_close, truth


@pytest.fixture(autouse=True)
def _reference_only() -> object:
    with sparse_attn.use_backend("reference"):
        yield


@st.composite
def problems(draw: st.DrawFn, largest_scale: float = 2.0) -> Inputs:
    """Any valid problem that is small: lengths, groups, features, offsets, and ids of all kinds."""
    B, Hk, g = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    N, M = draw(st.integers(0, 40)), draw(st.integers(0, 60))
    D, Dv = draw(st.integers(1, 33)), draw(st.integers(1, 33))
    block_size, topk = draw(st.integers(1, 70)), draw(st.integers(0, 6))
    nb = -(-M // block_size)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # Ids from two below the range to two above it, hence also repeated ones.
    index = torch.randint(-2, nb + 2, (B, Hk, N, topk), generator=generator)
    q, k, v = (torch.randn(B, h, n, d, generator=generator) for h, n, d in ((Hk * g, N, D), (Hk, M, D), (Hk, M, Dv)))
    integer = draw(st.sampled_from([torch.int32, torch.int64]))
    scale = draw(st.one_of(st.none(), st.floats(-largest_scale, largest_scale, allow_subnormal=False)))
    return Inputs(q, k, v, index.to(integer), block_size, scale, draw(st.integers(-50, 80)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems())
def test_equals_dense_attention(x: Inputs) -> None:
    expected = truth(x)
    out, lse = sparse_attn.sparse_attention(*x.args, **x.kwargs, return_lse=True)
    assert_close(out, expected.out, expected.out_bound, "out")
    assert_close(lse, expected.lse, expected.lse_bound, "lse")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems(largest_scale=1.0))
def test_gradients_equal_those_of_dense_attention(x: Inputs) -> None:
    """The tolerance is about twice what roundings come to; they grow with the square of the scale."""
    mine = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    truth64 = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    y = replace(x, q=mine[0], k=mine[1], v=mine[2])
    z = replace(x, q=truth64[0], k=truth64[1], v=truth64[2])
    out, lse = sparse_attn.sparse_attention(*y.args, **y.kwargs, return_lse=True)
    right, right_lse = dense_attention(*z.args, **z.kwargs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    got = torch.autograd.grad((out * weights).sum() + lse.where(lse.isfinite(), 0).sin().sum(), mine)
    total = (right * weights).sum() + right_lse.where(right_lse.isfinite(), 0).sin().sum()
    for a, b in zip(got, torch.autograd.grad(total, truth64), strict=True):
        torch.testing.assert_close(a.double(), b, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "case", ["ragged", "contest_large1", "empty_rows_inside_tiles", "offset_negative", "layout_bnhd"]
)
def test_tiles_do_not_matter(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, from one query at a time to all at once."""
    results = []
    for tile_bytes in (1, 100_000, 2**40):
        monkeypatch.setattr(reference, "_TILE_BYTES", tile_bytes)
        x = CASES[case].build(torch.float32)
        leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
        out, lse = sparse_attn.sparse_attention(*x.args, **x.kwargs, return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out.square().sum(), leaves)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-5)  # sums of 4096 terms, in another order


MEASURE_MEMORY = """
import resource, torch, sparse_attn
N = 6144
q, k = torch.randn(1, 16, N, 64), torch.randn(1, 1, N, 64)
index = torch.randint(0, N // 64, (1, 1, N, 8))
small = slice(0, 64)
sparse_attn.sparse_attention(q[:, :, small], k, k, index[:, :, small], 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sparse_attn.sparse_attention(q, k, k, index, 64)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_memory_is_bounded_on_a_cpu() -> None:
    """All scores of this problem would take 2.25 GiB, and the softmax a multiple of that."""
    done = subprocess.run([sys.executable, "-c", MEASURE_MEMORY], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.0, "GiB"


def test_memory_at_statement_large_2(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip(f"needs a CUDA device, got {device}")
    N = 8192
    q = torch.randn(8, 64, N, 128, dtype=torch.float16, device=device)
    k = torch.randn(8, 4, N, 128, dtype=torch.float16, device=device)
    index = torch.randint(0, N // 64, (8, 4, N, 32), dtype=torch.int32, device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = sparse_attn.sparse_attention(q, k, k, index, 64)
    extra = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    assert extra < 2 * 2**30, f"{extra / 2**30:.2f} GiB beside inputs and output"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_does_not_reach_inside(dtype: torch.dtype, device: torch.device) -> None:
    x = make(torch.float32, Hq=8, N=200).to(device)
    expected = sparse_attn.sparse_attention(*x.args)
    with torch.autocast(device.type, dtype=dtype):
        assert torch.equal(sparse_attn.sparse_attention(*x.args), expected)


PRECISION = """
import torch, sparse_attn
x, index = torch.randn(1, 8, 200, 128, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 8, 200, 1).int()
x, index = x.to("DEVICE"), index.to("DEVICE")
run = lambda: sparse_attn.sparse_attention(x, x, x, index, 200)
expected = run()
for line, read in SWITCHES:
    exec(line)
    before = read()
    assert torch.equal(run(), expected), line
    assert read() == before, (line, before, read())
"""
OLD_SWITCHES = """[
    (f"torch.set_float32_matmul_precision({name!r})", torch.get_float32_matmul_precision)
    for name in ("medium", "high", "highest")
] + [("torch.backends.cuda.matmul.allow_tf32 = True", lambda: torch.backends.cuda.matmul.allow_tf32)]"""
NEW_SWITCHES = """[
    ("torch.backends.fp32_precision = 'tf32'", lambda: torch.backends.cuda.matmul.fp32_precision),
    ("torch.backends.fp32_precision = 'ieee'", lambda: torch.backends.cuda.matmul.fp32_precision),
    ("torch.backends.mkldnn.matmul.fp32_precision = 'bf16'", lambda: torch.backends.mkldnn.matmul.fp32_precision),
    ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", lambda: torch.backends.cuda.matmul.fp32_precision),
]"""


@pytest.mark.parametrize("switches", [OLD_SWITCHES, NEW_SWITCHES], ids=["old", "new"])
def test_tf32_does_not_reach_inside(switches: str, device: torch.device) -> None:
    """Nor does it stay switched off. In a process of its own: torch refuses to mix old and new switches."""
    if switches is NEW_SWITCHES and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip(f"needs torch >= 2.9, got {torch.__version__}")
    code = PRECISION.replace("SWITCHES", switches).replace("DEVICE", str(device))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_switches_are_put_back_by_the_last_call_inside() -> None:
    """Two threads at a time: the first to leave must not switch TF32 on under the other."""

    def read() -> str:
        new = hasattr(torch.backends.cuda.matmul, "fp32_precision")
        return torch.backends.cuda.matmul.fp32_precision if new else torch.get_float32_matmul_precision()

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        asked = read()
        with reference._plain_fp32:
            with reference._plain_fp32:
                assert read() != asked
            assert read() != asked
        assert read() == asked
    finally:
        torch.set_float32_matmul_precision(before)
