"""The reference: what the operator means, in plain torch, fp32 inside, on any device.

Every other backend is validated against it, so it has to be obviously right first, and then fast and small enough to
validate at real sizes. Of the two obvious forms it takes the dense one, in tiles: all scores of a few queries against
every key up to the last of them, with the unselected ones masked out. Gathering the selected keys of each query instead
copies ``topk * block_size`` rows of k and of v for each (275 GB in fp32 for 2 x 4 heads, 8192 queries and 64 blocks
of 64), where the dense form reads k and v once per tile and leaves the work to a matrix product. It does more
arithmetic than a sparse selection needs; docs/performance.md has the times of both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import Problem

# On x86 CPUs torch's exp and log are MKL's, and if the first call in a process is a parallel one, some of its threads
# may get results that are off by 1e-4 (seen with torch 2.13 on a busy machine, in one process of seven).
# Not the second call's.
torch.ones(1).exp().log()

# fp32 scores held at a time. The softmax needs about three buffers of that size: under 1 GiB in all.
_TILE_BYTES = 256 * 2**20


class Reference:
    """Supports every valid problem, with a backward pass."""

    def unsupported(self, problem: Problem) -> Sequence[str]:
        return ()

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
        out = q.new_zeros(B, Hq, N, v.shape[3])
        lse = q.new_full((B, Hq, N), -torch.inf, dtype=torch.float32)
        with _exact_products(q.device.type):
            for tile in _tiles(q, k, v, index, block_size, sm_scale, q_offset):
                m_i, l_i = _exponentiate(tile.scores)
                o = (tile.scores @ tile.v / l_i).masked_fill_(tile.empty, 0)
                out[tile.b, :, tile.rows] = tile.ungroup(o).to(out.dtype)
                lse[tile.b, :, tile.rows] = tile.ungroup(m_i + l_i.log()).squeeze(-1)
        return out, lse if return_lse else None

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        block_size: int,
        sm_scale: float,
        q_offset: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients as in FlashAttention-2 (Dao 2023, section 3.1), with the lse's own gradient added to the scores'.

        Weights and their sums are computed again in fp32: taken from ``out`` and ``lse`` they would inherit the
        rounding of one and, for scores in the thousands, of the other.
        """
        dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        dv = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
        with _exact_products(q.device.type):
            for tile in _tiles(q, k, v, index, block_size, sm_scale, q_offset):
                b, rows, keys = tile.b, tile.rows, tile.keys
                _, l_i = _exponentiate(tile.scores)
                p = tile.scores.div_(l_i)
                do = tile.group(grad_out[b, :, rows].float()).masked_fill(tile.empty, 0)
                dv[b, :, keys] += p.mT @ do
                dp = do @ tile.v.mT
                ds = dp - (dp * p).sum(-1, keepdim=True)
                if grad_lse is not None:
                    ds += tile.group(grad_lse[b, :, rows])[..., None].masked_fill(tile.empty, 0)
                ds *= p
                dq[b, :, rows] = tile.ungroup(ds @ tile.k * sm_scale).to(dq.dtype)
                dk[b, :, keys] += ds.mT @ tile.q
        return dq, dk.to(k.dtype), dv.to(v.dtype)


backend = Reference()


class _Tile(NamedTuple):
    """A run of queries of one batch entry against every key up to the last of them, all heads, in fp32.

    The ``g`` heads of a group and the ``n`` queries share one axis of ``g * n`` rows: q ``[Hk, g*n, D]`` (scaled), k
    ``[Hk, m, D]``, v ``[Hk, m, Dv]``, scores ``[Hk, g*n, m]`` with -inf where a key is not seen. ``empty``
    ``[Hk, g*n, 1]`` marks the rows that see nothing.
    """

    b: int
    rows: slice
    keys: slice
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    empty: Tensor

    def group(self, x: Tensor) -> Tensor:
        """``[Hq, n, ...]`` -> ``[Hk, g*n, ...]``."""
        return x.reshape(self.k.shape[0], -1, *x.shape[2:])

    def ungroup(self, x: Tensor) -> Tensor:
        """``[Hk, g*n, ...]`` -> ``[Hq, n, ...]``."""
        return x.reshape(-1, self.rows.stop - self.rows.start, *x.shape[2:])


