"""The exact kernel, for Hopper GPUs whose products are slow: a query is multiplied by the blocks that it selected.

The union kernel multiplies 4 queries of 16 heads by every block that any of them selected, since a wgmma has 64 rows.
Here its 64 rows are the keys of a block, and its columns the 16 heads of one query: scores are computed transposed, and
so are sums. A tile of 4 queries shares what is loaded; a block that two of them selected is multiplied twice, one after
the other. Two blocks on a multiprocessor fill each other's waits, which bound it on a GPU with the full rate of
products: docs/performance.md has its times on one, and what they say of an H20.

Maxima are over keys, which lie in all four warps: to find them takes an exchange through shared memory. So weights
refer to maxima of an earlier step as long as they stay below 2**8: their sums say so, and one barrier, which is needed
anyway, tells all warps. In a query's first step they do not.
"""

from types import SimpleNamespace

import tilelang.language as T

from .parts import COLUMNS, FIRST_BARRIER, entry, parts, rings
from .plan import BLOCKS, Tiles

# Heads: the columns of a product.
HEADS = 16
_INF = float("inf")
_COLUMNS_OF_A_THREAD = 4


# How a thread's part of 64 x 16 scores lies, by wgmma: values 0 to 7 are rows r and r + 8, of columns c and c + 1,
# c + 8 and c + 9; r = 16 * warp + lane / 4, c = lane % 4 * 2. Sums of 64 and 128 features have 8 and 16, likewise.
def _place(row, column):
    """The thread that has a score, and the value's number there."""
    return row // 16 * 32 + row % 8 * 4 + column % 8 // 2, column // 8 * 4 + row % 16 // 8 * 2 + column % 2


