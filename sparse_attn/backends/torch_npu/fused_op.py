"""The only place that knows torch_npu: its operator for paged decoding, in either of its two versions.

Both compute the same; the second has other names and is the one that torch_npu's documentation recommends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


class Version(NamedTuple):
    """The operator's name in torch_npu, and the names of those arguments that the versions call differently."""

    function: str
    heads: str
    scale: str
    lengths: str
    return_lse: str


V2 = Version(
    "npu_fused_infer_attention_score_v2",
    heads="num_query_heads",
    scale="softmax_scale",
    lengths="actual_seq_kvlen",
    return_lse="return_softmax_lse",
)
V1 = Version(
    "npu_fused_infer_attention_score",
    heads="num_heads",
    scale="scale",
    lengths="actual_seq_lengths_kv",
    return_lse="softmax_lse_flag",
)


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lengths: Sequence[int], sm_scale: float, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Attention of R rows of g heads, each to the first ``lengths[r]`` keys of its pages.

    Args:
        q: ``[R, g, 1, D]``, float16 or bfloat16, contiguous.
        k, v: pages, ``[P, 1, page, D]``, q's dtype, contiguous.
        tables: ``[R, W]``, int32, contiguous: ids of pages.
        lengths: R numbers from 1 to ``W * page``, on the host.
        sm_scale: factor on the scores.
        return_lse: compute the second result.

    Returns:
        out ``[R, g, 1, D]`` in q's dtype, and lse ``[R, g, 1, 1]`` in float32, natural logarithm.
    """
    function, version = _find()
    return function(q, k, v, **arguments(version, q, k, tables, lengths, sm_scale, return_lse))


def arguments(
    version: Version, q: Tensor, k: Tensor, tables: Tensor, lengths: Sequence[int], sm_scale: float, return_lse: bool
) -> dict[str, object]:
    """The arguments behind q, k and v. All others keep their defaults: no mask, no quantisation."""
    return {
        version.heads: q.shape[1],
        "num_key_value_heads": 1,
        version.scale: sm_scale,
        "input_layout": "BNSD",
        "block_table": tables,
        "block_size": k.shape[2],
        version.lengths: lengths,
        version.return_lse: return_lse,
        "inner_precise": 0,  # high precision: scores of float16 may pass its largest number
    }


def _find() -> tuple[Callable[..., tuple[Tensor, Tensor]], Version]:
    # Here, not on top: what comes this far is on an NPU, so torch_npu is loaded, and the mapping is tested without it.
    import torch_npu

    version = V2 if hasattr(torch_npu, V2.function) else V1
    return getattr(torch_npu, version.function), version
