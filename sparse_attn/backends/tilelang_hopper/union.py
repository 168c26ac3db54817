"""The union kernel for Hopper: warps that load, and warpgroups that multiply, walk the union of a tile's blocks once.

A tile is 4 queries of 16 heads (or 8 of 8, ...) for each warpgroup: the 64 rows of a wgmma. They are adjacent, or those
that ``order.py`` put together. Two warpgroups share what is loaded, 128 keys a step, and each leaves out the steps that
none of its own queries selected. A block stays on its multiprocessor for the whole launch and takes one tile after the
other: loads for the next begin while the last is being finished.

The softmax is FlashAttention-3's inner overlap (Shah et al., 2024, algorithm 2): scores of a step are multiplied while
the step before is weighed, and turned into weights while that product still runs. Sums are rescaled only where a
maximum grew by more than 2**8, as in FlashAttention-4: the result is the same, since weights and sums refer to the same
number.
"""

from types import SimpleNamespace

import tilelang.language as T

from .parts import COLUMNS, FIRST_BARRIER, PRELUDE, WARPGROUP_ROWS, entry, parts, rings, row_state
from .plan import Tiles

_INF = float("inf")


def union_kernel(tiles: Tiles, dtype: str):
    """The kernel for tiles of one shape, to be compiled; lengths, strides and batch are arguments of it."""
    BN, W, KST, VST = tiles.BN, tiles.warpgroups, tiles.k_stages, tiles.v_stages
    HP, TW, P = tiles.heads, tiles.queries // tiles.warpgroups, tiles.BN // tiles.box
    DP, DVP, ROWS = tiles.D_padded, tiles.Dv_padded, WARPGROUP_ROWS * W
    LOW = (1 << TW) - 1
    K_LOG, V_LOG = KST.bit_length() - 1, VST.bit_length() - 1
    # Tuples, since the compiler makes loops of ranges: these are unrolled in Python.
    warpgroups, q_columns = tuple(range(W)), tuple(range(0, DP, COLUMNS))
    do = parts(tiles, dtype)
    loads = tuple(range(TW if do.query_major else HP))
    f32, i32 = T.float32, T.int32
    full_rows = T.GemmWarpPolicy.FullRow

    @T.macro
    def multiply(mem, s, step):
        T.wgmma_gemm(
            mem.q[:, :], mem.k[step & (KST - 1), :, :], s, transpose_B=True, policy=full_rows, clear_accum=True
        )

    @T.macro
    def weigh(mem, p, o, step):
        T.wgmma_gemm(p, mem.v[step & (VST - 1), :, :], o, policy=full_rows)

    @T.macro
    def look_ahead(mem, place, counts, words, masks, boxes):
        """What the list of the next tile begins with."""
        for x in T.unroll(4):
            counts[x] = mem.counts[place[0], x]
        for x in T.unroll(do.words):
            words[x] = mem.counts[place[0], 4 + x]
        do.prefetch(masks, mem.masks, place[0], 0)
        do.prefetch(boxes, mem.boxes, place[0], 0)

    @T.macro
    def consume(mem, n, cta, grid):
        """The warpgroups that multiply: each for itself, but for what they share in memory. One code for both of them:
        two would not stay in the instruction cache."""
        s = T.alloc_fragment([ROWS, BN], f32)
        p = T.alloc_fragment([ROWS, BN], dtype)
        o = T.alloc_fragment([ROWS, DVP], f32)
        row = row_state(ROWS)
        limit = T.alloc_fragment([ROWS], i32)
        mask = T.alloc_local([P], i32)
        box = T.alloc_local([P if do.ahead else 1], i32)
        next_mask, next_box, first_mask, first_box = (T.alloc_local([P if do.ahead else 1], i32) for _ in range(4))
        next_counts = T.alloc_local([4], i32)
        next_words, words = (T.alloc_local([max(1, do.words)], i32) for _ in range(2))
        own = T.alloc_local([1], i32)  # this warpgroup's
        next_place = T.alloc_local([6], i32)
        listed = T.alloc_var(i32)
        b = T.alloc_var(i32)
        head = T.alloc_var(i32)
        first = T.alloc_var(i32)
        heads = T.alloc_var(i32)
        needed = T.alloc_var(i32)
        any_hidden = T.alloc_var(i32)
        grown = T.alloc_var(i32)
        masked = T.alloc_var(i32)
        total = T.alloc_var(i32)
        end = T.alloc_var(i32)
        held = T.alloc_var(i32)
        seen = T.alloc_var(i32)  # this warpgroup's queries that take any box
        c = T.alloc_var(i32)  # steps so far, of all tiles: the place in the rings
        turns = T.alloc_var(i32)
        thread = T.get_thread_binding()
        # Told that all lanes of a warp have the same number, the compiler works out addresses once for all of them.
        w = T.shfl_sync(thread // 128, 0) if W == 2 else 0
        c = 0
        do.turns_of(turns, cta, grid, n)
        do.locate(next_place, 0, cta, grid, n)
        look_ahead(mem, next_place, next_counts, next_words, first_mask, first_box)
        for item in T.serial(turns):
            if do.ahead:
                for x in T.unroll(P):
                    next_mask[x] = first_mask[x]
                    next_box[x] = first_box[x]
            listed = next_place[0]
            b = next_place[1]
            head = next_place[2]
            first = next_place[4]
            for x in T.unroll(do.words):
                words[x] = next_words[x]
            if do.words == 1:
                own[0] = words[0]
            if do.words == 2:
                own[0] = T.Select(w == 0, words[0], words[1])
            tile = SimpleNamespace(first=first, words=words, own=own)
            heads = next_place[5]
            masked = next_counts[0]
            total = next_counts[0] + next_counts[1] + next_counts[2] + next_counts[3]
            end = total  # of the steps that may be this warpgroup's
            if W == 2:
                # Steps of one warpgroup alone alternate, until one has no more: it need not wait for the other's.
                ahead_of = next_counts[3] - next_counts[2]
                end = end - T.max(T.Select(w == 0, ahead_of, -ahead_of), 0)
            do.locate(next_place, item + 1, cta, grid, n)
            look_ahead(mem, next_place, next_counts, next_words, first_mask, first_box)
            seen = 0
            T.fill(o, 0)
            T.fill(row.sum, 0)
            T.fill(row.m, -_INF)
            T.barrier_wait(mem.q_ready[w], item & 1)
            # Steps in which single keys are hidden, or of boxes that were left over: all take part in all of them.
            for t in T.serial(masked):
                do.take(mask, next_mask, mem.masks, listed, t)
                if do.ahead:
                    do.take(box, next_box, mem.boxes, listed, t)
                box_of = (lambda x: box[x]) if do.ahead else (lambda x: mem.boxes[listed, t * P + x])  # noqa: B023
                for x in T.unroll(P):
                    seen = seen | mask[x]
                T.barrier_wait(mem.k_ready[c & (KST - 1)], (c >> K_LOG) & 1)
                multiply(mem, s, c)
                do.prefetch(next_mask, mem.masks, listed, t + 1)
                do.prefetch(next_box, mem.boxes, listed, t + 1)
                do.look(any_hidden, box_of, mask, tile, n)
                T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                if any_hidden != 0:
                    # Both warpgroups write the same zeros: neither waits for the other.
                    do.zero_hidden(mem, thread % 128, c, box_of, mask, tile, n)
                    T.fence_proxy_async()
                    T.sync_threads(FIRST_BARRIER + w, 128)
                T.wait_wgmma(0)
                T.barrier_arrive(mem.k_free[c & (KST - 1)])
                if t == end - 1:
                    T.barrier_arrive(mem.q_free[w])
                do.hide(s, limit, box_of, mask, tile, n)
                do.exponentiate(thread, s, row, None, n.scale, grown)
                do.rescale(o, row, grown)
                T.copy(s, p)
                held = c
                if t < masked - 1:
                    weigh(mem, p, o, c)
                    T.wait_wgmma(0)
                    T.barrier_arrive(mem.v_free[c & (VST - 1)])
                c = c + 1
            if masked > 0:  # else the list is empty
                for t_ in T.serial(end - masked):
                    t = t_ + masked
                    do.take(mask, next_mask, mem.masks, listed, t)
                    do.prefetch(next_mask, mem.masks, listed, t + 1)
                    needed = 0
                    for x in T.unroll(P):
                        needed = needed | mask[x]
                    seen = seen | needed
                    T.barrier_wait(mem.k_ready[c & (KST - 1)], (c >> K_LOG) & 1)
                    if ((needed >> (w * TW)) & LOW) != 0:
                        multiply(mem, s, c)
                        weigh(mem, p, o, held)
                        T.wait_wgmma(1)
                        T.barrier_arrive(mem.k_free[c & (KST - 1)])
                        if t == end - 1:  # the next tile's queries may come
                            T.barrier_arrive(mem.q_free[w])
                        do.exponentiate(
                            thread, s, row, lambda x, r: ((mask[x] >> do.query_of(r)) & 1) != 0, n.scale, grown
                        )
                        # The fence, and a barrier's loop, keep ptxas from waiting for the product before that.
                        T.warpgroup_fence_operand(s, num_regs=WARPGROUP_ROWS * BN // 128)
                        T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                        T.wait_wgmma(0)
                        T.barrier_arrive(mem.v_free[held & (VST - 1)])
                        do.rescale(o, row, grown)
                        T.copy(s, p)
                        held = c
                    else:
                        T.barrier_arrive(mem.k_free[c & (KST - 1)])
                        if t == end - 1:
                            T.barrier_arrive(mem.q_free[w])
                        T.barrier_wait(mem.v_ready[c & (VST - 1)], (c >> V_LOG) & 1)
                        T.barrier_arrive(mem.v_free[c & (VST - 1)])
                    c = c + 1
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
            do.store(mem, thread, o, row, seen, b, head, heads, tile, n)

    @T.macro
    def load_queries(mem, n, cta, grid):
        """Another warp's part."""
        place = T.alloc_local([6], i32)
        words = T.alloc_local([max(1, do.words)], i32)
        first = T.alloc_var(i32)
        turns = T.alloc_var(i32)
        do.turns_of(turns, cta, grid, n)
        for item in T.serial(turns):
            do.locate(place, item, cta, grid, n)
            for x in T.unroll(do.words):
                words[x] = mem.counts[place[0], 4 + x]
            first = place[4]
            tile = SimpleNamespace(first=first, words=words)
            for w in warpgroups:
                T.barrier_wait(mem.q_free[w], (item & 1) ^ 1)
                for y in q_columns:
                    for i in loads:
                        if do.query_major:
                            T.tma_copy(
                                mem.Q[
                                    place[1],
                                    place[2] : place[2] + HP,
                                    do.query_at(tile, w * TW + i, w),
                                    y : y + COLUMNS,
                                ],
                                mem.q[
                                    w * WARPGROUP_ROWS + i * HP : w * WARPGROUP_ROWS + (i * HP + HP), y : y + COLUMNS
                                ],
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
                                mem.q[
                                    w * WARPGROUP_ROWS + i * TW : w * WARPGROUP_ROWS + (i * TW + TW), y : y + COLUMNS
                                ],
                                barrier=mem.q_ready[w],
                            )
                T.barrier_arrive(mem.q_ready[w])

    @T.macro
    def run(args, n, cta, grid):
        mem = SimpleNamespace(
            **vars(args),
            **vars(rings(tiles, dtype, 128 * W)),
            q=T.alloc_shared([ROWS, DP], dtype),
            q_ready=T.alloc_barrier(arrive_count=[32] * W),
            q_free=T.alloc_barrier(arrive_count=[128] * W),
        )
        T.pdl_sync()  # the lists: this kernel may be started while they are made
        thread = T.get_thread_binding()
        if thread < 128 * W:
            if W == 2:
                T.set_max_nreg(224, 1)
            consume(mem, n, cta, grid)
        else:
            if W == 2:
                T.set_max_nreg(56, 0)
            if thread < 128 * W + 32:
                do.load_keys_and_values(mem, n, cta, grid)
            elif thread < 128 * W + 64:
                load_queries(mem, n, cta, grid)

    return entry(tiles, dtype, 128 * (W + 1), run, "sparse_attn_union", PRELUDE)
