"""The gather kernel: every query walks its own blocks, alone or cut into parts that are merged afterwards.

Right where neighbouring queries share few blocks, so that a union would be much larger than one selection, and where
there are few queries at all: decoding, with the blocks of one query spread over several programs to fill the device. It
needs no lists (with both kernels in a plan, it reads there which queries are its own): a program reads the ids of its
query, and counts each once.
"""

import triton
import triton.language as tl

from .block_lists import FIELDS
from .tiles import finish, load_queries, load_tile, load_whole_tile, natural_lse, softmax_step


@triton.jit
def _chosen(ids_of_row, start, i_position, num_blocks, block_size, topk, stride_t, IDS: tl.constexpr):
    """Ids ``start`` to ``start + IDS`` of a row, and which of them count: real blocks with a seen key, once each."""
    slots = start + tl.arange(0, IDS)
    ids = tl.load(ids_of_row + slots.to(tl.int64) * stride_t, slots < topk, other=-1)
    counts = (ids >= 0) & (ids < num_blocks)
    ids = tl.where(counts, ids, 0).to(tl.int32)
    counts &= ids * block_size <= i_position
    ids = tl.where(counts, ids, -1)
    earlier = tl.arange(0, IDS)[None, :] < tl.arange(0, IDS)[:, None]
    counts &= tl.sum(((ids[:, None] == ids[None, :]) & earlier).to(tl.int32), 1) == 0
    for before in range(0, start, IDS):
        slots = before + tl.arange(0, IDS)
        others = tl.load(ids_of_row + slots.to(tl.int64) * stride_t)
        counts &= tl.sum((ids[:, None] == others[None, :]).to(tl.int32), 1) == 0
    return ids, counts


@triton.jit
def _id_at(ids, counts, place, n):
    """The n-th of the ids that count, by their places."""
    return tl.sum(tl.where(counts & (place == n), ids, 0))


