"""Every backend on every case in every dtype, against the truth in fp64.

The truth is dense attention under a boolean mask (``bench.dense``), which shares no code with any backend, so that the
reference is judged by the same rule as the rest. A backend may be wrong by twice what torch's SDPA in the same dtype is
wrong by, plus one rounding of the result, plus what adding up that many terms in fp32 costs. Skips give the product's
own reasons: ``pytest -k backend -ra`` prints this machine's support matrix.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import sparse_attn
from bench.dense import dense_attention
from sparse_attn import messages, registry
from sparse_attn.device import describe

from .cases import CASES, DTYPES, Inputs, make
from .conftest import INTERPRETED, required_backends


class Truth(NamedTuple):
    """out ``[B, Hq, N, Dv]`` and lse ``[B, Hq, N]`` in fp64, and the largest error that a backend may have in each."""

    out: Tensor
    lse: Tensor
    out_bound: float
    lse_bound: float


def truth(x: Inputs) -> Truth:
    out, lse = dense_attention(*x.args, **x.kwargs)
    eager, _ = dense_attention(*x.args, **x.kwargs, dtype=x.q.dtype)
    bound = allowed(eager, out, x.q.dtype, terms=x.k.shape[2])
    # lse is fp32 whatever the inputs: it inherits the rounding of the scores, which grow with it.
    finite = lse[lse.isfinite()]
    return Truth(out, lse, bound, 1e-5 * (1 + _max(finite)))


def allowed(eager: Tensor, right: Tensor, dtype: torch.dtype, terms: int) -> float:
    """The largest error allowed: a sum of n terms in fp32 is off by about sqrt(n) roundings, in whatever order."""
    roundings = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * terms**0.5
    return 2 * _max(eager.double() - right) + roundings * _max(right)


@cache
def truth_of_case(name: str, dtype: torch.dtype) -> Truth:
    return truth(CASES[name].build(dtype))


def assert_close(got: Tensor, expected: Tensor, bound: float, what: str) -> None:
    __tracebackhide__ = True
    got = got.double().cpu()
    assert got.shape == expected.shape, f"{what}: shape {list(got.shape)}, expected {list(expected.shape)}"
    assert not got.isnan().any(), f"{what}: {int(got.isnan().sum())} of {got.numel()} values are NaN"
    infinite = expected.isinf()
    assert torch.equal(got.isinf(), infinite), f"{what}: infinite in other places than expected"
    error = _max((got - expected).masked_fill(infinite, 0))
    assert error <= bound, f"{what}: error {error:.3g}, allowed {bound:.3g}"


def assert_right(backend: str, x: Inputs, expected: Truth, device: torch.device, skip_alone: bool = False) -> None:
    __tracebackhide__ = True
    x = x.to(device)
    skip_if_unsupported(backend, x)
    with sparse_attn.use_backend(backend):
        out, lse = sparse_attn.sparse_attention(*x.args, **x.kwargs, return_lse=True)
        assert sparse_attn.last_backend() == backend
        alone = out if skip_alone else sparse_attn.sparse_attention(*x.args, **x.kwargs)
    assert out.dtype == x.q.dtype
    assert lse.dtype == torch.float32
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert_close(out, expected.out, expected.out_bound, "out")
    assert_close(lse, expected.lse, expected.lse_bound, "lse")
    assert_close(alone, expected.out, expected.out_bound, "out without lse")


def skip_if_unavailable(backend: str, device: torch.device) -> None:
    _skip(backend, registry.unavailable_on(backend, describe(device)))


def skip_if_unsupported(backend: str, x: Inputs) -> None:
    reasons = registry.reasons_against(backend, sparse_attn.problem_of(*x.args, **x.kwargs))
    # Also where it is required, which asks for all that there is of a backend.
    if reasons and all(
        reason == messages.no_backward() or "interpreter" in reason or reason.startswith("needs fp16 or bf16, got")
        for reason in reasons
    ):
        pytest.skip(f"{backend} {'; '.join(reasons)}")
    _skip(backend, "; ".join(reasons))


def _skip(backend: str, reason: str | None) -> None:
    if reason:
        required = backend in required_backends()
        (pytest.fail if required else pytest.skip)(f"{backend} {reason}")


def _max(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


@pytest.fixture(autouse=True)
def _available(backend: str, device: torch.device) -> None:
    """Skip before any input is made where the backend runs nothing at all."""
    skip_if_unavailable(backend, device)


SLOW_WHEN_INTERPRETED = (
    "contest_large2_statement", "contest_large2_handout", "contest_large1", "contest_medium", "last_block_partial",
    "block1", "block16", "block100", "block128", "block256", "block600", "wide_batch", "group12", "group16", "group32",
    "group64", "odd250", "ragged", "topk_beyond_64",
)  # fmt: skip
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@dtypes
@pytest.mark.parametrize("case", CASES)
def test_case(backend: str, case: str, dtype: torch.dtype, device: torch.device) -> None:
    slow = INTERPRETED and case in SLOW_WHEN_INTERPRETED
    if slow and dtype == torch.float32:
        pytest.skip("takes minutes in Triton's interpreter, which runs it in fp16")
    assert_right(backend, CASES[case].build(dtype), truth_of_case(case, dtype), device, skip_alone=slow)


# --- properties that need no truth: the same answer when only the question is put differently ------------------------


def run(backend: str, x: Inputs, device: torch.device) -> Tensor:
    x = x.to(device)
    skip_if_unsupported(backend, x)
    with sparse_attn.use_backend(backend):
        return sparse_attn.sparse_attention(*x.args, **x.kwargs).double().cpu()


def same(backend: str, x: Inputs, y: Inputs, device: torch.device) -> None:
    """Both within the bound of x's truth, hence equal to rounding."""
    expected = truth(x)
    assert_close(run(backend, x, device), expected.out, expected.out_bound, "as asked")
    assert_close(run(backend, y, device), expected.out, expected.out_bound, "put differently")


