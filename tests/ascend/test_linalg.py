"""The 910B kernel as Linalg, run on the CPU, against fp64: the front half of the real compiler has to be right, too."""

from __future__ import annotations

import pytest
import torch

from sparse_attn.backends.triton_ascend.adapter import prepare
from sparse_attn.backends.triton_ascend.plan import Tiles, padded

from ..cases import CASES
from ..test_backends import assert_close, truth_of_case
from .lowering import linalg
from .on_cpu import run

# What concerns the kernel rather than the lists, and every corner of the lists once.
SOME = (
    "contest_small_statement", "contest_small_handout", "contest_medium", "contest_large2_statement", "n_gt_m",
    "n_lt_m", "ragged", "decode_speculative", "decode_gqa", "offset_negative", "offset_beyond_cache", "tiny1",
    "odd17", "d80", "d256", "dv_larger", "dv_smaller", "block1", "block48", "block100", "block128",
    "one_block_larger_than_m", "last_block_partial", "ids_out_of_range", "ids_int64", "minus_one_anywhere",
    "minus_one_before_nan", "empty_rows_inside_tiles", "nothing_selected", "only_later_blocks", "duplicates",
    "topk_beyond_64", "layout_bnhd", "packed_qkv", "last_dim_strided", "expanded", "int32_offsets_batch",
    "int32_offsets_head", "int32_offsets_row", "unseen_keys_hold_nan", "keys_behind_rows_that_see_nothing",
    "peaked", "large_scores", "scale_zero", "scale_negative",
    *(f"group{g}" for g in (1, 2, 3, 4, 5, 8, 12, 16, 32, 64)),
)  # fmt: skip


def check(case: str, dtype: torch.dtype, tiles: Tiles | None = None) -> None:
    x, expected = CASES[case].build(dtype), truth_of_case(case, dtype)
    scale = x.q.shape[3] ** -0.5 if x.sm_scale is None else x.sm_scale
    out, lse, launch = prepare(x.q, x.k, x.v, x.index, x.block_size, scale, x.q_offset, True, tiles)
    run(launch, linalg(launch, "Ascend910B2"))
    assert_close(out, expected.out, expected.out_bound, "out")
    assert_close(lse, expected.lse, expected.lse_bound, "lse")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("case", SOME)
def test_linalg(case: str, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("case", ["contest_small_statement", "ragged", "duplicates", "block48", "unseen_keys_hold_nan"])
def test_linalg_of_every_tile(case: str, T: int) -> None:
    """Tiles of 1, 2 and 4 queries, whatever the plan would choose."""
    x = CASES[case].build(torch.float16)
    BN = min(64, padded(x.block_size))
    check(case, torch.float16, Tiles(padded(x.q.shape[1] // x.k.shape[1]), T, BN))
