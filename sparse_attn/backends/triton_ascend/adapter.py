"""The backend's object: what it can run, and the way from the operator's arguments to one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract import Problem
from .attention import attention_kernel
from .block_lists import MAX_SORTED, block_lists
from .plan import MOST_CORES, MOST_HEADS, Tiles, padded, tiles_for

MAX_FEATURES = 256
MAX_BLOCK = 128
# Offsets inside a tile are 32-bit numbers.
_MAX_OFFSET = 2**31
# Ids are sorted with their segment and place as one fp32 number.
MAX_TOPK = 2**18


class Launch(NamedTuple):
    """The kernel with everything it is launched with, as a value: tests compile it, or run it on a CPU.

    Attributes:
        kernel: the kernel.
        programs: how many share the tasks; on a device, at most the cube cores that it has.
        args: in the order of the kernel's parameters, up to the constants.
        constants: what the kernel is compiled for, by name.
    """

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self) -> None:
        """Launch on the current device and stream."""
        self.kernel[(self.programs,)](*self.args, **self.constants)


class TritonAscendBackend:
    """Forward pass in fp16 and bf16 with up to 256 features and blocks of up to 128 keys."""

    def unsupported(self, problem: Problem) -> Sequence[str]:
        reasons = []
        if problem.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"needs fp16 or bf16, got {str(problem.dtype).removeprefix('torch.')}")
        reasons.extend(
            f"needs {name} <= {MAX_FEATURES}, got {name}={getattr(problem, name)}"
            for name in ("D", "Dv")
            if getattr(problem, name) > MAX_FEATURES
        )
        if min(problem.block_size, problem.M) > MAX_BLOCK:
            reasons.append(f"needs block_size or M <= {MAX_BLOCK}, got {problem.block_size} and M={problem.M}")
        if problem.topk > MAX_TOPK:
            reasons.append(f"needs topk <= {MAX_TOPK}, got {problem.topk}")
        if 4 * problem.num_blocks >= MAX_SORTED:
            reasons.append(f"needs fewer than 2**22 key blocks, got {problem.num_blocks}")
        # So many heads of N rows are what a tile of q, copied if need be, or of the result spans.
        heads, width = min(padded(problem.group), MOST_HEADS), max(problem.D, problem.Dv)
        if problem.N * width * heads >= _MAX_OFFSET:
            reasons.append(
                f"needs N * max(D, Dv) < 2**31 / {heads} with {problem.group} heads in a group, got N={problem.N}, "
                f"D={problem.D} and Dv={problem.Dv}"
            )
        return reasons

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        block_size: int,
        sm_scale: float,
        q_offset: int,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        B, Hq, N, _ = q.shape
        M, Dv = v.shape[2:]
        if 0 in (B, N, M, index.shape[3], Dv):
            out = torch.zeros(B, Hq, N, Dv, dtype=q.dtype, device=q.device)
            return out, torch.full((B, Hq, N), -math.inf, dtype=torch.float32, device=q.device) if return_lse else None
        out, lse, launch = prepare(q, k, v, index, block_size, sm_scale, q_offset, return_lse)
        if q.device.type == "npu":
            with torch.npu.device(q.device):  # type: ignore[attr-defined]  # Triton launches on the current device
                launch._replace(programs=min(launch.programs, cube_cores(q.device))).run()
        else:
            launch.run()
        return out, lse


def prepare(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, sm_scale: float, q_offset: int, return_lse: bool,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor | None, Launch]:  # fmt: skip
    """Make results, unfilled, and the launch that fills them. No argument is empty; ``tiles`` replaces the plan's."""
    B, Hq, N, D = q.shape
    _, Hk, M, Dv = v.shape
    g, topk = Hq // Hk, index.shape[3]
    block_size = min(block_size, M)
    q_offset = min(max(q_offset, -N), M)  # the same beyond: nothing is seen, or everything
    if tiles is None:
        tiles = tiles_for(g, N, M, D, Dv, block_size, B * Hk)
    q = _readable(q, {1: tiles.heads, 2: tiles.T})
    k, v = (_readable(x, {2: tiles.BN}) for x in (k, v))
    lists = block_lists(index, M, block_size, q_offset, tiles.T, mask_all=block_size % tiles.BN != 0)
    out = torch.empty((B, Hq, N, Dv), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, Hq, N), dtype=torch.float32, device=q.device) if return_lse else None
    n_tiles, chunks = -(-N // tiles.T), -(-g // tiles.heads)
    tasks = B * Hk * chunks * n_tiles
    args = (
        q, k, v, out, out if lse is None else lse, lists.blocks, lists.masks, lists.fields, sm_scale,
        *_strides(q), *_strides(k), *_strides(v), block_size,
        Hk, g, N, M, q_offset, tiles.T * topk, n_tiles, tasks,
    )  # fmt: skip
    constants = {
        "D": D, "DV": Dv, "D_PADDED": padded(D), "DV_PADDED": padded(Dv), "HEADS": tiles.heads, "T": tiles.T,
        "BN": tiles.BN, "LSE": return_lse,
    }  # fmt: skip
    return out, lse, Launch(attention_kernel, min(tasks, MOST_CORES), args, constants)


def _readable(x: Tensor, tile: dict[int, int]) -> Tensor:
    """Features side by side, and a tile, so long along these axes, within 2**31 elements along each: else a copy."""
    within = all(_strides(x)[axis] * length < _MAX_OFFSET for axis, length in tile.items())
    return x if x.stride(3) == 1 and within else x.contiguous()


def _strides(x: Tensor) -> list[int]:
    """The first three; 0 where there is nothing to step over, whatever the tensor says."""
    return [stride if length > 1 else 0 for length, stride in zip(x.shape[:3], x.stride(), strict=False)]


@cache
def cube_cores(device: torch.device) -> int:
    """Cube cores of a device, of which a grid needs no more programs than there are."""
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index)["num_aicore"])


backend = TritonAscendBackend()