_SOFTMAX = """
template <bool BF16>
__device__ __forceinline__ void sparse_attn_weights(
    const float* s, unsigned* p, float* sums, float c0, float c1, float c2, float c3, float scale) {
  float w[8];
  #pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = exp2f(s[i] * scale - (i >> 2 ? i & 1 ? c3 : c2 : i & 1 ? c1 : c0));
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p[i]) : "f"(w[2 * i + 1]), "f"(w[2 * i]));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(p[i]) : "f"(w[2 * i + 1]), "f"(w[2 * i]));
  }
  sums[0] = w[0] + w[2], sums[1] = w[1] + w[3], sums[2] = w[4] + w[6], sums[3] = w[5] + w[7];
}

// A barrier of the warpgroup: whether the condition holds for one of its threads.
template <int BARRIER>
__device__ __forceinline__ int sparse_attn_any(int condition) {
  asm volatile(
      "{ .reg .pred p; setp.ne.s32 p, %0, 0; barrier.cta.red.or.pred p, %1, 128, p; selp.s32 %0, 1, 0, p; }"
      : "+r"(condition) : "n"(BARRIER) : "memory");
  return condition;
}

// Weights of the queries that take a step, by ``shift``: their maxima when they were last looked at, times the scale.
// And sums of a thread's weights: whether some thread's have outgrown 2**8. Then maxima are to be looked at.
template <bool BF16, int BARRIER>
__device__ __forceinline__ int sparse_attn_weigh(
    const float* s0, const float* s1, const float* s2, const float* s3, void* p0, void* p1, void* p2, void* p3,
    float* sums, const float* shift, int taken, float scale) {
  const float* const s[4] = {s0, s1, s2, s3};
  void* const p[4] = {p0, p1, p2, p3};
  float total = 0.f;
  #pragma unroll
  for (int q = 0; q < 4; ++q) {
    float* const t = sums + 4 * q;
    const float* const c = shift + 4 * q;
    if (taken >> q & 1) {
      sparse_attn_weights<BF16>(s[q], static_cast<unsigned*>(p[q]), t, c[0], c[1], c[2], c[3], scale);
      total += (t[0] + t[1]) + (t[2] + t[3]);
    } else {
      t[0] = t[1] = t[2] = t[3] = 0.f;
    }
  }
  return sparse_attn_any<BARRIER>(!(total <= 256.f));  // so said that it is true of NaN: a hidden key less -inf
}

// Of a query, keys from ``key + query + 1`` on are hidden, of all from ``left + 1`` on.
__device__ __forceinline__ void sparse_attn_hide(float* s0, float* s1, float* s2, float* s3, int key, int left) {
  float* const s[4] = {s0, s1, s2, s3};
  const int row = (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 31) / 4;
  #pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int limit = min(key + q, left) - row;
    #pragma unroll
    for (int i = 0; i < 8; ++i) s[q][i] = (i >> 1 & 1) * 8 > limit ? -INFINITY : s[q][i];
  }
}

__device__ __forceinline__ void sparse_attn_column_maxima(
    const float* s0, const float* s1, const float* s2, const float* s3, float* exchange, int taken) {
  const float* const s[4] = {s0, s1, s2, s3};
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  #pragma unroll
  for (int q = 0; q < 4; ++q) {
    if (taken >> q & 1) {
      float top[4];
      #pragma unroll
      for (int c = 0; c < 4; ++c) {
        top[c] = fmaxf(s[q][(c >> 1) * 4 + (c & 1)], s[q][(c >> 1) * 4 + (c & 1) + 2]);
        #pragma unroll
        for (int d = 4; d < 32; d *= 2) top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], d));
      }
      if (lane < 4)
        reinterpret_cast<float4*>(exchange)[(q * 4 + warp) * 4 + lane] = make_float4(top[0], top[1], top[2], top[3]);
    }
  }
}

// New maxima, sums to refer to them, and weights once more.
template <int SUMS, bool BF16>
__device__ __forceinline__ void sparse_attn_grow(
    const float* s0, const float* s1, const float* s2, const float* s3, void* p0, void* p1, void* p2, void* p3,
    float* o0, float* o1, float* o2, float* o3, float* l, float* sums, float* shift, const float* exchange, int taken,
    float scale) {
  const float* const s[4] = {s0, s1, s2, s3};
  void* const p[4] = {p0, p1, p2, p3};
  float* const o[4] = {o0, o1, o2, o3};
  #pragma unroll
  for (int q = 0; q < 4; ++q) {
    if (taken >> q & 1) {
      float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, alpha[4];
      #pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        const float4 x = reinterpret_cast<const float4*>(exchange)[(q * 4 + warp) * 4 + (threadIdx.x & 3)];
        top[0] = fmaxf(top[0], x.x), top[1] = fmaxf(top[1], x.y);
        top[2] = fmaxf(top[2], x.z), top[3] = fmaxf(top[3], x.w);
      }
      #pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float old = shift[q * 4 + c], now = fmaxf(old, top[c] * scale);
        // Exactly 1 where the maximum stays: rounding errors would add up over many steps.
        alpha[c] = now > old ? exp2f(old - now) : 1.f;
        l[q * 4 + c] *= alpha[c];
        shift[q * 4 + c] = now;
        top[c] = now == -INFINITY ? 0.f : now;
      }
      sparse_attn_weights<BF16>(
          s[q], static_cast<unsigned*>(p[q]), sums + 4 * q, top[0], top[1], top[2], top[3], scale);
      #pragma unroll
      for (int i = 0; i < SUMS; ++i) o[q][i] *= alpha[(i >> 2 & 1) * 2 + (i & 1)];
    }
  }
}

__device__ __forceinline__ void sparse_attn_total(float* l, float* exchange) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  #pragma unroll
  for (int c = 0; c < 4; ++c) {
    #pragma unroll
    for (int d = 4; d < 32; d *= 2) l[c] += __shfl_xor_sync(~0u, l[c], d);
  }
  if (lane < 4) reinterpret_cast<float4*>(exchange)[warp * 4 + lane] = make_float4(l[0], l[1], l[2], l[3]);
}

// Sums to rows of the result, in shared memory: ``stage`` has a row for each head of this query.
template <int SUMS, int STRIDE, typename T>
__device__ __forceinline__ void sparse_attn_stage(
    const float* o, const float* shift, const float* exchange, T* stage, void* lse, long long lse_stride, int heads) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  float l[4] = {0.f, 0.f, 0.f, 0.f}, factor[4];
  #pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float4 x = reinterpret_cast<const float4*>(exchange)[w * 4 + (lane & 3)];
    l[0] += x.x, l[1] += x.y, l[2] += x.z, l[3] += x.w;
  }
  #pragma unroll
  for (int c = 0; c < 4; ++c) factor[c] = l[c] == 0.f ? 0.f : 1.f / l[c];
  #pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int c = (i >> 2 & 1) * 2 + (i & 1), head = (lane & 3) * 2 + (c & 1) + (c >> 1) * 8;
    stage[head * STRIDE + (i >> 3) * 64 + warp * 16 + lane / 4 + (i >> 1 & 1) * 8] = T(o[i] * factor[c]);
  }
  if (lse != nullptr && warp == 0 && lane < 4) {
    #pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int head = lane * 2 + (c & 1) + (c >> 1) * 8;
      const float value = l[c] == 0.f ? -INFINITY : (shift[c] + log2f(l[c])) * 0.69314718f;
      if (head < heads) static_cast<float*>(lse)[head * lse_stride] = value;
    }
  }
}
"""


