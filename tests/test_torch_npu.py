"""The torch_npu backend without an NPU: all of it runs, on a CPU, on an emulation of the documented operator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import sparse_attn
from bench.dense import dense_mask
from sparse_attn import registry
from sparse_attn.backends.torch_npu import adapter, backend, mapping
from sparse_attn.checks import check_arguments
from sparse_attn.contract import Backend
from sparse_attn.errors import BackendUnavailableError

from .cases import CASES, Inputs, make
from .test_backends import Truth, assert_close, truth, truth_of_case
from .test_registry import ASCEND, problem

# The cases that the operator's limits exclude, with the reason.
BLOCKS = "needs block_size <= 512 and a multiple of 16, or a single block of at most 512 keys, got block_size="
REFUSED = {
    "block1": BLOCKS + "1 and M=300",
    "block100": BLOCKS + "100 and M=300",
    "block600": BLOCKS + "600 and M=1300",
    "d100": "needs D <= 512 and a multiple of 16, got D=100",
    "dv_smaller": "needs D == Dv, got D=64 and Dv=32",
    "dv_larger": "needs D == Dv, got D=64 and Dv=128",
    "keys_behind_rows_that_see_nothing_block8": BLOCKS + "8 and M=32",
    "keys_behind_rows_that_see_nothing_block24": BLOCKS + "24 and M=32",
    "keys_behind_rows_that_see_nothing_block16_dv192": "needs D == Dv, got D=64 and Dv=192",
}


class EmulatedNpu(ModuleType):
    """A module ``torch_npu`` with one version of the operator, in torch, which insists on every documented limit.

    Each row sees the first keys of its pages, as many as its length says. What lies behind them is never used.
    """

    def __init__(self, version: int = 2) -> None:
        super().__init__("torch_npu")
        self.__spec__ = ModuleSpec("torch_npu", None)
        if version == 2:
            self.npu_fused_infer_attention_score_v2 = self._v2
        else:
            self.npu_fused_infer_attention_score = self._v1
        self.max_rows = 65536
        self.calls: list[int] = []  # rows of each
        self.pages: tuple[int, int] | None = None  # addresses in the latest

    def _v1(
        self, query: Tensor, key: Tensor, value: Tensor, *, num_heads: int, scale: float,
        actual_seq_lengths_kv: list[int], softmax_lse_flag: bool, **same: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        names = {"num_query_heads": num_heads, "softmax_scale": scale, "actual_seq_kvlen": actual_seq_lengths_kv}
        return self._v2(query, key, value, **names, return_softmax_lse=softmax_lse_flag, **same)

    def _v2(
        self, query: Tensor, key: Tensor, value: Tensor, *, num_query_heads: int, num_key_value_heads: int,
        softmax_scale: float, input_layout: str, block_table: Tensor, block_size: int, actual_seq_kvlen: list[int],
        return_softmax_lse: bool, inner_precise: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert type(softmax_scale) is float
        assert (input_layout, inner_precise) == ("BNSD", 0)
        rows, heads, queries, D = query.shape
        count, kv_heads, page, _ = key.shape
        assert query.dtype in (torch.float16, torch.bfloat16)
        assert query.dtype == key.dtype == value.dtype
        assert key.shape == value.shape == (count, kv_heads, page, D)
        assert all(x.is_contiguous() for x in (query, key, value, block_table))
        assert (queries, heads, kv_heads) == (1, num_query_heads, num_key_value_heads)
        assert heads <= 64 * kv_heads
        assert heads <= 256
        assert D <= 512
        assert page == block_size <= 512
        assert page % 16 == 0
        assert key.numel() < 2**31
        assert 1 <= rows <= self.max_rows
        assert block_table.dtype == torch.int32
        assert block_table.shape[0] == rows
        assert block_table.shape[1] * page <= 262144
        assert 0 <= block_table.min() <= block_table.max() < count  # it reads what they name, unchecked
        assert type(actual_seq_kvlen) is list
        assert len(actual_seq_kvlen) == rows
        assert all(type(n) is int and 1 <= n <= block_table.shape[1] * page for n in actual_seq_kvlen)
        self.calls.append(rows)
        self.pages = key.data_ptr(), value.data_ptr()

        outs, lses = [], []
        position = torch.arange(block_table.shape[1] * page)
        for part in torch.arange(rows).split(256):
            tables = block_table[part].long()
            unseen = (position >= torch.tensor(actual_seq_kvlen)[part, None])[:, None]
            k, v = (x[tables, 0].flatten(1, 2).float().masked_fill(unseen.mT, 0) for x in (key, value))
            scores = (query[part, :, 0].float() @ k.mT * softmax_scale).masked_fill(unseen, -torch.inf)
            outs.append((scores.softmax(-1) @ v).to(query.dtype))
            lses.append(scores.logsumexp(-1))
        lse = torch.cat(lses)[:, :, None, None] if return_softmax_lse else torch.zeros(1)
        return torch.cat(outs)[:, :, None], lse


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> EmulatedNpu:
    module = EmulatedNpu()
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


def reasons_against(x: Inputs) -> list[str]:
    return list(backend.unsupported(sparse_attn.problem_of(*x.args, **x.kwargs)._replace(device=ASCEND)))


def run(x: Inputs, return_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    block_size, sm_scale, q_offset = check_arguments(*x.args, x.q_offset)
    return backend(x.q, x.k, x.v, x.index, block_size, sm_scale, q_offset, return_lse)


def assert_right(x: Inputs, expected: Truth) -> None:
    assert reasons_against(x) == []
    out, lse = run(x)
    assert lse is not None
    assert (out.dtype, lse.dtype) == (x.q.dtype, torch.float32)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert_close(out, expected.out, expected.out_bound, "out")
    assert_close(lse, expected.lse, expected.lse_bound, "lse")
    alone, nothing = run(x, return_lse=False)
    assert nothing is None
    assert torch.equal(alone, out)


# --- the results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("case", [name for name in CASES if name not in REFUSED])
def test_case(case: str, dtype: torch.dtype, npu: EmulatedNpu) -> None:
    x = CASES[case].build(dtype)
    assert_right(x, truth_of_case(case, dtype))
    nothing_to_compute = 0 in (*x.q.shape, x.k.shape[2], x.index.shape[3])
    assert len(npu.calls) == (0 if nothing_to_compute else 2)


@pytest.mark.parametrize("case", CASES)
def test_refused_cases_are_the_known_ones(case: str) -> None:
    assert reasons_against(CASES[case].build(torch.float16)) == ([REFUSED[case]] if case in REFUSED else [])


@st.composite
def problems(draw: st.DrawFn) -> Inputs:
    """Any problem that is supported and small, with NaN in every key that no query sees."""
    B, Hk, g = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    N, M, D = draw(st.integers(1, 20)), draw(st.integers(1, 100)), draw(st.sampled_from([16, 48]))
    block_size = draw(st.one_of(st.sampled_from([16, 32, 48]), st.integers(M, M + 70)))
    topk, q_offset = draw(st.integers(1, 6)), draw(st.integers(-25, 120))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # Ids from two below the range to two above it, hence also repeated ones.
    index = torch.randint(-2, -(-M // block_size) + 2, (B, Hk, N, topk), generator=generator)
    q, k, v = (torch.randn(B, h, n, D, generator=generator).half() for h, n in ((Hk * g, N), (Hk, M), (Hk, M)))
    unseen = ~dense_mask(index, M, block_size, torch.arange(N) + q_offset).any(2)[..., None]
    k, v = k.masked_fill(unseen, torch.nan), v.masked_fill(unseen, torch.nan)
    index = index.to(draw(st.sampled_from([torch.int32, torch.int64])))
    if draw(st.booleans()):
        index = index.mT.contiguous().mT
    return Inputs(q, k, v, index, block_size, None, q_offset)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems())
def test_any_problem(npu: EmulatedNpu, x: Inputs) -> None:
    assert_right(x, truth(x))


def test_first_version_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch_npu has no second one."""
    older = EmulatedNpu(version=1)
    monkeypatch.setitem(sys.modules, "torch_npu", older)
    assert_right(CASES["ragged"].build(torch.float16), truth_of_case("ragged", torch.float16))
    assert len(older.calls) == 2


