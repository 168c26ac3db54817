"""How far a time is from what the device can do: measured ceilings, percentages of them, and which of them bounds it.

The ceilings are measured on the device of the run and in its dtype, once, with the default timer: a product of two
square matrices of random numbers (8192 x 8192), and a copy of a buffer (1 GiB) whose bytes count twice, read and
written. On a CPU they are 512 x 512, in fp32, since its products in fp16 may be a hundredth as fast, and 64 MiB. A
kernel that uses other units than torch's product does (TF32 for fp32) may pass 100 %. Of a row:

* ``matmul_percent``: selected FLOP / time, of the product's FLOP/s;
* ``copy_percent``: compulsory bytes (:func:`bench.counts.compulsory_bytes`) / time, of the copy's bytes/s;
* ``bound_by``: ``compute`` or ``memory``, the larger of both, where it is at least 10 %. Below that neither ceiling
  explains the time: ``launch`` if it is under 200 us, of which launching and filling the device are a large part, else
  ``neither`` (work beyond what is counted, L2, latencies: a profiler's question).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .timers import default_timer, measure_time

EXPLAINS_PERCENT = 10.0
LAUNCH_US = 200.0
_MATMUL, _COPY = 8192, 2**30
_MATMUL_CPU, _COPY_CPU = 512, 2**26
_WARMUP_MS, _REP_MS = 20.0, 100.0


class Ceilings(NamedTuple):
    """What was measured: ``matmul_tflops`` in TFLOP/s, ``copy_tbs`` in TB/s; of which sizes; and by which timer."""

    matmul_tflops: float
    copy_tbs: float
    dtype: str
    matmul_size: int
    copy_bytes: int
    timer: str

    def __str__(self) -> str:
        n = self.matmul_size
        return (
            f"ceilings: matmul {self.matmul_tflops:.4g} TFLOP/s ({n} x {n} x {n}, {self.dtype}), "
            f"copy {self.copy_tbs:.3g} TB/s (read and write, {self.copy_bytes // 2**20} MiB), by {self.timer}"
        )


class Place(NamedTuple):
    """Where a time stands under the ceilings; see the module."""

    matmul_percent: float
    copy_percent: float
    bound_by: str


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure both ceilings. Needs 2 GiB of free memory on an accelerator, 128 MiB on a CPU."""
    on_cpu = device.type == "cpu"
    dtype = torch.float32 if on_cpu else dtype
    n, size = (_MATMUL_CPU, _COPY_CPU) if on_cpu else (_MATMUL, _COPY)
    rep = _REP_MS / 5 if on_cpu else _REP_MS
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    product = measure_time(lambda: torch.mm(a, b, out=out), device, _WARMUP_MS, rep)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = measure_time(lambda: target.copy_(source), device, _WARMUP_MS, rep)
    name = str(dtype).removeprefix("torch.")
    return Ceilings(2 * n**3 / product.median / 1e9, 2 * size / copy.median / 1e9, name, n, size, default_timer(device))


def place(flop: float, moved: float, ms: float, ceilings: Ceilings) -> Place:
    """Place a call of ``flop`` and of ``moved`` compulsory bytes, which took ``ms``, under the ceilings."""
    at_matmul, at_copy = flop / ceilings.matmul_tflops / 1e9, moved / ceilings.copy_tbs / 1e9  # in ms
    matmul, copy = 100 * at_matmul / ms, 100 * at_copy / ms
    if max(matmul, copy) >= EXPLAINS_PERCENT:
        bound = "compute" if matmul >= copy else "memory"
    else:
        bound = "launch" if 1e3 * ms < LAUNCH_US else "neither"
    return Place(matmul, copy, bound)