def exact_kernel(tiles: Tiles, dtype: str):
    """The kernel for tiles of one shape, to be compiled; lengths, strides and batch are arguments of it."""
    BN, KST, VST, TQ = tiles.BN, tiles.k_stages, tiles.v_stages, tiles.queries
    DP, DV, DVP = tiles.D_padded, tiles.Dv, tiles.Dv_padded
    K_LOG, V_LOG = KST.bit_length() - 1, VST.bit_length() - 1
    SUMS, STRIDE, VECTOR = DVP // 8, DVP + 8, 8
    BF16 = str(dtype == "bfloat16").lower()
    queries, q_columns = tuple(range(TQ)), tuple(range(0, DP, COLUMNS))
    do = parts(tiles, dtype)
    f32, i32 = T.float32, T.int32
    full_rows = T.GemmWarpPolicy.FullRow

    @T.macro
    def consume(mem, n, cta, grid):
        """The warpgroup that multiplies."""
        s = tuple(T.alloc_fragment([BN, HEADS], f32) for _ in queries)
        p = tuple(T.alloc_fragment([BN, HEADS], dtype) for _ in queries)
        o = tuple(T.alloc_fragment([DVP, HEADS], f32) for _ in queries)
        shift = T.alloc_local([TQ * _COLUMNS_OF_A_THREAD], f32)
        sums = T.alloc_local([TQ * _COLUMNS_OF_A_THREAD], f32)
        l = T.alloc_local([TQ * _COLUMNS_OF_A_THREAD], f32)  # noqa: E741 -- of this thread's keys
        mask = T.alloc_local([1], i32)
        box = T.alloc_local([1], i32)
        next_mask, next_box, first_mask, first_box = (T.alloc_local([1], i32) for _ in range(4))
        next_counts = T.alloc_local([2], i32)
        next_place = T.alloc_local([6], i32)
        listed = T.alloc_var(i32)
        b = T.alloc_var(i32)
        head = T.alloc_var(i32)
        first = T.alloc_var(i32)
        heads = T.alloc_var(i32)
        any_hidden = T.alloc_var(i32)
        outgrown = T.alloc_var(i32)
        masked = T.alloc_var(i32)
        total = T.alloc_var(i32)
        key = T.alloc_var(i32)
        left = T.alloc_var(i32)
        c = T.alloc_var(i32)  # steps so far, of all tiles: the place in the rings
        turns = T.alloc_var(i32)
        thread = T.get_thread_binding()
        T.annotate_layout({x: T.Fragment([BN, HEADS], forward_fn=_place) for x in p})
        c = 0
        do.turns_of(turns, cta, grid, n)
        do.locate(next_place, 0, cta, grid, n)
        for x in T.unroll(2):
            next_counts[x] = mem.counts[next_place[0], x]
        do.prefetch(first_mask, mem.masks, next_place[0], 0)
        do.prefetch(first_box, mem.boxes, next_place[0], 0)
        for item in T.serial(turns):
            next_mask[0] = first_mask[0]
            next_box[0] = first_box[0]
            listed = next_place[0]
            b = next_place[1]
            head = next_place[2]
            first = next_place[4]
            tile = SimpleNamespace(first=first)
            heads = next_place[5]
            masked = next_counts[0]
            total = next_counts[0] + next_counts[1]
            do.locate(next_place, item + 1, cta, grid, n)
            for x in T.unroll(2):
                next_counts[x] = mem.counts[next_place[0], x]
            do.prefetch(first_mask, mem.masks, next_place[0], 0)
            do.prefetch(first_box, mem.boxes, next_place[0], 0)
            for i in queries:
                T.fill(o[i], 0)
            for x in T.unroll(TQ * _COLUMNS_OF_A_THREAD):
                shift[x] = -_INF
                l[x] = 0
            T.barrier_wait(mem.q_ready, item & 1)
            for t in T.serial(total):
                do.take(mask, next_mask, mem.masks, listed, t)
                do.take(box, next_box, mem.boxes, listed, t)
                T.barrier_wait(mem.k_ready[c & (KST - 1)], (c >> K_LOG) & 1)
                T.fence_proxy_async()  # else the compiler puts one before each product
                for i in queries:
                    if ((mask[0] >> i) & 1) != 0:
                        T.wgmma_gemm(
                            mem.k[c & (KST - 1), :, :], mem.q[i, :, :], s[i], transpose_B=True, policy=full_rows,
                            clear_accum=True,
                        )  # fmt: skip
                do.prefetch(next_mask, mem.masks, listed, t + 1)
                if t < masked:
                    do.prefetch(next_box, mem.boxes, listed, t + 1)
                T.wait_wgmma(0)
                T.barrier_arrive(mem.k_free[c & (KST - 1)])
                if t > 0:
                    T.barrier_arrive(mem.v_free[(c - 1) & (VST - 1)])
                if t == total - 1:  # the next tile's queries may come
                    T.barrier_arrive(mem.q_free)
                if t < masked:
                    # The last key that a query at the tile's first position sees in this box, and that anyone may see.
                    key = T.truncdiv(box[0], n.boxes_per_block)
                    left = (box[0] - key * n.boxes_per_block) * BN  # where the box begins in its block
                    key = key * n.block_size + left
                    left = T.min(n.block_size - left, n.M - key) - 1
                    key = first + n.q_offset - key
                    T.call_extern("handle", "sparse_attn_hide", *(x.access_ptr("rw") for x in s), key, left)
                outgrown = T.call_extern(
                    "int32", f"sparse_attn_weigh<{BF16}, {FIRST_BARRIER}>", *(x.access_ptr("r") for x in s),
                    *(x.access_ptr("w") for x in p), sums.access_ptr("w"), shift.access_ptr("r"), mask[0], n.scale,
                )  # fmt: skip
                if outgrown != 0:
                    T.call_extern(
                        "handle", "sparse_attn_column_maxima", *(x.access_ptr("r") for x in s),
                        T.address_of(mem.exchange[0, 0, 0]), mask[0],
                    )  # fmt: skip
                    T.sync_threads(FIRST_BARRIER, 128)
                    T.call_extern(
                        "handle", f"sparse_attn_grow<{SUMS}, {BF16}>", *(x.access_ptr("r") for x in s),
                        *(x.access_ptr("w") for x in p), *(x.access_ptr("rw") for x in o), l.access_ptr("rw"),
                        sums.access_ptr("w"), shift.access_ptr("rw"), T.address_of(mem.exchange[0, 0, 0]), mask[0],
                        n.scale,
                    )  # fmt: skip
                for x in T.unroll(TQ * _COLUMNS_OF_A_THREAD):
                    l[x] = l[x] + sums[x]
                for i in queries:
                    if ((mask[0] >> i) & 1) != 0:
                        T.copy(p[i], mem.p[i, :, :])
                T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                if t < masked:
                    do.look(any_hidden, lambda x: box[0], mask, tile, n)
                    if any_hidden != 0:
                        do.zero_hidden(mem, thread, c, lambda x: box[0], mask, tile, n)
                T.fence_proxy_async()
                T.sync_threads(FIRST_BARRIER, 128)
                for i in queries:
                    if ((mask[0] >> i) & 1) != 0:
                        T.wgmma_gemm(
                            mem.v[c & (VST - 1), :, :], mem.p[i, :, :], o[i], transpose_A=True, policy=full_rows
                        )
                c = c + 1
            if total > 0:
                T.wait_wgmma(0)
                T.barrier_arrive(mem.v_free[(c - 1) & (VST - 1)])
            else:
                T.barrier_arrive(mem.q_free)
            for i in queries:
                T.call_extern(
                    "handle",
                    "sparse_attn_total",
                    l.access_ptr("rw", offset=i * _COLUMNS_OF_A_THREAD),
                    T.address_of(mem.exchange[i, 0, 0]),
                )
            T.sync_threads(FIRST_BARRIER, 128)
            for i in queries:
                T.call_extern(
                    "handle", f"sparse_attn_stage<{SUMS}, {STRIDE}>", o[i].access_ptr("r"),
                    shift.access_ptr("r", offset=i * _COLUMNS_OF_A_THREAD),
                    T.address_of(mem.exchange[i, 0, 0]), T.address_of(mem.stage[i * HEADS, 0]),
                    T.if_then_else(
                        n.want_lse != 0 and first + i < n.N, T.address_of(mem.lse[b, head, first + i]), _null()
                    ),
                    T.cast(n.N, "int64"), heads,
                )  # fmt: skip
            T.sync_threads(FIRST_BARRIER, 128)
            for z in T.unroll(TQ * HEADS * DVP // VECTOR // 128):
                row = (z * 128 + thread) // (DVP // VECTOR)
                column = thread % (DVP // VECTOR) * VECTOR
                if row % HEADS < heads and first + row // HEADS < n.N and column < DV:
                    for y in T.vectorized(VECTOR):
                        mem.out[b, head + row % HEADS, first + row // HEADS, column + y] = mem.stage[row, column + y]

    @T.macro
    def load_queries(mem, n, cta, grid):
        """Another warp's part."""
        place = T.alloc_local([6], i32)
        turns = T.alloc_var(i32)
        do.turns_of(turns, cta, grid, n)
        for item in T.serial(turns):
            do.locate(place, item, cta, grid, n)
            T.barrier_wait(mem.q_free, (item & 1) ^ 1)
            for y in q_columns:
                for i in queries:
                    T.tma_copy(
                        mem.Q[place[1], place[2] : place[2] + HEADS, place[4] + i, y : y + COLUMNS],
                        mem.q[i, :, y : y + COLUMNS],
                        barrier=mem.q_ready,
                    )
            T.barrier_arrive(mem.q_ready)

    @T.macro
    def run(args, n, cta, grid):
        mem = SimpleNamespace(
            **vars(args),
            **vars(rings(tiles, dtype, 128)),
            q=T.alloc_shared([TQ, HEADS, DP], dtype),
            q_ready=T.alloc_barrier(arrive_count=32),
            q_free=T.alloc_barrier(arrive_count=128),
            p=T.alloc_shared([TQ, BN, HEADS], dtype),
            exchange=T.alloc_shared([TQ, 4, HEADS], f32),
            stage=T.alloc_shared([TQ * HEADS, STRIDE], dtype),
        )
        T.annotate_min_blocks_per_sm(BLOCKS)
        T.pdl_sync()  # the lists: this kernel may be started while they are made
        thread = T.get_thread_binding()
        if thread < 128:
            T.set_max_nreg(208, 1)
            consume(mem, n, cta, grid)
        else:
            T.set_max_nreg(48, 0)
            if thread < 160:
                do.load_keys_and_values(mem, n, cta, grid)
            elif thread < 192:
                load_queries(mem, n, cta, grid)

    return entry(tiles, dtype, 256, run, "sparse_attn_exact", _SOFTMAX)


def _null():
    """In the place of an lse that is not asked for."""
    return T.reinterpret(T.cast(0, "uint64"), "handle")
