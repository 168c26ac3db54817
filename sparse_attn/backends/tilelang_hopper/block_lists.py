"""Block lists: which boxes of keys a tile of queries has to walk, and which of its queries selected each.

This is where the set semantics of ``index`` are settled, once: a list names every box once, however often and in
whatever order the queries of the tile named its block, and leaves out ids that mean nothing and boxes that causality
empties. A box is the part of a block that is copied as one: all of it, up to 128 keys.

A list is made of steps of ``BN // box`` boxes, in this order:

* masked steps: boxes in which some key is hidden from some query (behind the diagonal, past the end of the keys or of
  the block), and what the other kinds leave over; padded with a box that nobody selected;
* then steps that both warpgroups' queries need. Spread evenly among them are pairs of a step that only the first
  warpgroup needs and one that only the second does: such pairs load twice as much for the same work. What one has more
  than the other comes last.

A list that is not empty has a masked step.
"""

from types import SimpleNamespace

import tilelang.language as T

from .order import place_of
from .plan import WINDOW, Tiles

# Tiles of a block of the grid, one for each warp.
WARPS = 4
# Key blocks looked at together: a mask of each lies in shared memory.
_BLOCKS = 1024
_LANES = 32
# Ids that a lane reads before it waits for them.
_AHEAD = 4
# Kinds of boxes.
_MASKED, _BOTH, _FIRST, _SECOND, _NONE = range(5)


