"""Kernels, compiled when they are first needed: once in a process, and kept on disk by TileLang for the next."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import tilelang
from tilelang.contrib.nvcc import find_cuda_path

from .block_lists import block_lists_kernel
from .exact import exact_kernel
from .order import order_kernel
from .plan import MAX_ORDERED_BLOCKS, Tiles
from .union import union_kernel

_Key = tilelang.PassConfigKey
PASS_CONFIGS: dict[Any, bool] = {
    _Key.TL_ENABLE_FAST_MATH: True,  # exp2 as one instruction
    _Key.TL_DISABLE_SAFE_MEMORY_ACCESS: True,  # the kernels guard what can be outside
    _Key.TL_DISABLE_WARP_SPECIALIZED: True,  # done by hand
    _Key.TL_DISABLE_BUFFER_INIT_CHECK: True,  # it warns of what is only read after it was written
    _Key.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # done by hand: warps and warpgroups wait for themselves alone
}
_kernels: dict[tuple[Any, Tiles, str], Any] = {}
_loaded: list[Any] = []  # their libraries
# Two threads that need a kernel at once compile it once; TileLang's compiler is not known to be safe for threads.
_lock = threading.Lock()


@cache
def missing_compiler() -> str | None:
    """Why kernels cannot be compiled here: TileLang runs the CUDA toolkit's nvcc, which comes with no package of it."""
    try:
        find_cuda_path()
    except RuntimeError:
        return "needs nvcc, of the CUDA toolkit, to compile its kernels, and found none: install it, or set CUDA_HOME"
    return None


def _compile(kernel: Any, *variant: Any) -> Any:
    key = kernel, *variant
    compiled = _kernels.get(key)
    if compiled is None:
        with _lock:
            if key not in _kernels:
                _loaded.append(tilelang.compile(kernel(*variant), pass_configs=PASS_CONFIGS))
                _kernels[key] = _function(_loaded[-1])
            compiled = _kernels[key]
    return compiled


def _function(kernel: Any) -> Any:
    """The compiled function itself, which checks its arguments: TileLang's way to it walks through them once more.

    Where a release keeps it elsewhere, the kernel as it is.
    """
    try:
        return kernel.adapter._get_executable()["main"]
    except (AttributeError, KeyError, TypeError):
        return kernel


def union(tiles: Tiles, dtype: str) -> Any:
    """``union.union_kernel`` for ``tiles`` and ``"float16"`` or ``"bfloat16"``."""
    return _compile(union_kernel, tiles, dtype)


def exact(tiles: Tiles, dtype: str) -> Any:
    """``exact.exact_kernel`` for ``tiles`` and ``"float16"`` or ``"bfloat16"``."""
    return _compile(exact_kernel, tiles, dtype)


def block_lists(tiles: Tiles, index_dtype: str) -> Any:
    """``block_lists.block_lists_kernel`` for ``tiles`` and ``"int32"`` or ``"int64"``."""
    return _compile(block_lists_kernel, _listed(tiles), index_dtype)


def order(tiles: Tiles, index_dtype: str, num_blocks: int) -> Any:
    """``order.order_kernel`` for ``tiles`` and ``"int32"`` or ``"int64"``: one for few blocks, one for many."""
    words = (256 if num_blocks <= 256 else MAX_ORDERED_BLOCKS) // 32
    return _compile(order_kernel, _listed(tiles)._replace(BN=0, box=0), index_dtype, words)


def _listed(tiles: Tiles) -> Tiles:
    """Of the tiles, only what matters to lists: problems that differ in the rest share a kernel."""
    return tiles._replace(heads=0, D=0, Dv=0, k_stages=0, v_stages=0)