@triton.jit(do_not_specialize=["i_b", "i_h", "i_n", "i_t", "Hk", "g", "N", "M", "topk", "q_offset", "tiles"])
def gather_kernel(
    q, k, v, k_tma, v_tma, index, out, lse, fields, c,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, block_size,
    i_b, i_h, i_n, i_t, Hk, g, N, M, topk, q_offset, tiles,
    D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, R: tl.constexpr,
    BN: tl.constexpr, BN_MASKED: tl.constexpr, SUBTILES: tl.constexpr, EVEN: tl.constexpr, IDS: tl.constexpr,
    T: tl.constexpr, SPLITS: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, TMA: tl.constexpr,
    NEGATIVE: tl.constexpr, LSE: tl.constexpr, ROUTED: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each (query and part of its blocks; b, hk, R heads).

    With SPLITS > 1, ``out`` is fp32 ``[SPLITS, B, Hq, N, Dv]`` and ``lse`` ``[SPLITS, B, Hq, N]``: one result for
    each part, for ``merge_kernel``. With ROUTED, only queries of tiles (of T) with route 1 run.
    """
    i = N - 1 - tl.program_id(0) // SPLITS  # the longest first
    split = tl.program_id(0) % SPLITS
    chunks = tl.cdiv(g, R)
    bh = (tl.program_id(1) // chunks).to(tl.int64)
    chunk = tl.program_id(1) % chunks
    b, hk = bh // Hk, bh % Hk
    if ROUTED:
        if tl.load(fields + (bh * tiles + i // T) * FIELDS + 4) == 0:
            return
    head = chunk * R + tl.arange(0, R)
    there = head < g
    head = hk * g + head
    features = tl.arange(0, D_PADDED)
    part = tl.arange(0, DV_PADDED)
    keys = tl.arange(0, BN)
    i_64 = i.to(tl.int64)
    q_tile = load_queries(q, b * q_b + head * q_h + i_64 * q_n, features, q_d, there, D, NEGATIVE)
    k += b * k_b + hk * k_h
    v += b * v_b + hk * v_h
    index += b * i_b + hk * i_h + i_64 * i_n

    position = i + q_offset
    end = tl.minimum(position + 1, M)  # the first key that is not seen
    num_blocks = tl.cdiv(M, block_size)
    per_block = SUBTILES if SUBTILES > 0 else tl.cdiv(block_size, BN)
    few = tl.arange(0, BN_MASKED)
    per_masked = tl.cdiv(block_size, BN_MASKED)
    m_i = tl.full([R], float("-inf"), tl.float32)
    l_i = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, DV_PADDED], tl.float32)
    for start in tl.range(0, topk, IDS, num_stages=1):
        ids, counts = _chosen(index, start, position, num_blocks, block_size, topk, i_t, IDS)
        # Whole blocks first, without masks; then those that end behind the last key seen.
        whole = counts & (ids < end // block_size)
        n_whole = tl.sum(whole.to(tl.int32))
        rest = counts & ~whole
        n_all = n_whole + tl.sum(rest.to(tl.int32))
        place = tl.where(whole, tl.cumsum(whole.to(tl.int32), 0), n_whole + tl.cumsum(rest.to(tl.int32), 0)) - 1
        # The part of this program: whole blocks by tiles, the others, one or two, to the last part.
        n_tiles = n_whole * per_block
        lo = n_tiles * split // SPLITS
        hi = n_tiles * (split + 1) // SPLITS
        if PAIRS:
            # Two tiles at a time: half the reductions, one after the other, that a program of few queries waits for.
            for n in tl.range(lo, hi, 2, num_stages=STAGES):
                block = _id_at(ids, counts, place, n // per_block)
                first = block * block_size + n % per_block * BN
                stop = (block + 1) * block_size
                k0 = load_whole_tile(
                    k_tma, b, hk, k, first, keys, features, k_n, k_d, stop, D, K_ROW, not EVEN, D_PADDED > D, TMA,
                )  # fmt: skip
                v0 = load_whole_tile(
                    v_tma, b, hk, v, first, keys, part, v_n, v_d, stop, DV, V_ROW, not EVEN, DV_PADDED > DV, TMA,
                )  # fmt: skip
                next_n = tl.minimum(n + 1, hi - 1)
                next_block = _id_at(ids, counts, place, next_n // per_block)
                next_first = next_block * block_size + next_n % per_block * BN
                next_stop = (next_block + 1) * block_size
                k1 = load_whole_tile(
                    k_tma, b, hk, k, next_first, keys, features, k_n, k_d, next_stop, D, K_ROW, not EVEN, D_PADDED > D,
                    TMA,
                )  # fmt: skip
                v1 = load_whole_tile(
                    v_tma, b, hk, v, next_first, keys, part, v_n, v_d, next_stop, DV, V_ROW, not EVEN, DV_PADDED > DV,
                    TMA,
                )  # fmt: skip
                s0 = tl.dot(q_tile, k0.T, input_precision="ieee")
                s1 = tl.dot(q_tile, k1.T, input_precision="ieee")
                if not EVEN:
                    s0 = tl.where((first + keys < stop)[None, :], s0, float("-inf"))
                there1 = (n + 1 < hi) & (next_first + keys < next_stop)
                s1 = tl.where(there1[None, :], s1, float("-inf"))
                m_new = tl.maximum(m_i, tl.max(tl.maximum(s0, s1), 1))
                shift = tl.where(m_new == float("-inf"), 0.0, m_new) * c
                alpha = tl.exp2(m_i * c - shift)
                p0 = tl.exp2(s0 * c - shift[:, None])
                p1 = tl.exp2(s1 * c - shift[:, None])
                m_i = m_new
                l_i = l_i * alpha + tl.sum(p0 + p1, 1)
                acc = tl.dot(p0.to(v0.dtype), v0, acc * alpha[:, None], input_precision="ieee")
                acc = tl.dot(p1.to(v1.dtype), v1, acc, input_precision="ieee")
        else:
            for n in tl.range(lo, hi, num_stages=STAGES):
                block = _id_at(ids, counts, place, n // per_block)
                first = block * block_size + n % per_block * BN
                stop = (block + 1) * block_size
                k_tile = load_whole_tile(
                    k_tma, b, hk, k, first, keys, features, k_n, k_d, stop, D, K_ROW, not EVEN, D_PADDED > D, TMA,
                )  # fmt: skip
                v_tile = load_whole_tile(
                    v_tma, b, hk, v, first, keys, part, v_n, v_d, stop, DV, V_ROW, not EVEN, DV_PADDED > DV, TMA,
                )  # fmt: skip
                s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
                if not EVEN:
                    s = tl.where((first + keys < stop)[None, :], s, float("-inf"))
                p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, True, c)
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
        n_masked = tl.where(split == SPLITS - 1, n_all - n_whole, 0)
        for n in tl.range((n_all - n_masked) * per_masked, n_all * per_masked, num_stages=1):
            block = _id_at(ids, counts, place, n // per_masked)
            first = block * block_size + n % per_masked * BN_MASKED
            stop = tl.minimum((block + 1) * block_size, end)
            if first < stop:
                k_tile = load_tile(k, first, few, features, k_n, k_d, stop, D, K_ROW, True, D_PADDED > D)
                s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
                s = tl.where((first + few < stop)[None, :], s, float("-inf"))
                p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, True, c)
                v_tile = load_tile(v, first, few, part, v_n, v_d, stop, DV, V_ROW, True, DV_PADDED > DV)
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")

    o_row = (b * Hk * g + head) * N + i
    if SPLITS > 1:
        o_row += split * (tl.num_programs(1) // chunks).to(tl.int64) * g * N
    o = out + o_row[:, None] * DV + part[None, :]
    tl.store(o, finish(acc, l_i).to(out.dtype.element_ty), there[:, None] & (part < DV)[None, :])
    if LSE:
        tl.store(lse + o_row, natural_lse(m_i, l_i, c), there)


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    parts, part_lse, out, lse, rows,
    DV: tl.constexpr, DV_PADDED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Results of disjoint sets of keys to the result of their union, weighted by their softmax denominators."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, DV_PADDED)
    there = row < rows
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for s in tl.static_range(SPLITS):
        top = tl.maximum(top, tl.load(part_lse + s * rows.to(tl.int64) + row, there, other=float("-inf")))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, DV_PADDED], tl.float32)
    for s in tl.static_range(SPLITS):
        place = s * rows.to(tl.int64) + row
        weight = tl.exp(tl.load(part_lse + place, there, other=float("-inf")) - shift)
        total += weight
        o = tl.load(parts + place[:, None] * DV + part[None, :], there[:, None] & (part < DV)[None, :], other=0.0)
        acc += weight[:, None] * o
    total = tl.where(total == 0.0, 1.0, total)  # nothing seen by any part; NaN stays NaN
    o = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * DV + part[None, :], o, there[:, None] & (part < DV)[None, :])
    if LSE:
        tl.store(lse + row, top + tl.log(total), there)
