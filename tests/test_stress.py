"""Every backend, beyond the cases: problems made up at random, sizes beyond 32 bits, memory, threads and streams.

``SPARSE_ATTN_TEST_RANDOM=1000`` makes up that many problems. A failure names the seed that repeats it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import sparse_attn
from bench.dense import dense_attention

from .cases import CASES, Inputs
from .conftest import INTERPRETED
from .test_backends import allowed, assert_close, assert_right, skip_if_unavailable, skip_if_unsupported, truth

EXAMPLES = int(os.environ.get("SPARSE_ATTN_TEST_RANDOM", 5 if INTERPRETED else 40))
# Group, D, Dv and block size: of these kernels are compiled anew, so few are drawn, of all kinds.
KERNELS = (
    (16, 64, 64, 32), (16, 128, 128, 64), (4, 64, 64, 32), (1, 128, 128, 64), (16, 128, 128, 16), (12, 64, 64, 64),
    (8, 256, 256, 64), (5, 40, 24, 48), (4, 64, 64, 24), (4, 64, 64, 8), (8, 192, 192, 64),
)  # fmt: skip
WILD = (-(2**31), -1, 2**31 - 1, 2143289344)


@pytest.fixture(autouse=True)
def _available(backend: str, device: torch.device) -> None:
    skip_if_unavailable(backend, device)


@st.composite
def problems(draw: st.DrawFn) -> Inputs:
    """Any problem of these kernels: lengths, offsets, ids of all kinds, layouts, values behind what is seen."""
    g, D, Dv, block_size = draw(st.sampled_from(KERNELS))
    B, Hk = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    N, M = draw(st.integers(0, 60 if INTERPRETED else 200)), draw(st.integers(0, 400))
    topk, num_blocks = draw(st.integers(0, 12)), -(-M // block_size)
    q_offset = draw(st.one_of(st.just(0), st.just(M - N), st.integers(-60, 450)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]))

    def tensor(H: int, length: int, features: int) -> torch.Tensor:
        if draw(st.booleans()):  # positions before heads, as a view of something larger
            return torch.randn(B, length, H + 1, features, generator=generator).to(dtype)[:, :, 1:].transpose(1, 2)
        return torch.randn(B, H, length, features, generator=generator).to(dtype)

    q, k, v = tensor(g * Hk, N, D), tensor(Hk, M, D), tensor(Hk, M, Dv)
    # Ids from two below the range to two above it, hence also repeated ones, and now and then any number.
    index = torch.randint(-2, num_blocks + 2, (B, Hk, N, topk), generator=generator)
    wild = torch.tensor([*WILD, num_blocks, M])[torch.randint(len(WILD) + 2, index.shape, generator=generator)]
    index = index.where(torch.rand(index.shape, generator=generator) < draw(st.sampled_from([1.0, 0.9, 0.3])), wild)
    seen = max(0, min(M, N + q_offset))
    if draw(st.booleans()):  # never written: no query stands so far behind
        k[:, :, seen:], v[:, :, seen:] = torch.nan, torch.nan
    scale = draw(st.sampled_from([None, 0.0, -0.3, 1.0]))
    return Inputs(q, k, v, index.to(draw(st.sampled_from([torch.int32, torch.int64]))), block_size, scale, q_offset)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(x=problems())
def test_random_problems(backend: str, device: torch.device, x: Inputs) -> None:
    assert_right(backend, x, truth(x), device)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def needs_memory(device: torch.device, gib: int) -> None:
    free = torch.cuda.mem_get_info(device)[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, got {free:.0f}")


@needs_cuda
def test_queries_beyond_32_bits(backend: str, device: torch.device) -> None:
    """More than 2**31 numbers in q and out; the last batch entry is checked."""
    needs_memory(device, 24)
    B, N = 33, 8192
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(B, 64, N, 128, dtype=torch.float16, device=device, generator=generator)
    assert q.numel() > 2**31
    k, v = (torch.randn(B, 4, N, 128, dtype=torch.float16, device=device, generator=generator) for _ in range(2))
    index = torch.randint(0, N // 64, (B, 4, N, 2), device=device, generator=generator, dtype=torch.int32)
    skip_if_unsupported(backend, Inputs(q, k, v, index, 64))
    with sparse_attn.use_backend(backend):
        out = sparse_attn.sparse_attention(q, k, v, index, 64)
    rows = torch.arange(N - 33, N, device=device)
    last = tuple(x[-1:] for x in (q, k, v, index))
    expected, _ = dense_attention(*last, 64, rows=rows)
    eager, _ = dense_attention(*last, 64, rows=rows, dtype=torch.float16)
    assert_close(out[-1:, :, rows], expected.cpu(), allowed(eager, expected, torch.float16, terms=128), "out")


@needs_cuda
def test_keys_beyond_32_bits(backend: str, device: torch.device) -> None:
    """More than 2**31 numbers in k and in v, and blocks at their ends; against the selected blocks alone."""
    needs_memory(device, 24)
    M, block_size = 2**24 + 2**18, 64
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(1, 16, 40, 128, dtype=torch.float16, device=device, generator=generator)
    k, v = (torch.randn(1, 1, M, 128, dtype=torch.float16, device=device, generator=generator) for _ in range(2))
    assert k.numel() > 2**31
    blocks = torch.tensor([0, 2**17, 2**18, M // block_size - 1], device=device)
    index = blocks.int().expand(1, 1, 40, 4).contiguous()
    skip_if_unsupported(backend, Inputs(q, k, v, index, block_size, None, M))
    with sparse_attn.use_backend(backend):
        out, lse = sparse_attn.sparse_attention(q, k, v, index, block_size, q_offset=M, return_lse=True)
    keys = (blocks[:, None] * block_size + torch.arange(block_size, device=device)).flatten()
    few = Inputs(q, k[:, :, keys], v[:, :, keys], torch.arange(4).expand(1, 1, 40, 4), block_size, None, 256)
    expected = truth(replace(few, **{name: getattr(few, name).cpu() for name in ("q", "k", "v")}))
    assert_close(out, expected.out, expected.out_bound, "out")
    assert_close(lse, expected.lse, expected.lse_bound, "lse")


@needs_cuda
def test_memory_beside_inputs_and_output(backend: str, device: torch.device) -> None:
    """O(index): block lists, nothing of the size of scores."""
    if backend == "reference":
        pytest.skip("the reference's bound is in test_reference.py")
    N = 8192
    q = torch.randn(1, 64, N, 128, dtype=torch.float16, device=device)
    k, v = (torch.randn(1, 4, N, 128, dtype=torch.float16, device=device) for _ in range(2))
    index = torch.randint(0, 128, (1, 4, N, 32), dtype=torch.int32, device=device)
    skip_if_unsupported(backend, Inputs(q, k, v, index, 64))
    with sparse_attn.use_backend(backend):
        sparse_attn.sparse_attention(q, k, v, index, 64)  # compiled, and what libraries keep is allocated
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        out = sparse_attn.sparse_attention(q, k, v, index, 64)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated(device) - before - out.numel() * out.element_size()
    assert extra <= 2 * index.numel() * index.element_size() + 2**20


def test_two_threads_and_two_streams(backend: str, device: torch.device) -> None:
    """Nothing is kept between calls that another call could see."""
    case = "decode_gqa" if INTERPRETED else "contest_medium"
    inputs = [CASES[case].build(torch.float16).to(device) for _ in range(2)]
    inputs[1] = replace(inputs[1], q=inputs[1].q + 1)
    skip_if_unsupported(backend, inputs[0])
    with sparse_attn.use_backend(backend):
        expected = [sparse_attn.sparse_attention(*x.args, **x.kwargs) for x in inputs]
    if device.type == "cuda":
        torch.cuda.synchronize()
    wrong: list[int] = []

    def work(which: int) -> None:
        x = inputs[which]
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(stream), sparse_attn.use_backend(backend):
            for _ in range(50 if device.type == "cuda" else 3):
                out = sparse_attn.sparse_attention(*x.args, **x.kwargs)
                if stream is not None:
                    stream.synchronize()
                if not torch.equal(out, expected[which]):
                    wrong.append(which)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
