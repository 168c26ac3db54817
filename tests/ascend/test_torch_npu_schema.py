"""What the torch_npu backend hands to the fused operator, against torch_npu itself: its schemas and its shapes.

Runs where torch_npu is installed and can be imported: without CANN, on the libraries that ``stub_cann`` makes. Nothing
is computed, and what only the device checks (limits, tables, lengths) stays unchecked.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu

from sparse_attn import registry
from sparse_attn.backends.torch_npu import fused_op, mapping
from sparse_attn.contract import Device, Problem

ASCEND = Device("npu", "ascend910b", "Ascend910B2")

versions = pytest.mark.parametrize("version", [fused_op.V1, fused_op.V2], ids=["v1", "v2"])


def schema(version: fused_op.Version) -> Any:
    return getattr(torch.ops.npu, version.function).default._schema


@versions
def test_schema_has_the_arguments(version: fused_op.Version) -> None:
    tensors = torch.empty(7, 4, 1, 64), torch.empty(9, 1, 16, 64), torch.zeros(7, 3, dtype=torch.int32)
    passed = fused_op.arguments(version, *tensors, lengths=[1] * 7, sm_scale=0.125, return_lse=True)
    known = {argument.name: argument for argument in schema(version).arguments}
    assert [name for name, argument in known.items() if not argument.kwarg_only] == ["query", "key", "value"]
    assert passed.keys() <= known.keys()
    assert all(argument.has_default_value() for argument in known.values() if argument.kwarg_only)
    kinds = {
        int: "int",
        float: "float",
        str: "str",
        bool: "bool",
        list: "Optional[List[int]]",
        torch.Tensor: "Optional[Tensor]",
    }
    for name, value in passed.items():
        assert str(known[name].type) == kinds[type(value)], name
    assert [str(result.type) for result in schema(version).returns] == ["Tensor", "Tensor"]


@versions
@pytest.mark.parametrize("return_lse", [True, False], ids=["lse", "alone"])
@pytest.mark.parametrize(
    ("dtype", "B", "Hq", "Hk", "N", "M", "D", "topk", "block_size"),
    [
        (torch.float16, 1, 64, 4, 256, 4096, 128, 16, 64),
        (torch.bfloat16, 2, 16, 1, 5, 1003, 64, 6, 64),
        (torch.float16, 2, 2, 2, 1, 128, 16, 2, 16),
        (torch.bfloat16, 1, 128, 2, 3, 1024, 512, 9, 512),
        (torch.float16, 1, 4, 2, 40, 40, 64, 1, 2**20),
    ],
)
def test_shapes_of_the_results(
    version: fused_op.Version, return_lse: bool, dtype: torch.dtype, B: int, Hq: int, Hk: int, N: int, M: int, D: int,
    topk: int, block_size: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The mapping's tensors on the device without values, with any lengths."""
    monkeypatch.setattr(fused_op, "_find", lambda: (getattr(torch_npu, version.function), version))
    q, k = (torch.empty(B, heads, n, D, dtype=dtype, device="meta") for heads, n in ((Hq, N), (Hk, M)))
    index = torch.empty(B, Hk, N, topk, dtype=torch.int32, device="meta")
    pages = mapping.pages(k, mapping.page_size(M, block_size))
    tables, lengths, _ = mapping.rows(index, M, block_size, 0)
    rows, g = B * Hk * N, Hq // Hk
    out, lse = fused_op.paged_attention(
        mapping.queries_to_rows(q, Hk), pages, pages, tables, [1] * len(lengths), 0.125, return_lse
    )
    assert (out.shape, out.dtype) == ((rows, g, 1, D), dtype)
    assert lse.dtype == torch.float32
    assert not return_lse or lse.shape == (rows, g, 1, 1)
    assert mapping.rows_to_queries(out, B, Hk, N).shape == q.shape


def test_second_version_is_taken() -> None:
    function, version = fused_op._find()
    assert version is fused_op.V2
    assert function is torch_npu.npu_fused_infer_attention_score_v2


def test_nothing_stands_against_it_on_a_910b() -> None:
    problem = Problem(ASCEND, torch.float16, torch.int32, 1, 64, 4, 4096, 4096, 128, 128, 32, 64)
    assert registry.reasons_against("torch_npu", problem) == ()