def test_more_rows_than_a_call_takes(npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "MAX_ROWS", 100)
    npu.max_rows = 100
    case = "empty_rows_inside_tiles"
    assert_right(CASES[case].build(torch.float16), truth_of_case(case, torch.float16))
    assert npu.calls == [100, 100, 56] * 2


def test_nan_of_rows_that_see_nothing_stays_there(npu: EmulatedNpu) -> None:
    """They look at the first key all the same. It may hold NaN, in a cache that was never written, and so may they."""
    x = make(torch.float16, N=40)
    index = x.index.clone()
    index[:, :, 10] = -1
    x.q[:, :, 10] = torch.nan
    alone = replace(x, index=torch.full_like(index, -1), k=x.k * torch.nan, v=x.v * torch.nan)
    for y, empty in ((replace(x, index=index), [10]), (alone, range(40))):
        out, lse = run(y)
        assert lse is not None
        assert not out.isnan().any()
        assert not lse.isnan().any()
        assert (out[:, :, empty] == 0).all()
        assert (lse[:, :, empty] == -torch.inf).all()
        assert (lse == -torch.inf).sum() == 4 * len(empty)


# --- the mapping -----------------------------------------------------------------------------------------------------


def test_rows_by_hand() -> None:
    """Four blocks of 16, the last one of 12 keys; queries at 20, 47 and behind the end."""
    ids = torch.tensor([[1, 0, 1, 2, -1], [2, 9, 0, 3, 2], [3, 0, 3, 3, 1]])
    for positions, q_offset, expected in (
        (slice(0, 1), 20, ([0, 1], 16 + 5)),  # in block 1, at its 5th key
        (slice(1, 2), 47, ([0, 2], 16 + 16)),  # at the last key of block 2, which is whole; block 3 is later
        (slice(2, 3), 70, ([0, 1, 3], 16 + 16 + 12)),  # sees all, and block 3 ends after 12 keys
        (slice(2, 3), -1, ([], 0)),
    ):
        index = ids[positions].int().expand(1, 2, 1, 5)
        rows = mapping.rows(index, 60, 16, q_offset)
        pages, length = expected
        assert rows.tables.dtype == torch.int32
        assert rows.tables.shape == (2, 4)
        assert rows.tables[0, : len(pages)].tolist() == pages
        assert rows.tables[1, : len(pages)].tolist() == [4 + page for page in pages]  # the second head's pages
        assert rows.lengths.tolist() == [max(length, 1)] * 2
        assert rows.empty.tolist() == [length == 0] * 2


