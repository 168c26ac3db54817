"""The union kernel for Hopper: warps that load, and warpgroups that multiply, walk the union of a tile's blocks once.

A tile is 4 queries of 16 heads (or 8 of 8, ...) for each warpgroup: the 64 rows of a wgmma. Two warpgroups share what is
loaded, 128 keys a step, and each leaves out the steps that none of its own queries selected. The block runs on one
multiprocessor for the whole launch and takes one tile after the other, so that loads for the next begin while
the last is being finished.

The softmax is FlashAttention-3's inner overlap (Shah et al., 2024, algorithm 2): scores of a step are multiplied while the step
before is weighed, and turned into weights while that product still runs. Sums are rescaled only where a maximum grew by
more than 2**8, as in FlashAttention-4: the result is the same, since weights and sums refer to the same number.
"""

from types import SimpleNamespace

import tilelang.language as T

from .plan import Tiles

# Rows of a warpgroup's tile: the M of wgmma. Features of a box of TMA: 128 bytes, the widest swizzle.
ROWS, COLUMNS = 64, 64
_INF = float("inf")
# Barriers that this code names; the compiler takes those from 3 on.
_FIRST_BARRIER = 10
# A maximum that grew by less leaves the sums as they are: weights stay below 2**8.
_LAZY = 8.0