def _tiles(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_size: int, sm_scale: float, q_offset: int
) -> Iterator[_Tile]:
    """Cut the problem into tiles. Queries that stand before the first key are in none: they see nothing."""
    B, Hq, N, _ = q.shape
    Hk, M = k.shape[1:3]
    step = max(1, _TILE_BYTES // (4 * Hq * max(M, 1)))
    for b in range(B):
        for start in range(0, N, step):
            rows = slice(start, min(start + step, N))
            keys = slice(0, max(0, min(M, rows.stop + q_offset)))
            if keys.stop == 0:
                continue
            seen = _seen(index[b, :, rows], block_size, rows, keys, M, q_offset)
            # What is not used may hold NaN, and 0 * NaN is NaN: keys that no query sees, and queries that see no key,
            # must not reach a product.
            unseen = ~seen.any(1)[..., None]
            empty = ~seen.any(2)[:, None].expand(Hk, Hq // Hk, -1).reshape(Hk, -1, 1)
            tile_k = k[b, :, keys].float().masked_fill(unseen, 0)
            tile_v = v[b, :, keys].float().masked_fill(unseen, 0)
            tile_q = (q[b, :, rows].float() * sm_scale).reshape(Hk, -1, q.shape[3]).masked_fill(empty, 0)
            scores = tile_q @ tile_k.mT
            scores.unflatten(1, (Hq // Hk, -1)).masked_fill_(~seen[:, None], -torch.inf)
            yield _Tile(b, rows, keys, tile_q, tile_k, tile_v, scores, empty)


def _seen(index: Tensor, block_size: int, rows: slice, keys: slice, M: int, q_offset: int) -> Tensor:
    """The definition of the operator: does query i (a row) see key j? ``index`` ``[Hk, n, topk]`` -> ``[Hk, n, m]``."""
    Hk, n, _ = index.shape
    num_blocks = -(-M // block_size)
    valid = (index >= 0) & (index < num_blocks)
    # A set of blocks for each query; ids that mean nothing go to one more column, cut off below.
    selected = torch.zeros(Hk, n, num_blocks + 1, dtype=torch.bool, device=index.device)
    selected.scatter_(2, torch.where(valid, index, num_blocks).long(), True)
    j = torch.arange(keys.start, keys.stop, device=index.device)
    i = torch.arange(rows.start, rows.stop, device=index.device)
    return selected[..., j // block_size] & (j <= i[:, None] + q_offset)


def _exponentiate(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Turn scores into ``exp(scores - m_i)`` in place; return the rows' maxima m_i and sums l_i, ``[Hk, g*n, 1]``.

    A row that sees nothing gets weights of 0, m_i = -inf (so that its lse is -inf)
    and l_i = 1 (so that its output is 0).
    """
    m_i = scores.amax(-1, keepdim=True)
    empty = m_i == -torch.inf
    scores.sub_(m_i.masked_fill(empty, 0)).exp_()
    return m_i, scores.sum(-1, keepdim=True).masked_fill_(empty, 1)


# --- fp32 that is fp32, whatever the process has asked for -----------------------------------------------------------


class _PlainFp32:
    """Switch TF32 and its like off while at least one call is inside. The switches belong to the process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.undo = ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                self._switch_off()

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.undo.close()

    def _switch_off(self) -> None:
        if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch < 2.9
            self.undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
            return
        # The functions above raise once a process has used these switches, which see to both.
        for switch in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
            before = switch.fp32_precision
            if before != "none":  # what "none" stands for is IEEE
                switch.fp32_precision = "ieee"
                self.undo.callback(_put_back, switch, before)


def _put_back(switch: Any, before: str) -> None:
    switch.fp32_precision = "none"  # inherited from torch.backends.fp32_precision, if it reads as before now
    if switch.fp32_precision != before:
        switch.fp32_precision = before


_plain_fp32 = _PlainFp32()


@contextmanager
def _exact_products(device_type: str) -> Iterator[None]:
    """Matrix products of fp32 in fp32, whatever autocast and the process have asked for."""
    autocast_off: Any = nullcontext()
    if torch.amp.is_autocast_available(device_type):
        autocast_off = torch.autocast(device_type, enabled=False)
    with autocast_off, _plain_fp32:
        yield
