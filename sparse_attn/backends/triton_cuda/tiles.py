"""What the kernels share: loading a tile of keys or values, one step of the online softmax, the end of a row.

The softmax is the online one of FlashAttention-2 (Dao 2023, algorithm 1), in base 2: ``c = |sm_scale| * log2(e)``, m_i
is the largest score before scaling (-inf: nothing seen yet), l_i the sum of ``exp2(c * (score - m_i))``.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    base, first, rows, features, stride_n, stride_d, stop, width,
    ROW: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_FEATURES: tl.constexpr,
):  # fmt: skip
    """Rows ``first + rows`` of k or v, zero from row ``stop`` and from feature ``width`` on.

    ROW is the row stride where it is a constant of the model and features are adjacent, else 0: with it every address
    is one register plus a constant.
    """
    if ROW > 0:
        pointers = base + first.to(tl.int64) * ROW + (rows[:, None] * ROW + features[None, :])
    else:
        offsets = rows.to(tl.int64)[:, None] * stride_n + features.to(tl.int64)[None, :] * stride_d
        pointers = base + first.to(tl.int64) * stride_n + offsets
    if MASK_ROWS and MASK_FEATURES:
        return tl.load(pointers, ((first + rows) < stop)[:, None] & (features < width)[None, :], other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, ((first + rows) < stop)[:, None], other=0.0)
    elif MASK_FEATURES:
        return tl.load(pointers, (features < width)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_whole_tile(
    descriptor, b, hk, base, first, rows, features, stride_n, stride_d, stop, width,
    ROW: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_FEATURES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The same for a tile of which every row is a key that is seen: on Hopper, one instruction of the copy engine."""
    if TMA:
        tile = descriptor.load([b.to(tl.int32), hk.to(tl.int32), first, 0])
        return tl.reshape(tile, [tile.shape[2], tile.shape[3]])
    else:
        return load_tile(base, first, rows, features, stride_n, stride_d, stop, width, ROW, MASK_ROWS, MASK_FEATURES)


@triton.jit
def load_queries(q, rows, features, stride_d, there, D, NEGATIVE: tl.constexpr):
    """Rows of q by their offsets; negated for a negative sm_scale, so that the largest score has the largest weight."""
    q = tl.load(
        q + rows[:, None] + features.to(tl.int64)[None, :] * stride_d,
        there[:, None] & (features < D)[None, :],
        other=0.0,
    )
    return -q if NEGATIVE else q


@triton.jit
def softmax_step(s, m_i, l_i, selected, c):
    """Scores of one tile of keys to weights, for the rows that selected it: p, the factor on what was summed, m_i, l_i.

    Rows that did not select it get weights of 0 by what is subtracted, not by a mask over all scores.
    """
    m_new = tl.maximum(m_i, tl.where(selected, tl.max(s, 1), float("-inf")))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new) * c
    alpha = tl.exp2(m_i * c - shift)
    p = tl.exp2(s * c - tl.where(selected, shift, float("inf"))[:, None])
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def finish(acc, l_i):
    """Divide by the sum. It is 0 for a row that saw nothing, and then so is the result; NaN stays NaN."""
    return acc * (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]


@triton.jit
def natural_lse(m_i, l_i, c):
    """The natural logarithm of the softmax denominator; -inf, by its terms, for a row that saw nothing."""
    return (m_i * c + tl.log2(l_i)) * 0.6931471805599453