def union_kernel(tiles: Tiles, dtype: str):
    """The kernel for tiles of one shape, to be compiled; lengths, strides and batch are arguments of it."""
    HP, BN, BX, W = tiles.heads, tiles.BN, tiles.box, tiles.warpgroups
    D, DV, KST, VST = tiles.D, tiles.Dv, tiles.k_stages, tiles.v_stages
    TW, TQ, P = tiles.queries // W, tiles.queries, BN // BX
    DP, DVP = tiles.D_padded, tiles.Dv_padded
    LOW = (1 << TW) - 1
    K_LOG, V_LOG = KST.bit_length() - 1, VST.bit_length() - 1
    # Tuples, since the compiler makes loops of ranges: these are unrolled in Python.
    boxes, warpgroups = tuple(range(P)), tuple(range(W))
    q_columns, v_columns = tuple(range(0, DP, COLUMNS)), tuple(range(0, DVP, COLUMNS))
    # Which head and query a row is: such that the boxes in which q is loaded are as large as they can be.
    query_major = HP >= TW
    head_of = (lambda r: r % HP) if query_major else (lambda r: r // TW)
    query_of = (lambda r: r // HP) if query_major else (lambda r: r % TW)
    loads = tuple(range(TW if query_major else HP))
    # What a step of the list says is read one step ahead, unless that takes too many registers.
    ahead = P <= 4
    f32, i32 = T.float32, T.int32
    full_rows = T.GemmWarpPolicy.FullRow

    @T.macro
    def locate(place, item, n):
        """Of an item of work: its list, batch entry, first head, key/value head, first query, valid heads."""
        place[2] = T.truncdiv(item, n.tiles)
        place[4] = (n.tiles - 1 - (item - place[2] * n.tiles)) * TQ  # the longest first
        place[3] = T.truncdiv(place[2], n.chunks)
        place[5] = (place[2] - place[3] * n.chunks) * HP
        place[0] = place[3] * n.tiles + T.truncdiv(place[4], TQ)
        place[1] = T.truncdiv(place[3], n.Hk)
        place[3] = place[3] - place[1] * n.Hk
        place[2] = place[3] * n.g + place[5]
        place[5] = n.g - place[5]

    @T.macro
    def advance(now, then, values, listed, t):
        """What step t of a list says of each of its boxes."""
        for x in T.unroll(P):
            if ahead:
                now[x] = then[x]
                then[x] = values[listed, (t + 1) * P + x]
            else:
                now[x] = values[listed, t * P + x]

    @T.macro
    def whereabouts(block: T.Ref, start: T.Ref, hidden: T.Ref, box, mask, first, n):
        """Of a box: its block's first key, its own first key in the block, its first key behind all queries that take it."""
        start = box
        block = T.truncdiv(start, n.boxes_per_block)
        start = (start - block * n.boxes_per_block) * BX
        block = block * n.block_size
        hidden = first + n.q_offset + 32 - T.call_extern("int32", "__clz", mask) - block - start
        if mask == 0:
            hidden = 0

    def consumer(w: int):
        """One warpgroup's part."""

        @T.macro
        def multiply(mem, s, step):
            T.wgmma_gemm(
                mem.q[w, :, :], mem.k[step & (KST - 1), :, :], s, transpose_B=True, policy=full_rows, clear_accum=True
            )

        @T.macro
        def weigh(mem, p, o, step):
            T.wgmma_gemm(p, mem.v[step & (VST - 1), :, :], o, policy=full_rows)

        @T.macro
        def exponentiate(s, row, selected, scale, grown: T.Ref):
            """Scores to weights. ``selected(x, r)``: whether row r takes box x; None: all that are not -inf."""
            T.copy(row.m, row.m_old)
            if selected is None:
                T.reduce_max(s, row.tmp, dim=1, clear=True)
            else:
                T.fill(row.tmp, -_INF)
                for x in boxes:
                    T.reduce_max(s[:, x * BX : x * BX + BX], row.alpha, dim=1, clear=True)
                    for r in T.Parallel(ROWS):
                        row.tmp[r] = T.max(row.tmp[r], T.Select(selected(x, r), row.alpha[r], T.cast(-_INF, f32)))
            for r in T.Parallel(ROWS):
                row.m[r] = T.Select((row.tmp[r] - row.m[r]) * scale > _LAZY, row.tmp[r], row.m[r])
            grown = 0
            for r in T.Parallel(ROWS):
                grown = grown | T.Select(row.m[r] > row.m_old[r], 1, 0)
            for r in T.Parallel(ROWS):
                row.shift[r] = T.Select(row.m[r] == -_INF, T.cast(0, f32), row.m[r] * scale)
            for r in T.Parallel(ROWS):
                row.alpha[r] = T.exp2(row.m_old[r] * scale - row.shift[r])
            if selected is None:
                for r, j in T.Parallel(ROWS, BN):
                    s[r, j] = T.exp2(s[r, j] * scale - row.shift[r])
            else:  # weights of 0 by what is subtracted, not by a mask over all scores
                for x in boxes:
                    for r in T.Parallel(ROWS):
                        row.tmp[r] = T.Select(selected(x, r), row.shift[r], T.cast(_INF, f32))
                    for r, j in T.Parallel(ROWS, BX):
                        s[r, x * BX + j] = T.exp2(s[r, x * BX + j] * scale - row.tmp[r])
            T.reduce_sum(s, row.tmp, dim=1)
            for r in T.Parallel(ROWS):
                row.sum[r] = row.sum[r] * row.alpha[r] + row.tmp[r]

        @T.macro
        def rescale(o, row, grown):
            if T.any_sync(grown != 0):
                for r, d in T.Parallel(ROWS, DVP):
                    o[r, d] *= row.alpha[r]

        @T.macro
        def body(mem, n, cta, grid):
            s = T.alloc_fragment([ROWS, BN], f32)
            p = T.alloc_fragment([ROWS, BN], dtype)
            o = T.alloc_fragment([ROWS, DVP], f32)
            row = SimpleNamespace(
                m=T.alloc_fragment([ROWS], f32),
                m_old=T.alloc_fragment([ROWS], f32),
                shift=T.alloc_fragment([ROWS], f32),
                alpha=T.alloc_fragment([ROWS], f32),
                sum=T.alloc_fragment([ROWS], f32),
                tmp=T.alloc_fragment([ROWS], f32),
            )
            limit = T.alloc_fragment([ROWS], i32)
            mask = T.alloc_local([P], i32)
            next_mask = T.alloc_local([P if ahead else 1], i32)
            hidden = T.alloc_var(i32)
            next_counts = T.alloc_local([4], i32)
            next_place = T.alloc_local([6], i32)
            listed = T.alloc_var(i32)
            b = T.alloc_var(i32)
            head = T.alloc_var(i32)
            first = T.alloc_var(i32)
            heads = T.alloc_var(i32)
            block = T.alloc_var(i32)
            start = T.alloc_var(i32)
            needed = T.alloc_var(i32)
            any_hidden = T.alloc_var(i32)
            grown = T.alloc_var(i32)
            masked = T.alloc_var(i32)
            total = T.alloc_var(i32)
            end = T.alloc_var(i32)
            held = T.alloc_var(i32)
            c = T.alloc_var(i32)  # steps so far, of all tiles: the place in the rings
            c = 0
            locate(next_place, cta, n)
            for x in T.unroll(4):
                next_counts[x] = mem.counts[next_place[0], x]
            for item in T.serial((n.items - cta + grid - 1) // grid):
                listed = next_place[0]
                b = next_place[1]
                head = next_place[2]
                first = next_place[4]
                heads = next_place[5]
                masked = next_counts[0]
                total = next_counts[0] + next_counts[1] + next_counts[2] + next_counts[3]
                end = total  # of the steps that may be this warpgroup's
                if W == 2:
                    # Steps of one warpgroup alone alternate, until one has no more: it need not wait for the other's.
                    end = end - T.max(next_counts[3 - w] - next_counts[2 + w], 0)
                locate(next_place, T.min(cta + (item + 1) * grid, n.items - 1), n)
                for x in T.unroll(4):
                    next_counts[x] = mem.counts[next_place[0], x]
                if ahead:
                    for x in T.unroll(P):
                        next_mask[x] = mem.masks[listed, x]
                T.fill(o, 0)
                T.fill(row.sum, 0)
                T.fill(row.m, -_INF)
                T.barrier_wait(mem.q_ready[w], item & 1)
                # Steps in which single keys are hidden, or whose boxes were left over; both warpgroups take part in all of them.
                for t in T.serial(masked):
                    advance(mask, next_mask, mem.masks, listed, t)
                    T.barrier_wait(mem.k_ready[c & (KST - 1)], (c >> K_LOG) & 1)
                    multiply(mem, s, c)
                    any_hidden = 0
                    T.wait_wgmma(0)
                    T.barrier_arrive(mem.k_free[c & (KST - 1)])
                    for x in boxes:
                        whereabouts(block, start, hidden, mem.boxes[listed, t * P + x], mask[x], first, n)
                        for r in T.Parallel(ROWS):
                            limit[r] = T.Select(
                                ((mask[x] >> (w * TW + query_of(r))) & 1) != 0,
                                T.min(
                                    T.min(first + w * TW + query_of(r) + n.q_offset, n.M - 1) - block - start,
                                    n.block_size - start - 1,
                                ),
                                -1,
                            )
                        for r, j in T.Parallel(ROWS, BX):
                            s[r, x * BX + j] = T.Select(j <= limit[r], s[r, x * BX + j], T.cast(-_INF, f32))
                        any_hidden = any_hidden | T.Select(hidden < BX, 1, 0)
                    exponentiate(s, row, None, n.scale, grown)
                    rescale(o, row, grown)
                    T.copy(s, p)
                    T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                    if any_hidden != 0:
                        # They may never have been written, and 0 times NaN is NaN. Both warpgroups write the same zeros: neither
                        # waits for the other.
                        for x in boxes:
                            whereabouts(block, start, hidden, mem.boxes[listed, t * P + x], mask[x], first, n)
                            for r, d in T.Parallel(BX, DVP):
                                if r >= hidden:
                                    mem.v[c & (VST - 1), x * BX + r, d] = 0
                        T.fence_proxy_async()
                        T.sync_threads(_FIRST_BARRIER + w, 128)
                    held = c
                    if t < masked - 1:
                        weigh(mem, p, o, c)
                        T.wait_wgmma(0)
                        T.barrier_arrive(mem.v_free[c & (VST - 1)])
                    c = c + 1
                if masked > 0:  # else the list is empty
                    for t_ in T.serial(end - masked):
                        t = t_ + masked
                        advance(mask, next_mask, mem.masks, listed, t)
                        needed = 0
                        for x in T.unroll(P):
                            mask[x] = mask[x] >> (w * TW)
                            needed = needed | mask[x]
                        T.barrier_wait(mem.k_ready[c & (KST - 1)], (c >> K_LOG) & 1)
                        if (needed & LOW) != 0:
                            multiply(mem, s, c)
                            weigh(mem, p, o, held)
                            T.wait_wgmma(1)
                            T.barrier_arrive(mem.k_free[c & (KST - 1)])
                            exponentiate(
                                s, row, lambda x, r: ((mask[x] >> query_of(r)) & 1) != 0, n.scale, grown
                            )
                            # The fence and a barrier, which is a loop, keep ptxas from waiting for the product before the softmax.
                            T.warpgroup_fence_operand(s, num_regs=ROWS * BN // 128)
                            T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                            T.wait_wgmma(0)
                            T.barrier_arrive(mem.v_free[held & (VST - 1)])
                            rescale(o, row, grown)
                            T.copy(s, p)
                            held = c
                        else:
                            T.barrier_arrive(mem.k_free[c & (KST - 1)])
                            T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                            T.barrier_arrive(mem.v_free[c & (VST - 1)])
                        c = c + 1
                    T.barrier_arrive(mem.q_free[w])
                    weigh(mem, p, o, held)
                    T.wait_wgmma(0)
                    T.barrier_arrive(mem.v_free[held & (VST - 1)])
                    for _ in T.serial(total - end):
                        T.barrier_wait(mem.k_ready[c & (KST - 1)], (c >> K_LOG) & 1)
                        T.barrier_arrive(mem.k_free[c & (KST - 1)])
                        T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                        T.barrier_arrive(mem.v_free[c & (VST - 1)])
                        c = c + 1
                else:
                    T.barrier_arrive(mem.q_free[w])
                if n.want_lse != 0:
                    for r in T.Parallel(ROWS):
                        if head_of(r) < heads and first + w * TW + query_of(r) < n.N:
                            mem.lse[b, head + head_of(r), first + w * TW + query_of(r)] = (
                                row.m[r] * n.scale + T.log2(row.sum[r])
                            ) * 0.6931471805599453
                # The sum is 0 for a row that saw nothing, and then so is the result; NaN stays NaN.
                for r in T.Parallel(ROWS):
                    row.sum[r] = T.Select(row.sum[r] == 0.0, T.cast(0, f32), 1.0 / row.sum[r])
                for r, d in T.Parallel(ROWS, DVP):
                    if head_of(r) < heads and first + w * TW + query_of(r) < n.N and d < DV:
                        mem.out[b, head + head_of(r), first + w * TW + query_of(r), d] = T.cast(
                            o[r, d] * row.sum[r], dtype
                        )

        return body

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
        c = 0
        locate(place, cta, n)
        next_total = (
            mem.counts[place[0], 0] + mem.counts[place[0], 1] + mem.counts[place[0], 2] + mem.counts[place[0], 3]
        )
        if ahead:
            for x in T.unroll(P):
                next_box[x] = mem.boxes[place[0], x]
        for item in T.serial((n.items - cta + grid - 1) // grid):
            listed = place[0]
            b = place[1]
            h = place[3]
            total = next_total
            locate(place, T.min(cta + (item + 1) * grid, n.items - 1), n)
            next_total = (
                mem.counts[place[0], 0] + mem.counts[place[0], 1] + mem.counts[place[0], 2] + mem.counts[place[0], 3]
            )
            if ahead:
                for x in T.unroll(P):
                    first_box[x] = mem.boxes[place[0], x]
            for t in T.serial(total):
                advance(box, next_box, mem.boxes, listed, t)
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

    @T.macro
    def load_queries(mem, n, cta, grid):
        """Another warp's part."""
        place = T.alloc_local([6], i32)
        for item in T.serial((n.items - cta + grid - 1) // grid):
            locate(place, cta + item * grid, n)
            for w in warpgroups:
                T.barrier_wait(mem.q_free[w], (item & 1) ^ 1)
                for y in q_columns:
                    for i in loads:
                        if query_major:
                            T.tma_copy(
                                mem.Q[place[1], place[2] : place[2] + HP, place[4] + (w * TW + i), y : y + COLUMNS],
                                mem.q[w, i * HP : i * HP + HP, y : y + COLUMNS],
                                barrier=mem.q_ready[w],
                            )
                        else:
                            T.tma_copy(
                                mem.Q[
                                    place[1],
                                    place[2] + i,
                                    place[4] + w * TW : place[4] + (w * TW + TW),
                                    y : y + COLUMNS,
                                ],
                                mem.q[w, i * TW : i * TW + TW, y : y + COLUMNS],
                                barrier=mem.q_ready[w],
                            )
                T.barrier_arrive(mem.q_ready[w])

    consumers = tuple(consumer(w) for w in warpgroups)
    B, Hq, Hk, N, keys, lists, capacity = (
        T.dynamic(name) for name in ("B", "Hq", "Hk", "N", "keys", "lists", "capacity")
    )
    l_b, l_h, l_n = (T.dynamic(name) for name in ("l_b", "l_h", "l_n"))
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n = (
        T.dynamic(name, "int64") for name in ("q_b", "q_h", "q_n", "k_b", "k_h", "k_n", "v_b", "v_h", "v_n")
    )

    @T.prim_func
    def sparse_attn_union(
        Q: T.StridedTensor([B, Hq, N, D], [q_b, q_h, q_n, 1], dtype),
        K: T.StridedTensor([B, Hk, keys, D], [k_b, k_h, k_n, 1], dtype),
        V: T.StridedTensor([B, Hk, keys, DV], [v_b, v_h, v_n, 1], dtype),
        list_boxes: T.Tensor([lists, capacity], i32),
        list_masks: T.Tensor([lists, capacity], i32),
        list_counts: T.Tensor([lists, 4], i32),
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
        grid: i32,
    ):
        with T.Kernel(grid, threads=128 * (W + 1)) as cta:
            mem = SimpleNamespace(
                Q=Q, K=K, V=V, out=out, lse=lse, boxes=list_boxes, masks=list_masks, counts=list_counts,
                q=T.alloc_shared([W, ROWS, DP], dtype),
                k=T.alloc_shared([KST, BN, DP], dtype),
                v=T.alloc_shared([VST, BN, DVP], dtype),
                q_ready=T.alloc_barrier(arrive_count=[32] * W),
                q_free=T.alloc_barrier(arrive_count=[128] * W),
                k_ready=T.alloc_barrier(arrive_count=[32] * KST),
                k_free=T.alloc_barrier(arrive_count=[128 * W] * KST),
                v_ready=T.alloc_barrier(arrive_count=[32] * VST),
                v_free=T.alloc_barrier(arrive_count=[128 * W] * VST),
            )  # fmt: skip
            n = SimpleNamespace(
                scale=scale, want_lse=want_lse, M=M, N=N, block_size=block_size, boxes_per_block=boxes_per_block,
                q_offset=q_offset, g=g, chunks=chunks, Hk=Hk, tiles=tiles_of_head, items=B * Hk * chunks * tiles_of_head,
            )  # fmt: skip
            thread = T.get_thread_binding()
            if thread < 128:
                if W == 2:
                    T.set_max_nreg(224, 1)
                consumers[0](mem, n, cta, grid)
            elif W == 2 and thread < 256:
                T.set_max_nreg(224, 1)
                consumers[-1](mem, n, cta, grid)
            else:
                if W == 2:
                    T.set_max_nreg(56, 0)
                if thread < 128 * W + 32:
                    load_keys_and_values(mem, n, cta, grid)
                elif thread < 128 * W + 64:
                    load_queries(mem, n, cta, grid)

    return sparse_attn_union