def test_order_of_ids_is_free(backend: str, device: torch.device) -> None:
    x = make(torch.float16, B=2, Hq=8, N=300, topk=5, seed=11)
    order = torch.rand(x.index.shape, generator=torch.Generator().manual_seed(1)).argsort(-1)
    same(backend, x, replace(x, index=x.index.gather(-1, order)), device)


def test_duplicates_count_once(backend: str, device: torch.device) -> None:
    x = make(torch.float16, B=2, Hq=8, N=300, topk=5, seed=12)
    same(backend, x, replace(x, index=torch.cat([x.index, x.index.roll(2, -1)], -1)), device)


def test_batches_are_independent(backend: str, device: torch.device) -> None:
    x = make(torch.float16, B=3, Hq=8, N=150, topk=2, seed=13)
    order = [2, 0, 1]
    shuffled = replace(x, **{n: getattr(x, n)[order] for n in ("q", "k", "v", "index")})
    assert torch.equal(run(backend, shuffled, device), run(backend, x, device)[order])


def test_offset_continues_a_sequence(backend: str, device: torch.device) -> None:
    """The last queries alone, with q_offset, are the last rows of the whole: what decoding relies on."""
    x = make(torch.float16, B=2, Hq=8, N=200, topk=4, seed=14)
    expected = truth(x)
    for n in (1, 3, 70):
        tail = replace(x, q=x.q[:, :, -n:], index=x.index[:, :, -n:], q_offset=200 - n)
        got = run(backend, tail, device)
        assert_close(got, expected.out[:, :, -n:], expected.out_bound, f"the last {n} queries")


def test_weights_sum_to_one(backend: str, device: torch.device) -> None:
    x = make(torch.float16, Hq=16, Hk=1, N=200, D=64, topk=3, block_size=32, select_all=True)
    x = replace(x, q=x.q * 8, v=torch.ones_like(x.v))
    out = run(backend, x, device)
    assert (out - 1).abs().max() < 1e-3


def test_lse_is_the_natural_logarithm(backend: str, device: torch.device) -> None:
    """With scores of 0 the denominator counts the keys seen."""
    x = make(torch.float16, N=100, M=100, select_all=True, sm_scale=0.0).to(device)
    skip_if_unsupported(backend, x)
    with sparse_attn.use_backend(backend):
        _, lse = sparse_attn.sparse_attention(*x.args, return_lse=True)
    expected = torch.arange(1, 101).double().log().expand(1, 4, 100)
    assert_close(lse, expected, 1e-5, "lse")


