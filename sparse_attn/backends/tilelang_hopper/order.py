"""Which queries make a tile: those of a window that selected much the same.

The union kernel multiplies a warpgroup's queries by every block that any of them selected. With adjacent queries that
is, for a random selection, up to twice what they need; of more queries, some agree. They are taken greedily: the first
that is left, and then, until the warpgroup is full, whichever adds fewest blocks to those that are in.

A window at the end that is not full keeps its order, and so does a problem whose plan says that it would not gain.
"""

from types import SimpleNamespace

import tilelang.language as T

from .plan import WINDOW, Tiles

_LANES = 32
# Windows of a block of the grid, one for each warp.
_WARPS = 4
# Queries of a window that a lane looks at.
_CANDIDATES = WINDOW // _LANES
_BITS = 32
# Ids of a query that a warp reads at once: all 32 would be bits of few words, whose atomics wait for each other; one of
# each of 32 queries would be as many lines of the L1.
_SIDE_BY_SIDE = 8
# Ids that a lane reads before it waits for them.
_AHEAD = 8
# Words of sets that are looked at together.
_TOGETHER = 4


def place_of(word, query):
    """The place in the window of a warpgroup's query: byte ``query`` of its word."""
    return T.cast(T.call_extern("uint32", "__byte_perm", word, 0, 0x4440 + query), "int32")  # the other bytes are 0's


