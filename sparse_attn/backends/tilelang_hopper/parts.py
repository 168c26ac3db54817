"""Macros for kernels that walk a list: where a tile is, what a step says, the softmax, loads, stores; their entry."""

from functools import reduce
from types import SimpleNamespace

import tilelang.language as T
from tilelang.layout import Fragment

from .order import place_of
from .plan import WINDOW, Tiles

# Features of a box of TMA: 128 bytes, the widest swizzle.
COLUMNS = 64
# Rows of one warpgroup's wgmma.
WARPGROUP_ROWS = 64
# Barriers that this code names; the compiler takes those from 3 on.
FIRST_BARRIER = 10
_INF = float("inf")
# A maximum that grew by less leaves the sums as they are: weights stay below 2**8.
_LAZY = 8.0
# Values of 16 bytes.
_VECTOR = 8

# The largest score of the boxes that a row takes, bit x of ``taken`` for box x. (TileLang's reduce_max of some of a
# fragment's columns is one of all of them: what a row does not take may be so much larger that its weights vanish.)
#
# Sums times a factor, as rows of the result. A thread has 2 rows, and of each 2 features of every 8: the four threads
# of a row exchange them, so that each stores 16 bytes at once. Stores of 4 bytes would take a third of a short tile's
# time.
PRELUDE = """
template <int KEYS, int BOX>
__device__ __forceinline__ void sparse_attn_row_maxima(const float* scores, int taken0, int taken1, float* maxima) {
  const float none = __int_as_float(0xff800000);
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    float all = none;
    #pragma unroll
    for (int x = 0; x < KEYS / BOX; ++x) {
      float box = none;
      #pragma unroll
      for (int i = x * (BOX / 8); i < (x + 1) * (BOX / 8); ++i)
        box = fmaxf(box, fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
      all = fmaxf(all, ((r ? taken1 : taken0) >> x) & 1 ? box : none);
    }
    all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
    maxima[r] = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
  }
}

template <int DV, int DV_PADDED, bool BF16>
__device__ __forceinline__ void sparse_attn_store(
    const float* sums, const float* factor, void* row0, void* row1, bool ok0, bool ok1) {
  const int lane = threadIdx.x & 3;
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    #pragma unroll
    for (int j = 0; j < DV_PADDED / 32; ++j) {
      unsigned x[4];
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        // A factor of 0 is a row that saw nothing: its sums may be NaN.
        const float* pair = sums + (4 * j + i) * 4 + 2 * r;
        const float low = factor[r] == 0.f ? 0.f : pair[0] * factor[r];
        const float high = factor[r] == 0.f ? 0.f : pair[1] * factor[r];
        if (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x[i]) : "f"(high), "f"(low));
        else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x[i]) : "f"(high), "f"(low));
      }
      const bool second = lane & 2, odd = lane & 1;
      unsigned a = __shfl_xor_sync(~0u, second ? x[0] : x[2], 2);
      unsigned b = __shfl_xor_sync(~0u, second ? x[1] : x[3], 2);
      x[0] = second ? a : x[0], x[2] = second ? x[2] : a;
      x[1] = second ? b : x[1], x[3] = second ? x[3] : b;
      a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
      b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
      const int column = 32 * j + 8 * lane;
      if ((r ? ok1 : ok0) && column < DV)
        *reinterpret_cast<uint4*>(static_cast<char*>(r ? row1 : row0) + 2 * column) =
            odd ? make_uint4(a, x[1], b, x[3]) : make_uint4(x[0], a, x[2], b);
    }
  }
}
"""


