"""A driver of the handout's form, for a folder that holds it and ``solution.py``: ``python benchmark.py --size small``.

It imports nothing of this repository but that one function, and checks it against the formula of the statement.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from solution import sparse_attention

# B, Hq, Hk, N, M, D, topk, block.
POINTS = {
    "small": [(1, 16, 1, 128, 128, 64, 4, 64)],
    "medium": [(1, 64, 4, 1024, 1024, 64, 16, 64)],
    "large": [(1, 64, 4, 4096, 4096, 128, 32, 64), (2, 64, 4, 8192, 8192, 128, 64, 64)],
}


def make_index(B: int, Hk: int, N: int, topk: int, block: int) -> Tensor:
    """For each query a random permutation of the causal blocks, cut to topk, -1 behind: one list for all heads."""
    index = torch.full((N, topk), -1, dtype=torch.int32)
    for i in range(N):
        ids = torch.randperm(i // block + 1)[:topk]
        index[i, : len(ids)] = ids
    return index.expand(B, Hk, N, topk).contiguous()


def formula(q: Tensor, k: Tensor, v: Tensor, index: Tensor, block: int, sm_scale: float) -> Tensor:
    """``softmax(q k^T * sm_scale + mask) v``, a head at a time, in fp32."""
    B, Hq, N, _ = q.shape
    Hk, M = k.shape[1:3]
    i, j = torch.arange(N, device=q.device)[:, None], torch.arange(M, device=q.device)
    out = torch.empty_like(q)
    for b in range(B):
        for h in range(Hk):
            selected = torch.zeros(N, M // block + 1, dtype=torch.bool, device=q.device)
            ids = index[b, h].long()
            selected.scatter_(1, torch.where(ids < 0, M // block, ids), True)
            hidden = ~(selected[:, j // block] & (j <= i))
            for head in range(h * Hq // Hk, (h + 1) * Hq // Hk):
                scores = q[b, head].float() @ k[b, h].float().T * sm_scale
                weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
                out[b, head] = (weights @ v[b, h].float()).to(q.dtype)
    return out


def milliseconds(call: Callable[[], Tensor], device: str) -> float:
    if device == "cuda":
        try:
            from triton.testing import do_bench
        except ImportError:
            pass
        else:
            return do_bench(call, warmup=10, rep=50)
    synchronize = getattr(torch, device).synchronize
    call()
    synchronize()
    start = time.perf_counter()
    for _ in range(5):
        call()
    synchronize()
    return (time.perf_counter() - start) * 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=[*POINTS, "all"], default="all")
    parser.add_argument("--no-check", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    npu = hasattr(torch, "npu") and torch.npu.is_available()
    device = "cuda" if torch.cuda.is_available() else "npu" if npu else "cpu"
    print(f"{'size':<10}{'status':<10}{'latency (ms)':>14}{'TFLOPS':>10}")
    for size in POINTS if options.size == "all" else [options.size]:
        for B, Hq, Hk, N, M, D, topk, block in POINTS[size]:
            q, k, v = (
                torch.randn(B, H, n, D, dtype=torch.float16, device=device) for H, n in ((Hq, N), (Hk, M), (Hk, M))
            )
            index = make_index(B, Hk, N, topk, block).to(device)
            arguments = q, k, v, index, block, D**-0.5
            status = "unchecked"
            if not options.no_check:
                torch.testing.assert_close(sparse_attention(*arguments), formula(*arguments), atol=1e-2, rtol=1e-2)
                status = "passed"
            ms = milliseconds(lambda arguments=arguments: sparse_attention(*arguments), device)
            tflops = 4 * B * Hq * N * topk * block * D / ms * 1e-9
            print(f"{size:<10}{status:<10}{ms:>14.3f}{tflops:>10.3f}", flush=True)


if __name__ == "__main__":
    main()