def order_kernel(tiles: Tiles, index_dtype: str, words: int):
    """The kernel that fills ``counts[:, 4:]`` of ``[B * Hk * tiles, 4 + warpgroups]``, to be compiled.

    A word has a byte for each of a warpgroup's queries, in ascending order: its place in the window. There are up to
    32 ``words`` blocks; other lengths are arguments of the kernel.
    """
    W, G, FACTS = tiles.warpgroups, tiles.queries // tiles.warpgroups, tiles.facts
    # Of a query's set, one word more than it needs: lanes that read the same word of theirs hit different banks.
    STRIDE = words + 1
    ROWS = _LANES // _SIDE_BY_SIDE
    candidates, members = tuple(range(_CANDIDATES)), tuple(range(1, G))
    parts, together = tuple(range(0, words, _TOGETHER)), tuple(range(_TOGETHER))
    B, Hk, N, topk, lists = (T.dynamic(name) for name in ("B", "Hk", "N", "topk", "lists"))
    i_b, i_h, i_n, i_t = (T.dynamic(name, "int64") for name in ("i_b", "i_h", "i_n", "i_t"))
    i32, u32 = T.int32, T.uint32

    def least(key):
        return T.call_extern("uint32", "__reduce_min_sync", T.cast(0xFFFFFFFF, u32), key)

    @T.macro
    def collect(index, sets, warp, lane, b, h, first, n):
        """Bits of the blocks that each query selected, and of which it may see a key."""
        ids = T.alloc_local([_AHEAD], i32)
        slot = T.alloc_var(i32)
        query = T.alloc_var(i32)
        for z in T.serial(WINDOW * STRIDE // _LANES):
            sets[warp, z * _LANES + lane] = T.cast(0, u32)
        T.sync_warp()
        for z in T.serial((topk + _SIDE_BY_SIDE - 1) // _SIDE_BY_SIDE):
            slot = z * _SIDE_BY_SIDE + lane % _SIDE_BY_SIDE
            for y in T.serial(WINDOW // (_AHEAD * ROWS)):
                for x in T.unroll(_AHEAD):
                    query = (y * _AHEAD + x) * ROWS + lane // _SIDE_BY_SIDE
                    ids[x] = -1
                    if slot < topk:
                        # Clamped before it is narrowed: an id may be any number.
                        ids[x] = T.cast(T.max(T.min(index[b, h, first + query, slot], n.blocks), -1), i32)
                for x in T.unroll(_AHEAD):
                    query = (y * _AHEAD + x) * ROWS + lane // _SIDE_BY_SIDE
                    if ids[x] >= 0 and ids[x] < n.blocks:  # noqa: SIM102 -- before it is multiplied
                        if ids[x] * n.block_size <= first + query + n.q_offset:
                            T.call_extern(
                                "uint32", "atomicOr", T.address_of(sets[warp, query * STRIDE + ids[x] // _BITS]),
                                T.cast(1, u32) << T.cast(ids[x] % _BITS, u32),
                            )  # fmt: skip
        T.sync_warp()

    @T.macro
    def add(query, union, grown, sets, warp, lane, n):
        """Put a query's blocks into ``union``; then ``grown`` is how many each candidate would add."""
        T.clear(grown)
        for z in parts:
            if z * _BITS < n.blocks:
                for y in together:
                    union[z + y] = union[z + y] | sets[warp, query * STRIDE + (z + y)]
                    for x in candidates:
                        grown[x] = grown[x] + T.cast(
                            T.popcount(sets[warp, (x * _LANES + lane) * STRIDE + (z + y)] & ~union[z + y]), i32
                        )

    @T.prim_func
    def sparse_attn_order(
        index: T.StridedTensor([B, Hk, N, topk], [i_b, i_h, i_n, i_t], index_dtype),
        counts: T.Tensor([lists, FACTS], i32),
        blocks: i32,
        block_size: i32,
        q_offset: i32,
        tiles_of_head: i32,
    ):
        with T.Kernel(T.ceildiv(N, WINDOW * _WARPS), Hk, B, threads=_LANES * _WARPS) as (bx, h, b):
            T.pdl_trigger()  # the kernel that makes lists may be started, and waits by itself
            sets = T.alloc_shared([_WARPS, WINDOW * STRIDE], u32)
            thread = T.get_thread_binding()
            lane = thread % _LANES
            warp = thread // _LANES
            union = T.alloc_local([words], u32)
            grown = T.alloc_local([_CANDIDATES], i32)
            found = T.alloc_local([G], i32)
            first = T.alloc_var(i32)
            row = T.alloc_var(i32)
            left = T.alloc_var(i32)  # bit i: query 32 * i + lane is in no group yet
            query = T.alloc_var(i32)
            key = T.alloc_var(u32)
            word = T.alloc_var(i32)
            swap = T.alloc_var(i32)
            first = (bx * _WARPS + warp) * WINDOW
            row = (b * Hk + h) * tiles_of_head + T.truncdiv(first, tiles.queries)
            if first + WINDOW <= N:
                n = SimpleNamespace(blocks=blocks, block_size=block_size, q_offset=q_offset)
                collect(index, sets, warp, lane, b, h, first, n)
                left = (1 << _CANDIDATES) - 1
                for group in T.serial(WINDOW // G):
                    # The first query that is left.
                    key = T.cast(WINDOW - 1, u32)
                    for x in reversed(candidates):
                        if ((left >> x) & 1) != 0:
                            key = T.cast(x * _LANES + lane, u32)
                    query = T.cast(least(key), i32)
                    if query % _LANES == lane:
                        left = left & ~(1 << (query // _LANES))
                    found[0] = query
                    for z in T.unroll(words):
                        union[z] = T.cast(0, u32)
                    for member in members:
                        # The one that adds fewest blocks; of those the first.
                        add(query, union, grown, sets, warp, lane, n)
                        key = T.cast(0x7FFFFFFF, u32)
                        for x in candidates:
                            if ((left >> x) & 1) != 0:
                                key = T.min(key, T.cast(grown[x] * WINDOW + x * _LANES + lane, u32))
                        query = T.cast(least(key), i32) % WINDOW
                        if query % _LANES == lane:
                            left = left & ~(1 << (query // _LANES))
                        # Kept in order.
                        swap = query
                        for t in tuple(range(member)):
                            word = T.max(found[t], swap)
                            found[t] = T.min(found[t], swap)
                            swap = word
                        found[member] = swap
                    word = 0
                    for t in T.unroll(G):
                        word = word | (found[t] << (8 * t))
                    if lane == 0:
                        counts[row + group // W, 4 + group % W] = word
            elif first < N:
                for z in T.serial((WINDOW // G + _LANES - 1) // _LANES):
                    query = (z * _LANES + lane) * G
                    if first + query // tiles.queries * tiles.queries < N:
                        word = 0
                        for t in T.unroll(G):
                            word = word | ((query + t) << (8 * t))
                        counts[row + query // tiles.queries, 4 + query // G % W] = word

    return sparse_attn_order