def block_lists_kernel(tiles: Tiles, index_dtype: str):
    """The kernel that fills lists for tiles of one shape, to be compiled; lengths and strides are arguments of it.

    It fills ``boxes`` and ``masks`` ``[B * Hk * tiles, capacity]``, numbers of boxes and masks of queries (bit t for
    the tile's query t), and of ``counts`` ``[B * Hk * tiles, tiles.facts]`` the first four: masked steps, steps for
    both warpgroups, for the first only, for the second only. Where tiles are ordered, the rest says their queries.
    """
    TQ, BX, P = tiles.queries, tiles.box, tiles.BN // tiles.box
    HALF = TQ // tiles.warpgroups
    LOW = (1 << HALF) - 1 if tiles.warpgroups == 2 else -1
    B, Hk, N, topk, lists, capacity = (T.dynamic(name) for name in ("B", "Hk", "N", "topk", "lists", "capacity"))
    i_b, i_h, i_n, i_t = (T.dynamic(name, "int64") for name in ("i_b", "i_h", "i_n", "i_t"))
    i32, u32 = T.int32, T.uint32
    warpgroups, queries = tuple(range(tiles.warpgroups)), tuple(range(TQ))

    def query_at(n, t):
        """Query t of a tile: see ``order.py``."""
        if not tiles.ordered:
            return n.first_query + t
        word = n.words[0] if tiles.warpgroups == 1 else T.Select(t < HALF, n.words[0], n.words[1])
        return n.first_query + place_of(word, t % HALF)

    @T.macro
    def collect(index, masks, warp, lane, b, h, n):
        """OR each query's bit into the masks of the blocks that it selected, of ``size`` blocks from ``start`` on."""
        ids = T.alloc_local([_AHEAD], i32)
        slot = T.alloc_var(i32)
        t = T.alloc_var(i32)
        query = T.alloc_var(i32)
        T.sync_warp()
        for z in T.serial((n.size + _LANES - 1) // _LANES):
            masks[warp, z * _LANES + lane] = 0
        T.sync_warp()
        for z in T.serial((TQ * topk + _LANES * _AHEAD - 1) // (_LANES * _AHEAD)):
            for x in T.unroll(_AHEAD):
                slot = (z * _AHEAD + x) * _LANES + lane
                t = T.truncdiv(slot, topk)
                query = query_at(n, t)
                ids[x] = -1
                if t < TQ and query < N:
                    # Clamped before it is narrowed: an id may be any number.
                    ids[x] = T.cast(T.max(T.min(index[b, h, query, slot - t * topk], n.stop), -1), i32)
            for x in T.unroll(_AHEAD):
                slot = (z * _AHEAD + x) * _LANES + lane
                t = T.truncdiv(slot, topk)
                ids[x] = ids[x] - n.start
                if ids[x] >= 0 and ids[x] < n.size:  # noqa: SIM102 -- before it is multiplied
                    if (ids[x] + n.start) * n.block_size <= query_at(n, t) + n.q_offset:
                        T.call_extern("int32", "atomicOr", T.address_of(masks[warp, ids[x]]), 1 << t)
        T.sync_warp()

    @T.prim_func
    def sparse_attn_block_lists(
        index: T.StridedTensor([B, Hk, N, topk], [i_b, i_h, i_n, i_t], index_dtype),
        boxes: T.Tensor([lists, capacity], i32),
        masks_out: T.Tensor([lists, capacity], i32),
        counts: T.Tensor([lists, tiles.facts], i32),
        M: i32,
        block_size: i32,
        boxes_per_block: i32,
        q_offset: i32,
        tiles_of_head: i32,
    ):
        with T.Kernel(T.ceildiv(tiles_of_head, WARPS), Hk, B, threads=_LANES * WARPS) as (bx, h, b):
            T.pdl_trigger()  # the kernel that walks them may be started, and waits by itself
            if tiles.ordered:
                T.pdl_sync()  # the order
            masks = T.alloc_shared([WARPS, _BLOCKS], i32)
            thread = T.get_thread_binding()
            lane = thread % _LANES
            warp = thread // _LANES
            tile = bx * WARPS + warp
            stop = T.alloc_var(i32)  # no query of the tile sees a key of a block from here on
            start = T.alloc_var(i32)
            size = T.alloc_var(i32)
            box = T.alloc_var(i32)
            block = T.alloc_var(i32)
            position = T.alloc_var(i32)
            mask = T.alloc_var(i32)
            kind = T.alloc_var(i32)
            rank = T.alloc_var(i32)
            step = T.alloc_var(i32)
            pairs = T.alloc_var(i32)
            votes = T.alloc_var(u32)
            masked_steps = T.alloc_var(i32)
            found = T.alloc_local([4], i32)  # boxes of each kind so far
            steps = T.alloc_local([4], i32)  # of each kind
            over = T.alloc_local([4], i32)  # boxes of each kind that go to masked steps, and where there
            place = T.alloc_local([5], i32)
            words = T.alloc_local([tiles.warpgroups], i32)
            first_query = T.alloc_var(i32)
            first_position = T.alloc_var(i32)  # of the first of them, and of the last
            last_position = T.alloc_var(i32)
            if tile < tiles_of_head:
                row = (b * Hk + h) * tiles_of_head + tile
                first_query = tile * TQ
                if tiles.ordered:
                    first_query = first_query // WINDOW * WINDOW
                    for w in warpgroups:
                        words[w] = counts[row, 4 + w]
                places = SimpleNamespace(first_query=first_query, words=words)
                first_position = query_at(places, 0)
                last_position = query_at(places, TQ - 1)
                if tiles.ordered and tiles.warpgroups == 2:  # of which each has its queries in order
                    first_position = T.min(first_position, query_at(places, HALF))
                    last_position = T.max(last_position, query_at(places, HALF - 1))
                first_position = first_position + q_offset
                last_position = T.min(last_position, N - 1) + q_offset
                stop = 0
                if last_position >= 0:
                    stop = T.min(T.truncdiv(M + block_size - 1, block_size), T.truncdiv(last_position, block_size) + 1)
                masked_steps = 0
                for x in T.unroll(4):
                    found[x] = 0
                    steps[x] = 0
                    over[x] = 0
                    place[x] = 0
                place[4] = 0
                for fills in T.serial(2):  # counted first, then filled
                    for chunk in T.serial((stop + _BLOCKS - 1) // _BLOCKS):
                        start = chunk * _BLOCKS
                        size = T.min(_BLOCKS, stop - start)
                        if fills == 0 or stop > _BLOCKS:
                            n = SimpleNamespace(
                                first_query=first_query, words=words, start=start, size=size, stop=stop,
                                block_size=block_size, q_offset=q_offset,
                            )  # fmt: skip
                            collect(index, masks, warp, lane, b, h, n)
                        for z in T.serial((size * boxes_per_block + _LANES - 1) // _LANES):
                            box = z * _LANES + lane
                            block = T.truncdiv(box, boxes_per_block)
                            mask = 0
                            if block < size:
                                mask = masks[warp, block]
                            position = (box - block * boxes_per_block) * BX  # in the block, then among all keys
                            kind = T.Select(position + BX > block_size, _MASKED, _BOTH)
                            position = position + (block + start) * block_size
                            box = box + start * boxes_per_block
                            # Not the queries before it; before a whole block are none.
                            if boxes_per_block > 1 and position > first_position:
                                if tiles.ordered:
                                    for t in queries:
                                        if query_at(places, t) + q_offset < position:
                                            mask = mask & ~(1 << t)
                                else:
                                    mask = T.Select(
                                        position - first_position >= TQ,
                                        0,
                                        mask & (-1 << T.min(position - first_position, 31)),
                                    )
                            kind = T.Select(position + BX - 1 > first_position or position + BX > M, _MASKED, kind)
                            if tiles.warpgroups == 2:
                                kind = T.Select(kind == _BOTH and (mask & LOW) == 0, _SECOND, kind)
                                kind = T.Select(kind == _BOTH and ((mask >> HALF) & LOW) == 0, _FIRST, kind)
                            kind = T.Select(mask == 0, _NONE, kind)
                            for x in T.unroll(4):
                                votes = T.cast(T.ballot(kind == x), u32)
                                if fills == 1 and kind == x:
                                    rank = found[x] + T.popcount(
                                        votes & ((T.cast(1, u32) << T.cast(lane, u32)) - T.cast(1, u32))
                                    )
                                    if rank < over[x]:
                                        step = place[x] + rank
                                    else:
                                        rank = rank - over[x]
                                        step = rank // P
                                        pairs = T.min(steps[_FIRST], steps[_SECOND])
                                        if x == _BOTH:
                                            step = step + 2 * T.min(
                                                pairs, T.truncdiv((step + 1) * (pairs + 1) - 1, steps[_BOTH])
                                            )
                                        elif step < pairs:
                                            step = (
                                                2 * step
                                                + (x - _FIRST)
                                                + T.truncdiv((step + 1) * steps[_BOTH], pairs + 1)
                                            )
                                        else:
                                            step = steps[_BOTH] + pairs + step
                                        step = (masked_steps + step) * P + rank % P
                                    boxes[row, step] = box
                                    masks_out[row, step] = mask
                                found[x] = found[x] + T.popcount(votes)
                    if fills == 0:
                        over[_MASKED] = found[_MASKED]
                        for x in T.unroll(1, 4):
                            steps[x] = found[x] // P
                            over[x] = found[x] % P
                        if over[0] + over[1] + over[2] + over[3] == 0:
                            if steps[_BOTH] > 0:
                                steps[_BOTH] = steps[_BOTH] - 1
                                over[_BOTH] = P
                            elif steps[_FIRST] > 0:
                                steps[_FIRST] = steps[_FIRST] - 1
                                over[_FIRST] = P
                            elif steps[_SECOND] > 0:
                                steps[_SECOND] = steps[_SECOND] - 1
                                over[_SECOND] = P
                        for x in T.unroll(4):
                            place[x + 1] = place[x] + over[x]
                            found[x] = 0
                        masked_steps = (place[4] + P - 1) // P
                        if lane == 0:
                            counts[row, 0] = masked_steps
                            for x in T.unroll(1, 4):
                                counts[row, x] = steps[x]
                        if lane < masked_steps * P - place[4]:
                            boxes[row, place[4] + lane] = 0
                            masks_out[row, place[4] + lane] = 0

    return sparse_attn_block_lists
