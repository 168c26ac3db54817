"""What the public function says to arguments that do not fit: which one, what was needed, what was got."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sparse_attn

from .cases import make


def arguments(**changed: Any) -> dict[str, Any]:
    x = make(torch.float16, B=2, Hq=4, Hk=2, N=10, M=12, D=16, Dv=8, topk=3, block_size=4)
    return {"q": x.q, "k": x.k, "v": x.v, "index": x.index, "block_size": 4, **changed}


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "q-list": (TypeError, r"^q must be a torch.Tensor \[B, Hq, N, D\], got list", {"q": [1.0]}),
    "index-numpy": (TypeError, r"^index must be a torch.Tensor .* got ndarray", {"index": np.zeros((2, 2, 10, 3))}),
    "q-rank": (ValueError, r"^q must have 4 dimensions .* got shape \[4, 10, 16\]", {"q": half(4, 10, 16)}),
    "k-rank": (ValueError, r"^k must have 4 dimensions", {"k": half(2, 2, 12, 16, 1)}),
    "v-rank": (ValueError, r"^v must have 4 dimensions", {"v": half(2)}),
    "index-rank": (ValueError, r"^index must have 4 dimensions", {"index": ids(10, 3)}),
    "q-dtype": (
        TypeError,
        r"^q must be float16, bfloat16 or float32, got torch.float64",
        {"q": half(2, 4, 10, 16).double()},
    ),
    "k-dtype": (
        TypeError,
        r"^k must have q's dtype torch.float16, got torch.bfloat16",
        {"k": half(2, 2, 12, 16).bfloat16()},
    ),
    "v-dtype": (TypeError, r"^v must have q's dtype", {"v": half(2, 2, 12, 8).float()}),
    "index-dtype": (TypeError, r"^index must be int32 or int64, got torch.int16", {"index": ids(2, 2, 10, 3).short()}),
    "k-device": (ValueError, r"^k must be on q's device cpu, got meta", {"k": half(2, 2, 12, 16).to("meta")}),
    "v-device": (ValueError, r"^v must be on q's device cpu, got meta", {"v": half(2, 2, 12, 8).to("meta")}),
    "index-device": (ValueError, r"^index must be on q's device cpu, got meta", {"index": ids(2, 2, 10, 3).to("meta")}),
    "k-batch": (ValueError, r"^k must be \[B, Hk, M, D\] with q's B=2", {"k": half(1, 2, 12, 16)}),
    "k-features": (ValueError, r"^k must be .* D=16, got shape \[2, 2, 12, 32\]", {"k": half(2, 2, 12, 32)}),
    "v-heads": (ValueError, r"^v must be .* Hk=2 and M=12, got shape \[2, 1, 12, 8\]", {"v": half(2, 1, 12, 8)}),
    "v-keys": (ValueError, r"^v must be .* M=12", {"v": half(2, 2, 11, 8)}),
    "heads": (ValueError, r"^q must have a multiple of k's heads, got Hq=3 and Hk=2", {"q": half(2, 3, 10, 16)}),
    "index-heads": (
        ValueError,
        r"^index must be .*heads of k, not of q.* got shape \[2, 4, 10, 3\]",
        {"index": ids(2, 4, 10, 3)},
    ),
    "index-queries": (ValueError, r"^index must be .* N=10", {"index": ids(2, 2, 9, 3)}),
    "features": (
        ValueError,
        r"^q and v must have at least one feature",
        {"q": half(2, 4, 10, 0), "k": half(2, 2, 12, 0)},
    ),
    "block_size-zero": (ValueError, r"^block_size must be at least 1 .* got 0", {"block_size": 0}),
    "block_size-negative": (ValueError, r"^block_size must be at least 1", {"block_size": -64}),
    "block_size-float": (TypeError, r"^block_size must be an int, got float", {"block_size": 64.0}),
    "block_size-bool": (TypeError, r"^block_size must be an int, got bool", {"block_size": True}),
    "block_size-tensor": (TypeError, r"^block_size must be an int, got Tensor", {"block_size": torch.tensor(64)}),
    "sm_scale-tensor": (TypeError, r"^sm_scale must be a float or None, got Tensor", {"sm_scale": torch.tensor(1.0)}),
    "sm_scale-string": (TypeError, r"^sm_scale must be a float or None, got str", {"sm_scale": "0.1"}),
    "q_offset-float": (TypeError, r"^q_offset must be an int, got float", {"q_offset": 1.5}),
    "q_offset-huge": (ValueError, r"^q_offset must keep positions within 31 bits", {"q_offset": 2**31 - 5}),
    "q_offset-tiny": (ValueError, r"^q_offset must keep", {"q_offset": -(2**40)}),
}


@pytest.mark.parametrize("fault", BAD)
@pytest.mark.parametrize("function", [sparse_attn.sparse_attention, sparse_attn.backend_for, sparse_attn.explain])
def test_bad_arguments_are_named(fault: str, function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error, message, changed = BAD[fault]
    monkeypatch.setenv("SPARSE_ATTN_BACKEND", "no_such_backend")  # arguments are checked before any backend is asked
    with pytest.raises(error, match=message):
        function(**arguments(**changed))


def test_contest_call_is_positional() -> None:
    a = arguments()
    got = sparse_attn.sparse_attention(a["q"], a["k"], a["v"], a["index"], 4, 0.25)
    assert torch.equal(got, sparse_attn.sparse_attention(**a, sm_scale=0.25))  # also the default, 1/sqrt(16)
    assert torch.equal(got, sparse_attn.sparse_attention(**a))


def test_numpy_scalars_are_numbers() -> None:
    a = arguments(block_size=np.int64(4))
    got = sparse_attn.sparse_attention(**a, sm_scale=np.float32(0.25), q_offset=np.int32(2))
    assert torch.equal(got, sparse_attn.sparse_attention(**arguments(), sm_scale=0.25, q_offset=2))


def test_result_types() -> None:
    out = sparse_attn.sparse_attention(**arguments())
    assert isinstance(out, torch.Tensor)
    assert out.shape == (2, 4, 10, 8)
    assert out.dtype == torch.float16
    assert not out.requires_grad
    pair = sparse_attn.sparse_attention(**arguments(), return_lse=True)
    assert isinstance(pair, tuple)
    assert pair[1].shape == (2, 4, 10)
    assert pair[1].dtype == torch.float32