def test_mapping_reads_nothing_on_the_host() -> None:
    """It runs where there are no values."""
    index = torch.empty(2, 4, 100, 6, dtype=torch.int32, device="meta")
    tables, lengths, empty = mapping.rows(index, 1000, 64, 900)
    assert (tables.shape, lengths.shape, empty.shape) == ((800, 6), (800,), (800,))
    k = torch.empty(2, 4, 1000, 64, device="meta")
    assert mapping.pages(k, 64).shape == (2 * 4 * 16, 1, 64, 64)


@pytest.mark.parametrize("case", ["contest_medium", "strange_batch_stride_huge", "wide_batch"])
def test_whole_blocks_are_not_copied(case: str, npu: EmulatedNpu) -> None:
    x = CASES[case].build(torch.float16)
    run(x)
    assert npu.pages == (x.k.data_ptr(), x.v.data_ptr())


def test_last_block_is_filled_up_with_zeros() -> None:
    k = make(torch.float16, B=2, N=40).k
    pages = mapping.pages(k, 16)
    assert pages.shape == (2 * 2 * 3, 1, 16, 64)
    assert torch.equal(pages.view(2, 2, 48, 64)[:, :, :40], k)
    assert (pages.view(2, 2, 48, 64)[:, :, 40:] == 0).all()


