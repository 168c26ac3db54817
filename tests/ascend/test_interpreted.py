"""The 910B kernel in triton-ascend's interpreter, on every case. Run with ``TRITON_INTERPRET=1``.

In fp16: the interpreter multiplies bf16 matrices wrongly. What it needs minutes for is cut to its last queries.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

import sparse_attn
from sparse_attn.backends.triton_ascend.adapter import TritonAscendBackend
from sparse_attn.contract import Device

from ..cases import CASES
from ..test_backends import assert_close, truth_of_case

DEVICE = Device("npu", "ascend910b", "Ascend910B2")
REFUSED = {
    "block256": "needs block_size or M <= 128, got 256 and M=300",
    "block600": "needs block_size or M <= 128, got 600 and M=1300",
}
MOST_QUERIES = 160  # of all heads together


def test_interpreted() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    x, expected = CASES[case].build(torch.float16), truth_of_case(case, torch.float16)
    backend = TritonAscendBackend()
    reasons = backend.unsupported(sparse_attn.problem_of(*x.args, **x.kwargs)._replace(device=DEVICE))
    assert list(reasons) == ([REFUSED[case]] if case in REFUSED else [])
    if reasons:
        return
    B, Hk, N, _ = x.index.shape
    rows = slice(max(0, N - max(9, MOST_QUERIES // max(1, B * Hk))), None)
    x = replace(x, q=x.q[:, :, rows], index=x.index[:, :, rows], q_offset=x.q_offset + rows.start)
    scale = x.q.shape[3] ** -0.5 if x.sm_scale is None else x.sm_scale
    out, lse = backend(x.q, x.k, x.v, x.index, x.block_size, scale, x.q_offset, True)
    assert_close(out, expected.out[:, :, rows], expected.out_bound, "out")
    assert_close(lse, expected.lse[:, :, rows], expected.lse_bound, "lse")
