"""The backend's object: what it can run, and the way from the operator's arguments to launches."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ...contract import Problem
from .call import Call
from .plan import Gpu, Shape, plan

MAX_FEATURES = 256
LEAST_CAPABILITY = 80
# Grids have at most so many blocks along y.
_MAX_GRID_Y = 65535
# Positions are 32-bit numbers, also those of a tile's or a block's end.
_MAX_LENGTH = 2**31 - 2**16


class TritonBackend:
    """Forward pass of every problem in fp16, bf16 and fp32 with up to 256 features."""

    def unsupported(self, problem: Problem) -> Sequence[str]:
        reasons = []
        match = re.fullmatch(r"sm(\d+)", problem.device.arch)
        if match and int(match.group(1)) < LEAST_CAPABILITY:
            reasons.append(f"needs compute capability 8.0 or newer, got {problem.device}")
        reasons.extend(
            f"needs {name} <= {MAX_FEATURES}, got {name}={getattr(problem, name)}"
            for name in ("D", "Dv")
            if getattr(problem, name) > MAX_FEATURES
        )
        if problem.device.type == "cpu" and problem.dtype == torch.bfloat16:
            reasons.append(
                "needs fp16 or fp32 in Triton's interpreter, which multiplies bf16 matrices wrongly, got bf16"
            )
        reach = problem.M + min(problem.block_size, problem.M)
        if max(problem.N, reach) > _MAX_LENGTH:
            reasons.append(f"needs N and M + block_size of at most 2**31 - 2**16, got N={problem.N} and {reach}")
        programs = problem.B * problem.Hk * -(-problem.group // 16)
        if programs > _MAX_GRID_Y:
            reasons.append(f"needs B * Hk * ceil(Hq / Hk / 16) <= {_MAX_GRID_Y}, got {programs}")
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
        B, Hq, N, D = q.shape
        _, Hk, M, Dv = v.shape
        topk = index.shape[3]
        if 0 in (B, N, M, topk, Dv):
            out = torch.zeros(B, Hq, N, Dv, dtype=q.dtype, device=q.device)
            lse = torch.full((B, Hq, N), -math.inf, dtype=torch.float32, device=q.device) if return_lse else None
            return out, lse
        block_size = min(block_size, M)
        q_offset = min(max(q_offset, -N), M)  # the same beyond: nothing is seen, or everything
        shape = Shape(q.dtype, B * Hk, Hq // Hk, N, M, D, Dv, topk, block_size, q_offset)
        call = Call(q, k, v, index, block_size, sm_scale, q_offset, return_lse)
        launches = call.launches(plan(shape, gpu(q.device)))
        if q.device.type != "cuda" or torch.cuda.current_device() == q.device.index:
            for launch in launches:
                launch.run(call.like)
        else:
            with torch.cuda.device(q.device):  # Triton launches on the current device
                for launch in launches:
                    launch.run(call.like)
        return call.out, call.lse


@cache
def gpu(device: torch.device) -> Gpu:
    """The facts of a device that a plan depends on. Interpreted on a CPU, kernels are an A100's, one program at a time.

    Triton's own variable for building another GPU's code counts: then that GPU's tiles are the right ones.
    """
    if device.type != "cuda":
        return Gpu(80, 1)
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major * 10 + properties.minor
    override = re.fullmatch(r"sm(\d+)a?", os.environ.get("TRITON_OVERRIDE_ARCH", ""))
    return Gpu(int(override.group(1)) if override else capability, properties.multi_processor_count)


backend = TritonBackend()