# --- what it says it can run -----------------------------------------------------------------------------------------


def test_typical_call_is_supported() -> None:
    assert isinstance(backend, Backend)
    assert backend.unsupported(problem(ASCEND)) == []
    assert not hasattr(backend, "backward")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": torch.float32}, "needs fp16 or bf16, got fp32"),
        ({"D": 576, "Dv": 512}, "needs D == Dv, got D=576 and Dv=512"),
        ({"D": 528, "Dv": 528}, "needs D <= 512 and a multiple of 16, got D=528"),
        ({"D": 40, "Dv": 40}, "needs D <= 512 and a multiple of 16, got D=40"),
        ({"Hq": 260}, "needs Hq / Hk <= 64, got 65"),
        ({"block_size": 24}, BLOCKS + "24 and M=4096"),
        ({"block_size": 1024}, BLOCKS + "1024 and M=4096"),
        ({"block_size": 2**20, "M": 513}, BLOCKS + "1048576 and M=513"),
        ({"M": 2**20, "topk": 4097}, "needs min(topk, ceil(M / block_size)) * block_size <= 262144, got 262208"),
        ({"M": 2**22}, "needs k and v of less than 2**31 elements, filled up to whole blocks, got 2147483648"),
        ({"M": 2**22 - 63}, "needs k and v of less than 2**31 elements, filled up to whole blocks, got 2147483648"),
    ],
)
def test_limits(changed: dict[str, Any], reason: str) -> None:
    assert reason in backend.unsupported(problem(ASCEND)._replace(**changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"D": 512, "Dv": 512},
        {"D": 16, "Dv": 16},
        {"Hq": 256},
        {"block_size": 16},
        {"block_size": 512},
        {"block_size": 2**20, "M": 512},
        {"block_size": 1000, "M": 7},
        {"M": 2**20, "topk": 4096},
        {"M": 1000, "topk": 10**6},
        {"M": 2**22 - 64},
        {"B": 2, "Hk": 1, "Hq": 1, "N": 10**6},
        {"M": 0, "block_size": 7},
        {"topk": 0, "block_size": 7},
    ],
    ids=str,
)
def test_within_the_limits(changed: dict[str, Any]) -> None:
    assert backend.unsupported(problem(ASCEND)._replace(**changed)) == []


# --- through the registry, as on a 910B ------------------------------------------------------------------------------


@pytest.fixture
def ascend(npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU passes for a 910B with torch_npu."""
    monkeypatch.setattr(sparse_attn.ops, "describe", lambda device: ASCEND)
    registry._forget()
    yield
    monkeypatch.undo()
    registry._forget()


@pytest.mark.usefixtures("ascend")
def test_runs_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x, expected = CASES["ragged"].build(torch.float16), truth_of_case("ragged", torch.float16)
    with sparse_attn.use_backend("torch_npu"):
        out = sparse_attn.sparse_attention(*x.args, **x.kwargs)
    assert sparse_attn.last_backend() == "torch_npu"
    assert_close(out, expected.out, expected.out_bound, "out")
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, "torch_npu")
    assert sparse_attn.backend_for(*x.args, **x.kwargs) == "torch_npu"
    assert "torch_npu      can run it\n" in f"{sparse_attn.explain(*x.args, **x.kwargs)}\n"


@pytest.mark.usefixtures("ascend")
def test_is_not_chosen_by_itself() -> None:
    x = make(torch.float16)
    assert sparse_attn.backend_for(*x.args) != "torch_npu"
    said = str(sparse_attn.explain(*x.args))
    assert (
        "torch_npu      can run it; is not chosen by itself: use_backend('torch_npu') or SPARSE_ATTN_BACKEND=" in said
    )


@pytest.mark.usefixtures("ascend")
def test_refuses_gradients() -> None:
    x = make(torch.float16)
    x.q.requires_grad_()
    with sparse_attn.use_backend("torch_npu"), pytest.raises(BackendUnavailableError, match="has no backward pass"):
        sparse_attn.sparse_attention(*x.args)