@pytest.mark.parametrize("M", [0, 40])
def test_lse_is_fp32_whatever_the_default(backend: str, M: int, device: torch.device) -> None:
    x = make(torch.float16, N=40, M=M).to(device)
    skip_if_unsupported(backend, x)
    torch.set_default_dtype(torch.float64)
    try:
        with sparse_attn.use_backend(backend):
            _, lse = sparse_attn.sparse_attention(*x.args, return_lse=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert lse.dtype == torch.float32


def test_environment_variable_runs_it(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, backend)
    x = make(torch.float16, N=64).to(device)
    skip_if_unsupported(backend, x)
    sparse_attn.sparse_attention(*x.args)
    assert sparse_attn.last_backend() == backend


def test_inputs_are_left_alone(backend: str, device: torch.device) -> None:
    x = make(torch.float16, N=130).to(device)
    before = [t.clone() for t in (x.q, x.k, x.v, x.index)]
    run(backend, x, device)
    for tensor, copy in zip((x.q, x.k, x.v, x.index), before, strict=True):
        assert torch.equal(tensor, copy)


def test_repeats_bitwise(backend: str, device: torch.device) -> None:
    x = make(torch.float16, B=2, Hq=16, N=300, topk=4)
    assert torch.equal(run(backend, x, device), run(backend, x, device))


@pytest.mark.parametrize("shape", ["long", "wide"])
def test_at_scale(backend: str, shape: str, device: torch.device) -> None:
    """Sizes that need an accelerator, checked on rows spread over the whole length, the last ones included."""
    if device.type == "cpu":
        pytest.skip("needs an accelerator, got cpu")
    N, B = (65536, 1) if shape == "long" else (1024, 32)
    generator = torch.Generator(device).manual_seed(0)
    Hq, Hk, D, topk, block_size = (64, 4, 128, 16, 64) if shape == "long" else (16, 1, 128, 16, 32)
    q = torch.randn(B, Hq, N, D, dtype=torch.float16, device=device, generator=generator)
    k = torch.randn(B, Hk, N, D, dtype=torch.float16, device=device, generator=generator)
    v = torch.randn(B, Hk, N, D, dtype=torch.float16, device=device, generator=generator)
    index = torch.randint(-1, N // block_size, (B, Hk, N, topk), device=device, generator=generator, dtype=torch.int32)
    x = Inputs(q, k, v, index, block_size)
    skip_if_unsupported(backend, x)
    with sparse_attn.use_backend(backend):
        out = sparse_attn.sparse_attention(*x.args)
    assert not out.isnan().any()
    rows = torch.cat([torch.arange(0, N, N // 16, device=device), torch.arange(N - 16, N, device=device)])
    expected, _ = dense_attention(*x.args, rows=rows)
    eager, _ = dense_attention(*x.args, rows=rows, dtype=torch.float16)
    bound = allowed(eager, expected, torch.float16, terms=N)
    assert_close(out[:, :, rows], expected.cpu(), bound, "out")


# --- graphs: captured by CUDA, or by torch.compile --------------------------------------------------------------------


def test_graph_capture_reads_new_index(backend: str, device: torch.device) -> None:
    """Replay with other contents of index gives the other result: nothing of index was read on the host."""
    if device.type != "cuda":
        pytest.skip(f"CUDA graphs need a CUDA device, got {device}")
    x = CASES["contest_large1"].build(torch.float16).to(device)
    skip_if_unsupported(backend, x)
    other = x.index.roll(17, 2)
    with sparse_attn.use_backend(backend):
        sparse_attn.sparse_attention(*x.args)  # warm up: libraries make their handles, kernels are compiled
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sparse_attn.sparse_attention(*x.args)
        for index in (x.index.clone(), other):
            x.index.copy_(index)
            graph.replay()
            assert torch.equal(out, sparse_attn.sparse_attention(*x.args))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(backend: str, mode: str, device: torch.device) -> None:
    case = "decode_gqa" if INTERPRETED else "contest_large1"  # 150 s for each mode otherwise
    x = CASES[case].build(torch.float16).to(device)
    skip_if_unsupported(backend, x)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: sparse_attn.sparse_attention(q, *x.args[1:]) * 2, mode=mode, fullgraph=True)
    with sparse_attn.use_backend(backend):
        for step in range(4):
            q = x.q + step
            assert torch.equal(compiled(q).clone(), sparse_attn.sparse_attention(q, *x.args[1:]) * 2)


# --- gradients -------------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(
    "case",
    ["contest_small_handout", "contest_large1", "duplicates", "duplicates_across_rows", "empty_rows_inside_tiles",
     "last_block_partial", "n_gt_m", "n_lt_m", "nothing_selected", "offset_negative", "ragged", "dv_larger",
     "layout_bnhd", "unseen_keys_hold_nan", "ids_out_of_range", "group5", "d100", "no_queries", "no_keys"],
)  # fmt: skip
def test_gradients(backend: str, case: str, dtype: torch.dtype, device: torch.device) -> None:
    """Of out and of lse, by the rule that the forward pass has to meet."""
    x = CASES[case].build(dtype)
    generator = torch.Generator().manual_seed(1)
    B, Hq, N, _ = x.q.shape
    grad_out = torch.randn(B, Hq, N, x.v.shape[3], generator=generator).to(dtype)
    grad_lse = torch.randn(B, Hq, N, generator=generator)

    def gradients(out: Tensor, lse: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        lse = lse.where(lse.isfinite(), 0)  # -inf * 0 in the sum
        total = (out.double() * grad_out.to(out.device)).sum() + (lse.double() * grad_lse.to(out.device)).sum()
        return list(torch.autograd.grad(total, inputs))

    def leaves(y: Inputs, dtype: torch.dtype = dtype) -> tuple[Inputs, list[Tensor]]:
        inputs = [t.detach().to(dtype).requires_grad_() for t in (y.q, y.k, y.v)]
        return replace(y, q=inputs[0], k=inputs[1], v=inputs[2]), inputs

    y, inputs = leaves(x, torch.float64)
    expected = gradients(*dense_attention(*y.args, **y.kwargs), inputs)
    y, inputs = leaves(x)
    eager = gradients(*dense_attention(*y.args, **y.kwargs, dtype=dtype), inputs)
    y, inputs = leaves(x.to(device))
    skip_if_unsupported(backend, y)
    with sparse_attn.use_backend(backend):
        out, lse = sparse_attn.sparse_attention(*y.args, **y.kwargs, return_lse=True)
    got = gradients(out, lse, inputs)
    for name, mine, right, low in zip("qkv", got, expected, eager, strict=True):
        terms = x.k.shape[2] if name == "q" else N * Hq // x.k.shape[1]
        assert_close(mine, right, allowed(low, right, dtype, terms), f"d{name}")


@pytest.mark.parametrize("poisoned", ["q", "grad_out", "grad_lse"])
def test_queries_that_see_nothing_have_no_gradient(backend: str, poisoned: str, device: torch.device) -> None:
    """Whatever they hold, whatever comes back to them: NaN, as from merging two lse of -inf, goes nowhere."""
    x = make(torch.float32, Hq=8, N=150, topk=3)
    index = x.index.clone()
    index[:, :, 70] = -1
    x = replace(x, index=index).to(device)
    if poisoned == "q":
        x.q[:, :, 70] = torch.nan
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    skip_if_unsupported(backend, x)
    with sparse_attn.use_backend(backend):
        out, lse = sparse_attn.sparse_attention(*x.args, return_lse=True)
    weights = [torch.ones_like(out), torch.ones_like(lse)]
    if poisoned != "q":
        weights[("grad_out", "grad_lse").index(poisoned)][:, :, 70] = torch.nan
    grads = torch.autograd.grad((out, lse), leaves, weights)
    assert not any(g.isnan().any() for g in grads)
    assert (out[:, :, 70] == 0).all()
    assert (grads[0][:, :, 70] == 0).all()


@pytest.mark.parametrize("D", [64, 128])
def test_gradients_of_causal_attention(backend: str, D: int, device: torch.device) -> None:
    """All blocks selected: the gradients of SDPA with is_causal."""
    x = make(torch.float32, Hq=4, Hk=2, N=192, D=D, block_size=64, select_all=True).to(device)
    mine = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    theirs = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    y = replace(x, q=mine[0], k=mine[1], v=mine[2])
    skip_if_unsupported(backend, y)
    with sparse_attn.use_backend(backend):
        out = sparse_attn.sparse_attention(*y.args)
    wide = [theirs[0], *(t.repeat_interleave(2, 1) for t in theirs[1:])]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(device)
    got = torch.autograd.grad(out, mine, grad)
    for a, b in zip(got, torch.autograd.grad(expected, theirs, grad.double()), strict=True):
        assert_close(a, b.cpu(), 1e-5, "gradient")


def test_gradients_repeat_bitwise(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query selects block 0, under deterministic algorithms: the same bits, or a clear refusal."""
    x = make(torch.float16, Hq=8, Hk=1, N=192, topk=2).to(device)
    index = x.index.clone()
    index[..., 0] = 0
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    x = replace(x, index=index)
    skip_if_unsupported(backend, x)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        with sparse_attn.use_backend(backend):
            runs = [torch.autograd.grad(sparse_attn.sparse_attention(*x.args).sum(), leaves) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