def parts(tiles: Tiles, dtype: str) -> SimpleNamespace:
    """Macros for tiles of one shape. Fragments have 64 rows for each warpgroup, of its own queries.

    A tile is its first query; where tiles are ordered, its window's first query, and a word for each warpgroup.
    """
    ordered = tiles.ordered
    HP, BN, BX, W = tiles.heads, tiles.BN, tiles.box, tiles.warpgroups
    DV, KST, VST = tiles.Dv, tiles.k_stages, tiles.v_stages
    TQ, P, ROWS = tiles.queries, BN // BX, WARPGROUP_ROWS * W
    TW = TQ // W
    DVP = tiles.Dv_padded
    K_LOG, V_LOG = KST.bit_length() - 1, VST.bit_length() - 1
    # Tuples, since the compiler makes loops of ranges: these are unrolled in Python.
    boxes, warpgroups = tuple(range(P)), tuple(range(W))
    q_columns, v_columns = tuple(range(0, tiles.D_padded, COLUMNS)), tuple(range(0, DVP, COLUMNS))
    # Which head and query of the tile a row is: such that the boxes in which q is loaded are as large as they can be.
    query_major = HP >= TW
    head_of = (lambda r: r % HP) if query_major else (lambda r: r % WARPGROUP_ROWS // TW)
    query_of = (lambda r: r // HP) if query_major else (lambda r: r // WARPGROUP_ROWS * TW + r % TW)
    words = W if ordered else 0

    def query_at(tile, t, w):
        """Query ``t`` of a tile, of warpgroup ``w``."""
        return tile.first + (place_of(tile.words[w], t % TW) if ordered else t)

    def query_of_row(tile, r):
        """The query of a row of this warpgroup."""
        return tile.first + (place_of(tile.own[0], query_of(r) % TW) if ordered else query_of(r))

    def rows_of(thread):
        """A thread's two rows, by the layout that wgmma gives its results."""
        first = thread // 32 * 16 + thread % 32 // 4
        return first, first + 8

    # The same from rows to threads, four of which have each. TileLang would find it, by trying every loop as the one
    # that all others follow, which takes as long as all else that it does with the kernel.
    layout = Fragment([ROWS], lambda r, copy: (r // 16 * 32 + r % 8 * 4 + copy, r % 16 // 8), replicate=4)

    def rows():
        return T.Parallel(ROWS, loop_layout=layout)

    def boxes_of(selected, r):
        """Bit x: whether row r takes box x."""
        return reduce(lambda bits, x: bits | T.Select(selected(x, r), 1 << x, 0), boxes, 0)

    # What a step of the list says is read one step ahead, unless that takes too many registers.
    ahead = P <= 4
    f32, i32 = T.float32, T.int32

    @T.macro
    def locate(place, turn, cta, grid, n):
        """Of a block's item number ``turn``: list, batch entry, first head, key/value head, first query (of the window,
        where tiles are ordered), valid heads.

        Items of ``n.together`` lists are taken together, the longest first, and dealt out there and back again: to the
        first block the longest, to the last the shortest, then the other way round. Blocks end at about the same time.
        """
        place[4] = turn * grid + T.Select(turn % 2 == 0, cta, grid - 1 - cta)
        place[4] = T.min(place[4], n.items - 1)
        place[0] = T.truncdiv(place[4], n.together * n.tiles)
        place[4] = place[4] - place[0] * (n.together * n.tiles)
        place[0] = place[0] * n.together
        place[1] = T.min(n.together, n.columns - place[0])
        place[2] = T.truncdiv(place[4], place[1])
        place[0] = place[0] + place[4] - place[2] * place[1]
        place[4] = n.tiles - 1 - place[2]  # the longest first
        place[3] = T.truncdiv(place[0], n.chunks)
        place[5] = (place[0] - place[3] * n.chunks) * HP
        place[0] = place[3] * n.tiles + place[4]
        place[4] = place[4] * TQ
        if ordered:
            place[4] = place[4] // WINDOW * WINDOW
        place[1] = T.truncdiv(place[3], n.Hk)
        place[3] = place[3] - place[1] * n.Hk
        place[2] = place[3] * n.g + place[5]
        place[5] = n.g - place[5]

    @T.macro
    def turns_of(turns: T.Ref, cta, grid, n):
        """Items that a block takes."""
        turns = T.truncdiv(n.items, grid)
        turns = turns + T.Select(n.items - turns * grid > T.Select(turns % 2 == 0, cta, grid - 1 - cta), 1, 0)

    @T.macro
    def take(now, then, values, listed, t):
        """What step t of a list says of each of its boxes."""
        for x in T.unroll(P):
            if ahead:
                now[x] = then[x]
            else:
                now[x] = values[listed, t * P + x]

    @T.macro
    def prefetch(then, values, listed, t):
        """Read what step t says, for ``take``: not right before a fence, which would wait for it."""
        if ahead:
            for x in T.unroll(P):
                then[x] = values[listed, t * P + x]

    @T.macro
    def whereabouts(block: T.Ref, start: T.Ref, hidden: T.Ref, box, mask, tile, n):
        """Of a box: its block's first key, its own in the block, its first key behind all queries that take it."""
        start = box
        block = T.truncdiv(start, n.boxes_per_block)
        start = (start - block * n.boxes_per_block) * BX
        block = block * n.block_size
        hidden = 0
        if ordered:
            for w in warpgroups:  # a warpgroup's queries are in order
                part = (mask >> (w * TW)) & ((1 << TW) - 1)
                last = query_at(tile, T.max(31 - T.call_extern("int32", "__clz", part), 0), w)
                hidden = T.max(hidden, T.Select(part != 0, last + n.q_offset + 1 - block - start, 0))
        elif mask != 0:
            hidden = tile.first + n.q_offset + 32 - T.call_extern("int32", "__clz", mask) - block - start

    @T.macro
    def look(any_hidden: T.Ref, box_of, mask, tile, n):
        """Whether some key of a step's boxes is behind all queries that take it: ``box_of(x)``, with these masks."""
        block = T.alloc_var(i32)
        start = T.alloc_var(i32)
        hidden = T.alloc_var(i32)
        any_hidden = 0
        for x in boxes:
            whereabouts(block, start, hidden, box_of(x), mask[x], tile, n)
            any_hidden = any_hidden | T.Select(hidden < BX, 1, 0)

    @T.macro
    def zero_hidden(mem, thread, step, box_of, mask, tile, n):
        """Zero values behind all queries that take their box: they may be NaN, never having been written."""
        block = T.alloc_var(i32)
        start = T.alloc_var(i32)
        hidden = T.alloc_var(i32)
        for x in boxes:
            whereabouts(block, start, hidden, box_of(x), mask[x], tile, n)
            for z in T.unroll(-(-BX * DVP // _VECTOR // 128)):
                r = (z * 128 + thread) // (DVP // _VECTOR)
                d = (z * 128 + thread) % (DVP // _VECTOR) * _VECTOR
                if r >= hidden and r < BX:
                    for y in T.vectorized(_VECTOR):
                        mem.v[step & (VST - 1), x * BX + r, d + y] = 0

    @T.macro
    def hide(s, limit, box_of, mask, tile, n):
        """Scores of keys that a row does not see become -inf."""
        block = T.alloc_var(i32)
        start = T.alloc_var(i32)
        hidden = T.alloc_var(i32)
        for x in boxes:
            whereabouts(block, start, hidden, box_of(x), mask[x], tile, n)
            for r in rows():
                limit[r] = T.Select(
                    ((mask[x] >> query_of(r)) & 1) != 0,
                    T.min(
                        T.min(query_of_row(tile, r) + n.q_offset, n.M - 1) - block - start,
                        n.block_size - start - 1,
                    ),
                    -1,
                )
            for r, j in T.Parallel(ROWS, BX):
                s[r, x * BX + j] = T.Select(j <= limit[r], s[r, x * BX + j], T.cast(-_INF, f32))

    @T.macro
    def exponentiate(thread, s, row, selected, scale, grown: T.Ref):
        """Scores to weights. ``selected(x, r)``: whether row r takes box x; None: all that are not -inf."""
        T.copy(row.m, row.m_old)
        if selected is None:
            T.reduce_max(s, row.tmp, dim=1, clear=True)
        else:
            T.call_extern(
                "handle",
                f"sparse_attn_row_maxima<{BN}, {BX}>",
                s.access_ptr("r"),
                boxes_of(selected, rows_of(thread)[0]),
                boxes_of(selected, rows_of(thread)[1]),
                row.tmp.access_ptr("w"),
            )
        for r in rows():
            row.m[r] = T.Select((row.tmp[r] - row.m[r]) * scale > _LAZY, row.tmp[r], row.m[r])
        grown = 0
        for r in rows():
            grown = grown | T.Select(row.m[r] > row.m_old[r], 1, 0)
        for r in rows():
            row.shift[r] = T.Select(row.m[r] == -_INF, T.cast(0, f32), row.m[r] * scale)
        # Exactly 1 where the maximum stays: what exp2 of a rounding error would give instead adds up over many steps.
        for r in rows():
            row.alpha[r] = T.Select(
                row.m[r] > row.m_old[r], T.exp2(row.m_old[r] * scale - row.shift[r]), T.cast(1, f32)
            )
        if selected is None:
            for r, j in T.Parallel(ROWS, BN):
                s[r, j] = T.exp2(s[r, j] * scale - row.shift[r])
        else:  # weights of 0 by what is subtracted, not by a mask over all scores
            for x in boxes:
                for r in rows():
                    row.tmp[r] = T.Select(selected(x, r), row.shift[r], T.cast(_INF, f32))
                for r, j in T.Parallel(ROWS, BX):
                    s[r, x * BX + j] = T.exp2(s[r, x * BX + j] * scale - row.tmp[r])
        T.reduce_sum(s, row.tmp, dim=1)
        for r in rows():
            row.sum[r] = row.sum[r] * row.alpha[r] + row.tmp[r]

    @T.macro
    def rescale(o, row, grown):
        """Sums to the maxima that they are to refer to, in warps where one grew."""
        if T.any_sync(grown != 0):
            for r, d in T.Parallel(ROWS, DVP):
                o[r, d] *= row.alpha[r]

    @T.macro
    def store(mem, thread, o, row, seen, b, head, heads, tile, n):
        """Results; lse where it is asked for.

        A query whose bit in ``seen`` is not set took no box: 0 and -inf, whatever it holds. Its maximum is -inf.
        """
        for r in rows():
            row.sum[r] = T.Select(((seen >> query_of(r)) & 1) != 0, row.sum[r], T.cast(0, f32))
        if n.want_lse != 0:
            for r in rows():
                if head_of(r) < heads and query_of_row(tile, r) < n.N:
                    mem.lse[b, head + head_of(r), query_of_row(tile, r)] = (
                        row.m[r] * n.scale + T.log2(row.sum[r])
                    ) * 0.6931471805599453
        for r in rows():
            row.tmp[r] = T.Select(row.sum[r] == 0, T.cast(0, f32), 1.0 / row.sum[r])
        r0, r1 = rows_of(thread)
        T.call_extern(
            "handle",
            f"sparse_attn_store<{DV}, {DVP}, {str(dtype == 'bfloat16').lower()}>",
            o.access_ptr("r"),
            row.tmp.access_ptr("r"),
            T.address_of(mem.out[b, head + head_of(r0), query_of_row(tile, r0), 0]),
            T.address_of(mem.out[b, head + head_of(r1), query_of_row(tile, r1), 0]),
            head_of(r0) < heads and query_of_row(tile, r0) < n.N,
            head_of(r1) < heads and query_of_row(tile, r1) < n.N,
        )

    @T.macro
    def load_keys_and_values(mem, n, cta, grid):
        """One warp's part: it walks the lists ahead of those that multiply."""
        box = T.alloc_local([P], i32)
        next_box = T.alloc_local([P if ahead else 1], i32)
        first_box = T.alloc_local([P if ahead else 1], i32)  # of the next tile
        place = T.alloc_local([6], i32)
        listed = T.alloc_var(i32)
        b = T.alloc_var(i32)
        h = T.alloc_var(i32)
        total = T.alloc_var(i32)
        next_total = T.alloc_var(i32)
        c = T.alloc_var(i32)
        turns = T.alloc_var(i32)
        c = 0
        turns_of(turns, cta, grid, n)
        locate(place, 0, cta, grid, n)
        next_total = (
            mem.counts[place[0], 0] + mem.counts[place[0], 1] + mem.counts[place[0], 2] + mem.counts[place[0], 3]
        )
        prefetch(next_box, mem.boxes, place[0], 0)
        for item in T.serial(turns):
            listed = place[0]
            b = place[1]
            h = place[3]
            total = next_total
            locate(place, item + 1, cta, grid, n)
            next_total = (
                mem.counts[place[0], 0] + mem.counts[place[0], 1] + mem.counts[place[0], 2] + mem.counts[place[0], 3]
            )
            prefetch(first_box, mem.boxes, place[0], 0)
            for t in T.serial(total):
                take(box, next_box, mem.boxes, listed, t)
                prefetch(next_box, mem.boxes, listed, t + 1)
                T.barrier_wait(mem.k_free[c & (KST - 1)], ((c >> K_LOG) & 1) ^ 1)
                for y in q_columns:
                    for x in boxes:
                        T.tma_copy(
                            mem.K[b, h, box[x] * BX : box[x] * BX + BX, y : y + COLUMNS],
                            mem.k[c & (KST - 1), x * BX : x * BX + BX, y : y + COLUMNS],
                            barrier=mem.k_ready[c & (KST - 1)],
                        )
                T.barrier_arrive(mem.k_ready[c & (KST - 1)])
                T.barrier_wait(mem.v_free[c & (VST - 1)], ((c >> V_LOG) & 1) ^ 1)
                for y in v_columns:
                    for x in boxes:
                        T.tma_copy(
                            mem.V[b, h, box[x] * BX : box[x] * BX + BX, y : y + COLUMNS],
                            mem.v[c & (VST - 1), x * BX : x * BX + BX, y : y + COLUMNS],
                            barrier=mem.v_ready[c & (VST - 1)],
                        )
                T.barrier_arrive(mem.v_ready[c & (VST - 1)])
                c = c + 1
            if ahead:
                for x in T.unroll(P):
                    next_box[x] = first_box[x]

    return SimpleNamespace(
        locate=locate, turns_of=turns_of, query_at=query_at, words=words, take=take,
        prefetch=prefetch, look=look, hide=hide, zero_hidden=zero_hidden, exponentiate=exponentiate, rescale=rescale,
        store=store, load_keys_and_values=load_keys_and_values, query_of=query_of, query_major=query_major, ahead=ahead,
    )  # fmt: skip


def rings(tiles: Tiles, dtype: str, threads: int) -> SimpleNamespace:
    """Shared memory for k and v, with barriers: ready when loaded, free when all ``threads`` that read it are done."""
    KST, VST = tiles.k_stages, tiles.v_stages
    return SimpleNamespace(
        k=T.alloc_shared([KST, tiles.BN, tiles.D_padded], dtype),
        v=T.alloc_shared([VST, tiles.BN, tiles.Dv_padded], dtype),
        k_ready=T.alloc_barrier(arrive_count=[32] * KST),
        k_free=T.alloc_barrier(arrive_count=[threads] * KST),
        v_ready=T.alloc_barrier(arrive_count=[32] * VST),
        v_free=T.alloc_barrier(arrive_count=[threads] * VST),
    )


def row_state(rows: int) -> SimpleNamespace:
    """What an online softmax keeps of each row: maximum, sum, and what is worked out on the way."""
    names = ("m", "m_old", "shift", "alpha", "sum", "tmp")
    return SimpleNamespace(**{name: T.alloc_fragment([rows], T.float32) for name in names})


def entry(tiles: Tiles, dtype: str, threads: int, run, name: str, prelude: str):
    """The kernel with everything it is launched with; ``run(mem, n, cta, grid)`` is a macro with what it does."""
    D, DV = tiles.D, tiles.Dv
    f32, i32 = T.float32, T.int32
    B, Hq, Hk, N, keys, lists, capacity = (
        T.dynamic(name) for name in ("B", "Hq", "Hk", "N", "keys", "lists", "capacity")
    )
    l_b, l_h, l_n = (T.dynamic(name) for name in ("l_b", "l_h", "l_n"))
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n = (
        T.dynamic(name, "int64") for name in ("q_b", "q_h", "q_n", "k_b", "k_h", "k_n", "v_b", "v_h", "v_n")
    )

    @T.prim_func
    def kernel(
        Q: T.StridedTensor([B, Hq, N, D], [q_b, q_h, q_n, 1], dtype),
        K: T.StridedTensor([B, Hk, keys, D], [k_b, k_h, k_n, 1], dtype),
        V: T.StridedTensor([B, Hk, keys, DV], [v_b, v_h, v_n, 1], dtype),
        list_boxes: T.Tensor([lists, capacity], i32),
        list_masks: T.Tensor([lists, capacity], i32),
        list_counts: T.Tensor([lists, tiles.facts], i32),
        out: T.Tensor([B, Hq, N, DV], dtype),
        lse: T.Tensor([l_b, l_h, l_n], f32),
        scale: f32,
        want_lse: i32,
        M: i32,
        block_size: i32,
        boxes_per_block: i32,
        q_offset: i32,
        g: i32,
        chunks: i32,
        tiles_of_head: i32,
        together: i32,
        grid: i32,
    ):
        with T.Kernel(grid, threads=threads, prelude=prelude) as cta:
            mem = SimpleNamespace(
                Q=Q, K=K, V=V, out=out, lse=lse, boxes=list_boxes, masks=list_masks, counts=list_counts
            )  # fmt: skip
            n = SimpleNamespace(
                scale=scale, want_lse=want_lse, M=M, N=N, block_size=block_size, boxes_per_block=boxes_per_block,
                q_offset=q_offset, g=g, chunks=chunks, Hk=Hk, tiles=tiles_of_head,
                together=together, columns=B * Hk * chunks, items=B * Hk * chunks * tiles_of_head,
            )  # fmt: skip
            run(mem, n, cta, grid)

    return kernel.with_attr("global_symbol", name)
