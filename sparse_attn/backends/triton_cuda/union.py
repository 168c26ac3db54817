"""The union kernels: a tile of adjacent queries walks the union of their blocks once.

The g heads of T adjacent queries are the rows of one tile, so that a block of keys is read once for all of them; a row
that did not select it gets weights of 0. Against reading each query's own blocks, traffic falls by up to T and
arithmetic grows by how much larger the union is than one query's selection (docs/performance.md has figures).

Two forms. ``union_kernel`` is one tile. ``halved_union_kernel`` is two tiles of half the queries that share what they
load: blocks that both need feed both, and those that one half needs are left out by the other, so that it does the
arithmetic of the smaller tile at the traffic of the larger.
"""

import triton
import triton.language as tl

from .block_lists import FIELDS
from .tiles import finish, load_queries, load_tile, load_whole_tile, natural_lse, softmax_step

# Lengths, offsets and the like are not worth a kernel of their own for every 1 or multiple of 16.
_PLAIN = ["Hk", "g", "N", "M", "q_offset", "capacity"]


@triton.jit
def _entry(entries, t, per_block, block_size, BN: tl.constexpr):
    """The t-th tile of BN keys of a list: mask of queries, its first key, and the end of its block."""
    entry = tl.load(entries + t // per_block)
    first = (entry >> 32).to(tl.int32) * block_size
    return entry.to(tl.int32), first + t % per_block * BN, first + block_size


@triton.jit
def _queries_until_last(mask, T: tl.constexpr):
    """One more than the place of the highest bit that is set."""
    n = 0
    for t in tl.static_range(T):
        n = tl.where((mask >> t) & 1 != 0, t + 1, n)
    return n


@triton.jit
def _query_tile(q_tma, b, head, i):
    """Rows head-major. Where a group has fewer heads than the tile, the next group's: their results are not stored."""
    tile = q_tma.load([b.to(tl.int32), head.to(tl.int32), i, 0])
    return tl.reshape(tile, [tile.shape[1] * tile.shape[2], tile.shape[3]])


@triton.jit(do_not_specialize=_PLAIN)
def union_kernel(
    q, k, v, q_tma, k_tma, v_tma, out, lse, entries, fields, c,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, block_size,
    Hk, g, N, M, q_offset, capacity,
    D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PART: tl.constexpr, PARTS: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr, BN: tl.constexpr, BN_MASKED: tl.constexpr, SUBTILES: tl.constexpr,
    EVEN: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, TMA: tl.constexpr, NEGATIVE: tl.constexpr,
    LSE: tl.constexpr, ROUTED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each (tile of T queries; b, hk, R // T heads). Rows are head-major: row r is query r % T.

    v and the sums have PARTS parts of DV_PART features: on mma.sync, Triton gives each warp whole rows (reductions
    within a warp, no exchange of p) only where a product has at least as many rows as columns.
    """
    tiles = tl.cdiv(N, T)
    tile = tiles - 1 - tl.program_id(0)  # the longest first
    HEADS: tl.constexpr = R // T
    chunks = tl.cdiv(g, HEADS)
    bh = (tl.program_id(1) // chunks).to(tl.int64)
    chunk = tl.program_id(1) % chunks
    b, hk = bh // Hk, bh % Hk
    row = bh * tiles + tile
    fields += row * FIELDS
    if ROUTED:
        if tl.load(fields + 4) != 0:
            return
    entries += row * capacity

    rows = tl.arange(0, R)
    t_q = rows % T
    head = chunk * HEADS + rows // T
    i = tile * T + t_q
    # A query that sees nothing may hold anything. Read as 0, it makes no NaN in blocks that others selected.
    sees = (tl.load(fields + 6) >> t_q) & 1 != 0
    position = i + q_offset
    features = tl.arange(0, D_PADDED)
    part = tl.arange(0, DV_PART)
    keys = tl.arange(0, BN)
    per_block = SUBTILES if SUBTILES > 0 else tl.cdiv(block_size, BN)
    if TMA:
        q_tile = _query_tile(q_tma, b, hk * g + chunk * HEADS, tile * T)
        q_tile = tl.where(sees[:, None], q_tile, 0.0)
    else:
        q_rows = b * q_b + (hk * g + head) * q_h + i.to(tl.int64) * q_n
        q_tile = load_queries(q, q_rows, features, q_d, sees & (head < g), D, NEGATIVE)
    k += b * k_b + hk * k_h
    v += b * v_b + hk * v_h

    m_i = tl.full([R], float("-inf"), tl.float32)
    l_i = tl.zeros([R], tl.float32)
    acc0 = tl.zeros([R, DV_PART], tl.float32)
    acc1 = acc0
    inner = tl.load(fields + 2)
    # Blocks in which single keys are hidden. What lies behind the last key that a query sees may never have been
    # written, and its values must not be loaded, since 0 times NaN is NaN. No branch around these products: with one,
    # ptxas makes every wgmma of the kernel wait for the one before.
    end = tl.minimum(tl.minimum(tile * T + T, N) + q_offset, M)
    few = tl.arange(0, BN_MASKED)
    per_masked = tl.cdiv(block_size, BN_MASKED)
    for t in tl.range(inner * per_masked, tl.load(fields + 3) * per_masked, num_stages=1):
        mask, first, stop = _entry(entries, t, per_masked, block_size, BN_MASKED)
        stop = tl.minimum(stop, end)
        stop_v = tl.minimum(stop, tile * T + _queries_until_last(mask, T) + q_offset)
        k_tile = load_tile(k, first, few, features, k_n, k_d, stop, D, K_ROW, True, D_PADDED > D)
        j = first + few
        seen = ((mask >> t_q) & 1 != 0)[:, None] & (j[None, :] <= position[:, None]) & (j < stop)[None, :]
        s = tl.where(seen, tl.dot(q_tile, k_tile.T, input_precision="ieee"), float("-inf"))
        p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, True, c)
        p = p.to(v.dtype.element_ty)
        v0 = load_tile(v, first, few, part, v_n, v_d, stop_v, DV, V_ROW, True, DV_PART > DV)
        acc0 = tl.dot(p, v0, acc0 * alpha[:, None], input_precision="ieee")
        if PARTS == 2:
            v1 = load_tile(v, first, few, DV_PART + part, v_n, v_d, stop_v, DV, V_ROW, True, 2 * DV_PART > DV)
            acc1 = tl.dot(p, v1, acc1 * alpha[:, None], input_precision="ieee")
    for t in tl.range(0, inner * per_block, num_stages=STAGES):
        mask, first, stop = _entry(entries, t, per_block, block_size, BN)
        k_tile = load_whole_tile(
            k_tma, b, hk, k, first, keys, features, k_n, k_d, stop, D, K_ROW, not EVEN, D_PADDED > D, TMA,
        )  # fmt: skip
        v0 = load_whole_tile(
            v_tma, b, hk, v, first, keys, part, v_n, v_d, stop, DV, V_ROW, not EVEN, DV_PART > DV, TMA,
        )  # fmt: skip
        if PARTS == 2:
            v1 = load_whole_tile(
                v_tma, b, hk, v, first, keys, DV_PART + part, v_n, v_d, stop, DV, V_ROW, not EVEN, 2 * DV_PART > DV,
                TMA,
            )  # fmt: skip
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        if not EVEN:
            s = tl.where((first + keys < stop)[None, :], s, float("-inf"))
        p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, (mask >> t_q) & 1 != 0, c)
        p = p.to(v.dtype.element_ty)
        acc0 = tl.dot(p, v0, acc0 * alpha[:, None], input_precision="ieee")
        if PARTS == 2:
            acc1 = tl.dot(p, v1, acc1 * alpha[:, None], input_precision="ieee")

    rows = tl.arange(0, R) + tl.load(fields + 5)
    i = tile * T + rows % T
    head = chunk * HEADS + rows // T
    there = (i < N) & (head < g)
    o_row = (bh * g + head) * N + i
    o = out + o_row[:, None] * DV + part[None, :]
    tl.store(o, finish(acc0, l_i).to(out.dtype.element_ty), there[:, None] & (part < DV)[None, :])
    if PARTS == 2:
        o1 = finish(acc1, l_i).to(out.dtype.element_ty)
        tl.store(o + DV_PART, o1, there[:, None] & (DV_PART + part < DV)[None, :])
    if LSE:
        tl.store(lse + o_row, natural_lse(m_i, l_i, c), there)


@triton.jit
def _half_step(s, acc, m_i, l_i, v_tile, mask, bit, c):
    p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, mask & bit != 0, c)
    return tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee"), m_i, l_i


@triton.jit
def _store_half(
    out, lse, acc, m_i, l_i, first_query, zero, bh, Hk, g, N, c,
    R: tl.constexpr, HALF: tl.constexpr, DV: tl.constexpr, DV_PADDED: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, R) + zero
    i = first_query + rows % HALF
    head = rows // HALF
    there = (i < N) & (head < g)
    o_row = (bh * g + head) * N + i
    part = tl.arange(0, DV_PADDED)
    o = finish(acc, l_i).to(out.dtype.element_ty)
    tl.store(out + o_row[:, None] * DV + part[None, :], o, there[:, None] & (part < DV)[None, :])
    if LSE:
        tl.store(lse + o_row, natural_lse(m_i, l_i, c), there)


@triton.jit(do_not_specialize=_PLAIN)
def halved_union_kernel(
    q, k, v, k_tma, v_tma, out, lse, entries, fields, c,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, block_size,
    Hk, g, N, M, q_offset, capacity,
    D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PART: tl.constexpr, PARTS: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr, BN: tl.constexpr, BN_MASKED: tl.constexpr, SUBTILES: tl.constexpr,
    EVEN: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, TMA: tl.constexpr, NEGATIVE: tl.constexpr,
    LSE: tl.constexpr, ROUTED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each (tile of T queries; b, hk).

    Two halves of R rows each, of T // 2 queries; the lists tell them apart. While one half's softmax runs, the other's
    product does: Triton issues wgmma asynchronously, in program order.
    """
    tl.static_assert(PARTS == 1)
    HALF: tl.constexpr = T // 2
    tiles = tl.cdiv(N, T)
    tile = tiles - 1 - tl.program_id(0)  # the longest first
    bh = tl.program_id(1).to(tl.int64)
    b, hk = bh // Hk, bh % Hk
    b_32, hk_32 = tl.program_id(1) // Hk, tl.program_id(1) % Hk
    row = bh * tiles + tile
    fields += row * FIELDS
    if ROUTED:
        if tl.load(fields + 4) != 0:
            return
    entries += row * capacity

    rows = tl.arange(0, R)
    t_q = rows % HALF
    bit = 1 << t_q
    head = rows // HALF
    i = tile * T + t_q
    features = tl.arange(0, D_PADDED)
    part = tl.arange(0, DV_PART)
    keys = tl.arange(0, BN)
    per_block = SUBTILES if SUBTILES > 0 else tl.cdiv(block_size, BN)
    # A query that sees nothing may hold anything. Read as 0, it makes no NaN in blocks that others selected.
    sees = tl.load(fields + 6)
    # By pointers: what comes from a descriptor, Triton would keep in registers, and there are none left.
    q += b * q_b + hk * g * q_h
    q_rows = head.to(tl.int64) * q_h + i.to(tl.int64) * q_n
    q0 = load_queries(q, q_rows, features, q_d, (sees & bit != 0) & (head < g), D, NEGATIVE)
    q_rows = head.to(tl.int64) * q_h + (i + HALF).to(tl.int64) * q_n
    q1 = load_queries(q, q_rows, features, q_d, ((sees >> HALF) & bit != 0) & (head < g), D, NEGATIVE)
    k += b * k_b + hk * k_h
    v += b * v_b + hk * v_h

    m0 = tl.full([R], float("-inf"), tl.float32)
    l0 = tl.zeros([R], tl.float32)
    acc0 = tl.zeros([R, DV_PART], tl.float32)
    m1, l1, acc1 = m0, l0, acc0
    both = tl.load(fields) * per_block
    first_only = tl.load(fields + 1) * per_block
    second_only = tl.load(fields + 2)
    # Blocks in which single keys are hidden. What lies behind the last key that a query sees may never have been
    # written, and its values must not be loaded, since 0 times NaN is NaN. No branch around these products: with one,
    # ptxas makes every wgmma of the kernel wait for the one before.
    end = tl.minimum(tl.minimum(tile * T + T, N) + q_offset, M)
    few = tl.arange(0, BN_MASKED)
    per_masked = tl.cdiv(block_size, BN_MASKED)
    for t in tl.range(second_only * per_masked, tl.load(fields + 3) * per_masked, num_stages=1):
        mask, first, stop = _entry(entries, t, per_masked, block_size, BN_MASKED)
        stop = tl.minimum(stop, end)
        stop_v = tl.minimum(stop, tile * T + _queries_until_last(mask, T) + q_offset)
        k_tile = load_tile(k, first, few, features, k_n, k_d, stop, D, K_ROW, True, D_PADDED > D)
        j = tl.where(first + few < stop, first + few, 2147483647)[None, :]
        seen = (mask & bit != 0)[:, None] & (j <= (i + q_offset)[:, None])
        s0 = tl.where(seen, tl.dot(q0, k_tile.T, input_precision="ieee"), float("-inf"))
        p0, alpha0, m0, l0 = softmax_step(s0, m0, l0, True, c)
        p0 = p0.to(v.dtype.element_ty)
        seen = ((mask >> HALF) & bit != 0)[:, None] & (j <= (i + HALF + q_offset)[:, None])
        s1 = tl.where(seen, tl.dot(q1, k_tile.T, input_precision="ieee"), float("-inf"))
        p1, alpha1, m1, l1 = softmax_step(s1, m1, l1, True, c)
        p1 = p1.to(v.dtype.element_ty)
        # Loaded only now, through registers: k is out of them.
        v_tile = load_tile(v, first, few, part, v_n, v_d, stop_v, DV, V_ROW, True, DV_PART > DV)
        acc0 = tl.dot(p0, v_tile, acc0 * alpha0[:, None], input_precision="ieee")
        acc1 = tl.dot(p1, v_tile, acc1 * alpha1[:, None], input_precision="ieee")
    for t in tl.range(0, both, num_stages=STAGES):
        mask, first, stop = _entry(entries, t, per_block, block_size, BN)
        k_tile = load_whole_tile(
            k_tma, b_32, hk_32, k, first, keys, features, k_n, k_d, stop, D, K_ROW, not EVEN, D_PADDED > D, TMA,
        )  # fmt: skip
        v_tile = load_whole_tile(
            v_tma, b_32, hk_32, v, first, keys, part, v_n, v_d, stop, DV, V_ROW, not EVEN, DV_PART > DV, TMA,
        )  # fmt: skip
        s0 = tl.dot(q0, k_tile.T, input_precision="ieee")
        if not EVEN:
            s0 = tl.where((first + keys < stop)[None, :], s0, float("-inf"))
        p0, alpha0, m0, l0 = softmax_step(s0, m0, l0, mask & bit != 0, c)
        p0 = p0.to(v_tile.dtype)
        acc0 = acc0 * alpha0[:, None]
        s1 = tl.dot(q1, k_tile.T, input_precision="ieee")
        acc0 = tl.dot(p0, v_tile, acc0, input_precision="ieee")
        if not EVEN:
            s1 = tl.where((first + keys < stop)[None, :], s1, float("-inf"))
        p1, alpha1, m1, l1 = softmax_step(s1, m1, l1, (mask >> HALF) & bit != 0, c)
        acc1 = tl.dot(p1.to(v_tile.dtype), v_tile, acc1 * alpha1[:, None], input_precision="ieee")
    for t in tl.range(both, first_only, num_stages=STAGES):
        mask, first, stop = _entry(entries, t, per_block, block_size, BN)
        k_tile = load_whole_tile(
            k_tma, b_32, hk_32, k, first, keys, features, k_n, k_d, stop, D, K_ROW, not EVEN, D_PADDED > D, TMA,
        )  # fmt: skip
        v_tile = load_whole_tile(
            v_tma, b_32, hk_32, v, first, keys, part, v_n, v_d, stop, DV, V_ROW, not EVEN, DV_PART > DV, TMA,
        )  # fmt: skip
        s0 = tl.dot(q0, k_tile.T, input_precision="ieee")
        if not EVEN:
            s0 = tl.where((first + keys < stop)[None, :], s0, float("-inf"))
        acc0, m0, l0 = _half_step(s0, acc0, m0, l0, v_tile, mask, bit, c)
    # Stored before the last loop, which has its registers to itself then.
    zero = tl.load(fields + 5)
    _store_half(out, lse, acc0, m0, l0, tile * T, zero, bh, Hk, g, N, c, R, HALF, DV, DV_PART, LSE)
    for t in tl.range(first_only, second_only * per_block, num_stages=STAGES):
        mask, first, stop = _entry(entries, t, per_block, block_size, BN)
        k_tile = load_whole_tile(
            k_tma, b_32, hk_32, k, first, keys, features, k_n, k_d, stop, D, K_ROW, not EVEN, D_PADDED > D, TMA,
        )  # fmt: skip
        v_tile = load_whole_tile(
            v_tma, b_32, hk_32, v, first, keys, part, v_n, v_d, stop, DV, V_ROW, not EVEN, DV_PART > DV, TMA,
        )  # fmt: skip
        s1 = tl.dot(q1, k_tile.T, input_precision="ieee")
        if not EVEN:
            s1 = tl.where((first + keys < stop)[None, :], s1, float("-inf"))
        acc1, m1, l1 = _half_step(s1, acc1, m1, l1, v_tile, mask >> HALF, bit, c)
    _store_half(out, lse, acc1, m1, l1, tile * T + HALF, zero, bh, Hk, g, N, c, R, HALF, DV, DV_PART, LSE)
