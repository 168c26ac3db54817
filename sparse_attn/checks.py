"""Checks of the arguments of ``sparse_attention``, by the names that its callers know.

They are on the path of every call: plain comparisons, in order, and everything else only once one has failed.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import torch
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)
_INT32_MAX = 2**31 - 1


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, sm_scale: float | None, q_offset: int
) -> tuple[int, float, int]:
    """Check the arguments and return the scalars as plain numbers."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(index, Tensor)):
        _refuse_non_tensor(q=q, k=k, v=v, index=index)
    try:
        B, Hq, N, D = q.shape
        Bk, Hk, M, Dk = k.shape
        Bv, Hv, Mv, Dv = v.shape
        Bi, Hi, Ni, _ = index.shape
    except ValueError:
        _refuse_rank(q=q, k=k, v=v, index=index)
    dtype = q.dtype
    if dtype not in _FLOATS:
        raise TypeError(f"q must be float16, bfloat16 or float32, got {dtype}")
    if k.dtype != dtype:
        raise TypeError(f"k must have q's dtype {dtype}, got {k.dtype}")
    if v.dtype != dtype:
        raise TypeError(f"v must have q's dtype {dtype}, got {v.dtype}")
    if index.dtype not in _INTEGERS:
        raise TypeError(f"index must be int32 or int64, got {index.dtype}")
    device = q.device
    if k.device != device:
        raise ValueError(f"k must be on q's device {device}, got {k.device}")
    if v.device != device:
        raise ValueError(f"v must be on q's device {device}, got {v.device}")
    if index.device != device:
        raise ValueError(f"index must be on q's device {device}, got {index.device}")

    if Bk != B or Dk != D:
        raise ValueError(f"k must be [B, Hk, M, D] with q's B={B} and D={D}, got shape {_shape(k)}")
    if Bv != B or Hv != Hk or Mv != M:
        raise ValueError(f"v must be [B, Hk, M, Dv] with k's B={B}, Hk={Hk} and M={M}, got shape {_shape(v)}")
    if Hk < 1 or Hq < 1 or Hq % Hk:
        raise ValueError(f"q must have a multiple of k's heads, got Hq={Hq} and Hk={Hk}")
    if Bi != B or Hi != Hk or Ni != N:
        raise ValueError(
            f"index must be [B, Hk, N, topk] with B={B}, Hk={Hk} (the heads of k, not of q) and N={N}, "
            f"got shape {_shape(index)}"
        )
    if D < 1 or Dv < 1:
        raise ValueError(f"q and v must have at least one feature, got D={D} and Dv={Dv}")

    if type(block_size) is not int:
        block_size = _integer("block_size", block_size)
    if not 1 <= block_size <= _INT32_MAX:
        raise ValueError(f"block_size must be at least 1 and below 2**31, got {block_size}")
    if type(q_offset) is not int:
        q_offset = _integer("q_offset", q_offset)
    if not -_INT32_MAX <= q_offset <= _INT32_MAX - N:
        raise ValueError(f"q_offset must keep positions within 31 bits, got {q_offset} with N={N}")
    if sm_scale is None:
        sm_scale = D**-0.5
    elif type(sm_scale) is not float:
        sm_scale = _number("sm_scale", sm_scale)
    return block_size, sm_scale, q_offset


_DIMENSIONS = {"q": "[B, Hq, N, D]", "k": "[B, Hk, M, D]", "v": "[B, Hk, M, Dv]", "index": "[B, Hk, N, topk]"}


def _refuse_non_tensor(**arguments: Any) -> NoReturn:
    name, value = next((n, x) for n, x in arguments.items() if not isinstance(x, Tensor))
    raise TypeError(f"{name} must be a torch.Tensor {_DIMENSIONS[name]}, got {type(value).__name__}")


def _refuse_rank(**arguments: Tensor) -> NoReturn:
    name, value = next((n, x) for n, x in arguments.items() if x.dim() != 4)
    raise ValueError(f"{name} must have 4 dimensions {_DIMENSIONS[name]}, got shape {_shape(value)}") from None


def _integer(name: str, value: Any) -> int:
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):  # a Tensor's value may be on the device
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    return operator.index(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    if isinstance(value, (bool, str, Tensor)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a float or None, got {type(value).__name__}")
    return float(value)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
