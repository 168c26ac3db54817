"""The attention kernel for the 910B: one tile of queries walks the blocks that its queries selected.

Written to what the compiler does with it (docs/ascend.md): a grid as large as the cores with a loop over tiles inside;
block ids as scalars and tiles of k and v as contiguous rows, which the cube core then copies into its L1 by itself; no
branch around a product; a finite number for "nothing"; 64-bit numbers in scalars only.

The softmax is the online one of FlashAttention-2 (Dao 2023, algorithm 1): m_i is the largest score so far, l_i the sum
of ``exp(score - m_i)``.
"""

import triton
import triton.language as tl

from .block_lists import FIELDS as _FIELDS

FIELDS = tl.constexpr(_FIELDS)
# Below every score, and in its place where nothing was seen. -inf would make NaN of the difference of two of them.
NOTHING = tl.constexpr(-1.0e30)
# What is subtracted instead: a row that saw nothing so far gets weights of exp(NOTHING - LEAST) = 0.
LEAST = tl.constexpr(-1.0e29)

_SIZES = ["Hk", "g", "N", "M", "q_offset", "capacity", "tiles", "tasks"]


@triton.jit
def _step(q_tile, k_tile, v_tile, m_i, l_i, acc, scale, hide):
    """Scores of a tile of keys that a query sees as a whole; or not at all, with ``hide`` 1e30 instead of 0."""
    s = tl.dot(q_tile, tl.trans(k_tile)) * scale
    m_new = tl.maximum(m_i, tl.max(s, 1) - hide)
    return _add(s, tl.maximum(m_new, LEAST) + hide, v_tile, m_i, m_new, l_i, acc)


@triton.jit
def _masked_step(q_tile, k_tile, v_tile, m_i, l_i, acc, scale, seen):
    """The same where a query sees some of the keys."""
    s = tl.dot(q_tile, tl.trans(k_tile)) * scale
    s = tl.where(seen[None, :], s, NOTHING)
    m_new = tl.maximum(m_i, tl.max(s, 1))
    return _add(s, tl.maximum(m_new, LEAST), v_tile, m_i, m_new, l_i, acc)


