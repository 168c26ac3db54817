"""Kernels, compiled when they are first needed: once in a process, and kept on disk by TileLang for the next."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import tilelang

from .block_lists import block_lists_kernel
from .plan import Tiles
from .union import union_kernel

_Key = tilelang.PassConfigKey
PASS_CONFIGS = {
    _Key.TL_ENABLE_FAST_MATH: True,  # exp2 as one instruction
    _Key.TL_DISABLE_SAFE_MEMORY_ACCESS: True,  # the kernels guard what can be outside
    _Key.TL_DISABLE_WARP_SPECIALIZED: True,  # done by hand
}
if hasattr(_Key, "TL_DISABLE_BUFFER_INIT_CHECK"):  # it warns of what is only read after it was written
    PASS_CONFIGS[_Key.TL_DISABLE_BUFFER_INIT_CHECK] = True
# Two threads that need a kernel at once compile it once; TileLang's compiler is not known to be safe for threads.
_lock = threading.Lock()


@cache
def _compile(kernel: Any, tiles: Tiles, dtype: str) -> Any:
    return tilelang.compile(kernel(tiles, dtype), pass_configs=PASS_CONFIGS)


def union(tiles: Tiles, dtype: str) -> Any:
    """``union.union_kernel`` for ``tiles`` and ``"float16"`` or ``"bfloat16"``."""
    with _lock:
        return _compile(union_kernel, tiles, dtype)


def block_lists(tiles: Tiles, index_dtype: str) -> Any:
    """``block_lists.block_lists_kernel`` for ``tiles`` and ``"int32"`` or ``"int64"``."""
    # Of the tiles, only these matter: problems that differ in the rest share a kernel.
    tiles = tiles._replace(heads=0, D=0, Dv=0, k_stages=0, v_stages=0)
    with _lock:
        return _compile(block_lists_kernel, tiles, index_dtype)
