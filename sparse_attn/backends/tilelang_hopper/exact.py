"""The exact kernel, for Hopper GPUs whose products are slow: a query is multiplied by the blocks that it selected.

The union kernel multiplies 4 queries of 16 heads by every block that any of them selected, since a wgmma has 64 rows.
Here its 64 rows are the keys of a block, and its columns the 16 heads of one query: scores are computed transposed, and
so are sums. A tile of 4 queries shares what is loaded; a block that two of them selected is multiplied twice, one after
the other. Two blocks on a multiprocessor fill each other's waits, which bound it on a GPU with the full rate of
products: docs/performance.md has its times on one, and what they say of an H20.

Maxima are over keys, which lie in all four warps: one exchange a step, for all queries, through shared memory.
"""

from types import SimpleNamespace

import tilelang.language as T

from .parts import COLUMNS, FIRST_BARRIER, entry, parts, rings
from .plan import BLOCKS, Tiles

# Heads: the columns of a product.
HEADS = 16
_INF = float("inf")
_COLUMNS_OF_A_THREAD = 4

# How a thread's part of 64 x 16 scores lies: values 0 to 7 are rows r and r + 8, of columns c and c + 1, c + 8 and
# c + 9; r = 16 * warp + lane / 4, c = lane % 4 * 2. Sums of 64 and 128 features have 8 and 16 values, likewise.
_SOFTMAX = """
template <int SUMS>
__device__ __forceinline__ void sparse_attn_weigh(
    float* s, float* o, float* m, float* l, const float* exchange, float scale, float lazy) {
  const int lane = threadIdx.x & 31;
  float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, alpha[4], shift[4];
  #pragma unroll
  for (int warp = 0; warp < 4; ++warp) {
    const float4 x = reinterpret_cast<const float4*>(exchange)[warp * 4 + (lane & 3)];
    top[0] = fmaxf(top[0], x.x), top[1] = fmaxf(top[1], x.y), top[2] = fmaxf(top[2], x.z), top[3] = fmaxf(top[3], x.w);
  }
  bool grown = false;
  #pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float old = m[c];
    m[c] = (top[c] - old) * scale > lazy ? top[c] : old;
    shift[c] = m[c] == -INFINITY ? 0.f : m[c] * scale;
    // Exactly 1 where the maximum stays: rounding errors would add up over many steps.
    alpha[c] = m[c] > old ? exp2f(old * scale - shift[c]) : 1.f;
    grown |= m[c] > old;
    l[c] *= alpha[c];
  }
  #pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int c = (i >> 2) * 2 + (i & 1);
    s[i] = exp2f(s[i] * scale - shift[c]);
    l[c] += s[i];
  }
  if (__any_sync(~0u, grown)) {
    #pragma unroll
    for (int i = 0; i < SUMS; ++i) o[i] *= alpha[(i >> 2 & 1) * 2 + (i & 1)];
  }
}

__device__ __forceinline__ void sparse_attn_maxima(float* s, float* exchange, int limit) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  if (limit < 63) {
    #pragma unroll
    for (int i = 0; i < 8; ++i) s[i] = warp * 16 + lane / 4 + (i >> 1 & 1) * 8 > limit ? -INFINITY : s[i];
  }
  float top[4];
  #pragma unroll
  for (int c = 0; c < 4; ++c) {
    top[c] = fmaxf(s[(c >> 1) * 4 + (c & 1)], s[(c >> 1) * 4 + (c & 1) + 2]);
    #pragma unroll
    for (int d = 4; d < 32; d *= 2) top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], d));
  }
  if (lane < 4) reinterpret_cast<float4*>(exchange)[warp * 4 + lane] = make_float4(top[0], top[1], top[2], top[3]);
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
    const float* o, const float* m, const float* exchange, T* stage, void* lse, long long lse_stride, int heads,
    float scale) {
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
      const float value = l[c] == 0.f ? -INFINITY : (m[c] * scale + log2f(l[c])) * 0.69314718f;
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
    queries, q_columns = tuple(range(TQ)), tuple(range(0, DP, COLUMNS))
    do = parts(tiles, dtype)
    f32, i32 = T.float32, T.int32
    full_rows = T.GemmWarpPolicy.FullRow

    @T.macro
    def consume(mem, n, cta, grid):
        """The warpgroup that multiplies."""
        s = tuple(T.alloc_fragment([BN, HEADS], f32) for _ in queries)
        p = T.alloc_fragment([BN, HEADS], dtype)
        o = tuple(T.alloc_fragment([DVP, HEADS], f32) for _ in queries)
        m = tuple(T.alloc_local([_COLUMNS_OF_A_THREAD], f32) for _ in queries)
        l = tuple(T.alloc_local([_COLUMNS_OF_A_THREAD], f32) for _ in queries)  # noqa: E741 -- of this thread's keys
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
        masked = T.alloc_var(i32)
        total = T.alloc_var(i32)
        key = T.alloc_var(i32)
        left = T.alloc_var(i32)
        c = T.alloc_var(i32)  # steps so far, of all tiles: the place in the rings
        turns = T.alloc_var(i32)
        thread = T.get_thread_binding()
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
                for x in T.unroll(_COLUMNS_OF_A_THREAD):
                    m[i][x] = -_INF
                    l[i][x] = 0
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
                # The last key that a query at the tile's first position sees in this box, and that anyone may see.
                key = BN - 1
                left = BN - 1
                if t < masked:
                    key = T.truncdiv(box[0], n.boxes_per_block)
                    left = (box[0] - key * n.boxes_per_block) * BN  # where the box begins in its block
                    key = key * n.block_size + left
                    left = T.min(n.block_size - left, n.M - key) - 1
                    key = first + n.q_offset - key
                for i in queries:
                    if ((mask[0] >> i) & 1) != 0:
                        T.call_extern(
                            "handle", "sparse_attn_maxima", s[i].access_ptr("rw"),
                            T.address_of(mem.exchange[c & 1, i, 0, 0]), T.min(key + i, left),
                        )  # fmt: skip
                T.sync_threads(FIRST_BARRIER, 128)
                for i in queries:
                    if ((mask[0] >> i) & 1) != 0:
                        T.call_extern(
                            "handle", f"sparse_attn_weigh<{SUMS}>", s[i].access_ptr("rw"), o[i].access_ptr("rw"),
                            m[i].access_ptr("rw"), l[i].access_ptr("rw"),
                            T.address_of(mem.exchange[c & 1, i, 0, 0]), n.scale, 8.0,
                        )  # fmt: skip
                        T.copy(s[i], p)
                        T.copy(p, mem.p[i, :, :])
                T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                if t < masked:
                    do.look(any_hidden, lambda x: box[0], mask, first, n)
                    if any_hidden != 0:
                        do.zero_hidden(mem, thread, c, lambda x: box[0], mask, first, n)
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
                    "handle", "sparse_attn_total", l[i].access_ptr("rw"), T.address_of(mem.exchange[2, i, 0, 0])
                )
            T.sync_threads(FIRST_BARRIER, 128)
            for i in queries:
                T.call_extern(
                    "handle", f"sparse_attn_stage<{SUMS}, {STRIDE}>", o[i].access_ptr("r"), m[i].access_ptr("r"),
                    T.address_of(mem.exchange[2, i, 0, 0]), T.address_of(mem.stage[i * HEADS, 0]),
                    T.if_then_else(
                        n.want_lse != 0 and first + i < n.N, T.address_of(mem.lse[b, head, first + i]), _null()
                    ),
                    T.cast(n.N, "int64"), heads, n.scale,
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
            exchange=T.alloc_shared([3, TQ, 4, HEADS], f32),
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