@triton.jit
def _add(s, shift, v_tile, m_i, m_new, l_i, acc):
    p = tl.exp(s - shift[:, None])
    alpha = tl.exp(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    return m_new, l_i, tl.dot(p.to(v_tile.dtype), v_tile, acc)


@triton.jit
def _load_rows(base, stride, rows, features, n, width, PADDED: tl.constexpr):
    """Rows of which the first n are there, zero behind; features, zero from ``width`` on."""
    pointers = base + rows[:, None] * stride + features[None, :]
    if PADDED:
        return tl.load(pointers, (rows < n)[:, None] & (features < width)[None, :], other=0.0)
    else:
        return tl.load(pointers, (rows < n)[:, None], other=0.0)


@triton.jit
def _load_whole(base, stride, rows, features, width, PADDED: tl.constexpr):
    """The same where all rows are there: without a mask over rows, a tile is not zeroed before it is loaded."""
    pointers = base + rows[:, None] * stride + features[None, :]
    if PADDED:
        return tl.load(pointers, (features < width)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store(out, lse, m_i, l_i, acc, row, N, heads, n, features, DV: tl.constexpr, LSE: tl.constexpr):
    """The first n heads of one query. A row that saw nothing has l_i = 0, and is 0; NaN stays NaN."""
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    o = out + row * DV + heads[:, None] * (N * DV) + features[None, :]
    tl.store(o, acc.to(out.dtype.element_ty), (heads < n)[:, None] & (features < DV)[None, :])
    if LSE:
        tl.store(lse + row + heads * N, tl.where(l_i == 0.0, float("-inf"), m_i + tl.log(l_i)), heads < n)


@triton.jit
def _bit(mask, t):
    return (mask >> t) & 1


@triton.jit(do_not_specialize=_SIZES)
def attention_kernel(
    q, k, v, out, lse, blocks, masks, fields, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, block_size,
    Hk, g, N, M, q_offset, capacity, tiles, tasks,
    D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
    HEADS: tl.constexpr, T: tl.constexpr, BN: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Tasks are (tile of T queries; HEADS heads; b, hk), dealt out to the programs one by one. T is 1, 2 or 4.

    Each query of a tile has its own scores and sums, HEADS rows of them, which is what a cube core multiplies at once;
    a tile of k and v is loaded once for all of them. With T = 2 the lists tell apart what only one query selected, and
    nothing is computed in vain; with T = 4 all four take every block, and weights are 0 where one did not select it.
    """
    heads = tl.arange(0, HEADS)
    features = tl.arange(0, D_PADDED)
    part = tl.arange(0, DV_PADDED)
    keys = tl.arange(0, BN)
    per_block = tl.cdiv(block_size, BN)
    chunks = tl.cdiv(g, HEADS)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        tile = task % tiles
        chunk = task // tiles % chunks
        bh = task // tiles // chunks
        b = (bh // Hk).to(tl.int64)
        hk = (bh % Hk).to(tl.int64)
        head = hk * g + chunk * HEADS
        n_heads = g - chunk * HEADS
        i = tile * T
        list_row = bh.to(tl.int64) * tiles + tile
        fields_row = fields + list_row * FIELDS
        together = tl.load(fields_row)
        first_only = tl.load(fields_row + 1)
        second_only = tl.load(fields_row + 2)
        end = tl.load(fields_row + 3)
        sees = tl.load(fields_row + 4)  # bit t: query t sees a key. One that sees none may hold anything: read as 0
        q_row = q + b * q_b + head * q_h + i.to(tl.int64) * q_n
        k_rows = k + b * k_b + hk * k_h
        v_rows = v + b * v_b + hk * v_h
        ids = blocks + list_row * capacity
        selected = masks + list_row * capacity

        q0 = _load_rows(q_row, q_h, heads, features, n_heads * _bit(sees, 0), D, D_PADDED > D)
        m0 = tl.full([HEADS], NOTHING, tl.float32)
        l0 = tl.zeros([HEADS], tl.float32)
        acc0 = tl.zeros([HEADS, DV_PADDED], tl.float32)
        q1, m1, l1, acc1 = q0, m0, l0, acc0
        q2, m2, l2, acc2 = q0, m0, l0, acc0
        q3, m3, l3, acc3 = q0, m0, l0, acc0
        if T >= 2:
            q1 = _load_rows(q_row + q_n, q_h, heads, features, n_heads * _bit(sees, 1), D, D_PADDED > D)
        if T == 4:
            q2 = _load_rows(q_row + 2 * q_n, q_h, heads, features, n_heads * _bit(sees, 2), D, D_PADDED > D)
            q3 = _load_rows(q_row + 3 * q_n, q_h, heads, features, n_heads * _bit(sees, 3), D, D_PADDED > D)

        # Blocks of which every key is seen.
        for e in range(0, together * per_block):
            first = (tl.load(ids + e // per_block) * block_size + e % per_block * BN).to(tl.int64)
            k_tile = _load_whole(k_rows + first * k_n, k_n, keys, features, D, D_PADDED > D)
            v_tile = _load_whole(v_rows + first * v_n, v_n, keys, part, DV, DV_PADDED > DV)
            if T < 4:
                m0, l0, acc0 = _step(q0, k_tile, v_tile, m0, l0, acc0, scale, 0.0)
                if T == 2:
                    m1, l1, acc1 = _step(q1, k_tile, v_tile, m1, l1, acc1, scale, 0.0)
            else:
                mask = tl.load(selected + e // per_block)
                m0, l0, acc0 = _step(q0, k_tile, v_tile, m0, l0, acc0, scale, (1 - _bit(mask, 0)) * 1.0e30)
                m1, l1, acc1 = _step(q1, k_tile, v_tile, m1, l1, acc1, scale, (1 - _bit(mask, 1)) * 1.0e30)
                m2, l2, acc2 = _step(q2, k_tile, v_tile, m2, l2, acc2, scale, (1 - _bit(mask, 2)) * 1.0e30)
                m3, l3, acc3 = _step(q3, k_tile, v_tile, m3, l3, acc3, scale, (1 - _bit(mask, 3)) * 1.0e30)
        if T == 2:
            for e in range(together * per_block, first_only * per_block):
                first = (tl.load(ids + e // per_block) * block_size + e % per_block * BN).to(tl.int64)
                k_tile = _load_whole(k_rows + first * k_n, k_n, keys, features, D, D_PADDED > D)
                v_tile = _load_whole(v_rows + first * v_n, v_n, keys, part, DV, DV_PADDED > DV)
                m0, l0, acc0 = _step(q0, k_tile, v_tile, m0, l0, acc0, scale, 0.0)
            for e in range(first_only * per_block, second_only * per_block):
                first = (tl.load(ids + e // per_block) * block_size + e % per_block * BN).to(tl.int64)
                k_tile = _load_whole(k_rows + first * k_n, k_n, keys, features, D, D_PADDED > D)
                v_tile = _load_whole(v_rows + first * v_n, v_n, keys, part, DV, DV_PADDED > DV)
                m1, l1, acc1 = _step(q1, k_tile, v_tile, m1, l1, acc1, scale, 0.0)
        # Blocks of which some key is hidden from some query, or that do not end with a tile of BN keys.
        for e in range(second_only * per_block, end * per_block):
            block = tl.load(ids + e // per_block)
            mask = tl.load(selected + e // per_block)
            first = block * block_size + e % per_block * BN
            stop = tl.minimum(block * block_size + block_size, M) - first
            seen = i + q_offset + 1 - first  # keys of this tile, for query 0
            n0 = tl.minimum(stop, seen) * _bit(mask, 0)
            n1 = tl.minimum(stop, seen + 1) * _bit(mask, 1)
            n2 = tl.minimum(stop, seen + 2) * _bit(mask, 2)
            n3 = tl.minimum(stop, seen + 3) * _bit(mask, 3)
            n = n0  # what lies behind the last key seen may be NaN: it is not loaded
            if T >= 2:
                n = tl.maximum(n, n1)
            if T == 4:
                n = tl.maximum(n, tl.maximum(n2, n3))
            first_64 = first.to(tl.int64)
            k_tile = _load_rows(k_rows + first_64 * k_n, k_n, keys, features, n, D, D_PADDED > D)
            v_tile = _load_rows(v_rows + first_64 * v_n, v_n, keys, part, n, DV, DV_PADDED > DV)
            m0, l0, acc0 = _masked_step(q0, k_tile, v_tile, m0, l0, acc0, scale, keys < n0)
            if T >= 2:
                m1, l1, acc1 = _masked_step(q1, k_tile, v_tile, m1, l1, acc1, scale, keys < n1)
            if T == 4:
                m2, l2, acc2 = _masked_step(q2, k_tile, v_tile, m2, l2, acc2, scale, keys < n2)
                m3, l3, acc3 = _masked_step(q3, k_tile, v_tile, m3, l3, acc3, scale, keys < n3)

        row = (b * Hk * g + head) * N + i
        _store(out, lse, m0, l0, acc0, row, N, heads, n_heads, part, DV, LSE)
        if T >= 2:
            n = tl.where(i + 1 < N, n_heads, 0)
            _store(out, lse, m1, l1, acc1, row + 1, N, heads, n, part, DV, LSE)
        if T == 4:
            n = tl.where(i + 2 < N, n_heads, 0)
            _store(out, lse, m2, l2, acc2, row + 2, N, heads, n, part, DV, LSE)
            n = tl.where(i + 3 < N, n_heads, 0)
            _store(out, lse, m3, l3, acc3, row + 3, N, heads, n, part, DV, LSE)
