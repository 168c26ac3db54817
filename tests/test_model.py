"""The paper model of Hopper kernels: its counts against brute force, and its times against those measured."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("rich", reason="the benchmark needs rich")

from bench import cases, model

POINTS = {(point.set, point.size): point for point in cases.POINTS}
LARGE = POINTS["statement", "large-2"]


def selected(point: cases.Point, pattern: str) -> Tensor:
    one = replace(point, B=1, Hq=model.HEADS, Hk=1)
    return model.selection(cases.make_index(one, pattern, torch.device("cpu"), 0)[0, 0], point.num_blocks)


@pytest.mark.parametrize("N", [1, 8, 37])
def test_counts_are_those_of_sets(N: int) -> None:
    draw = random.Random(N)
    lists = [[draw.randrange(-2, 9) for _ in range(5)] for _ in range(N)]  # repeated, and out of range on both sides
    sets = [{block for block in ids if 0 <= block < 7} for ids in lists]
    found = model.selection(torch.tensor(lists, dtype=torch.int32), 7)
    assert [set(row.nonzero().flatten().tolist()) for row in found] == sets
    for queries in (1, 4, 8):
        tiles = [set().union(*sets[i : i + queries]) for i in range(0, N, queries)]
        assert model.walked(found, queries) == sum(map(len, tiles))


def test_work_by_hand() -> None:
    point = cases.Point("statement", "tiny", B=2, Hq=48, Hk=3, N=8, M=8, D=64, Dv=128, topk=1, block_size=4)
    found = torch.tensor([[True, False]] * 5 + [[True, True]] * 3)  # 11 pairs, 1 + 2 for the halves, 2 for the tile
    block = 4 * (64 + 128) * 2
    union, exact, mma, gather = (model.count(point, kernel, found) for kernel in ("union", "exact", "mma", "gather"))
    assert mma == exact._replace(wgmma=False, l2=mma.l2, shared=mma.shared, waits=0)
    assert exact.waits == 6 * (3 * model.STEP_CLOCKS + 11 * model.QUERY_CLOCKS)
    assert (union.flop, exact.flop) == (6 * 3 * 2 * 64 * 4 * (64 + 128), 6 * 11 * 2 * 16 * 4 * (64 + 128))
    assert (union.exps, exact.exps, gather.exps) == (6 * 3 * 64 * 4, 6 * 11 * 16 * 4, 6 * 11 * 16 * 4)
    assert (union.l2, exact.l2, mma.l2, gather.l2) == tuple(6 * n * block for n in (2, 3, 2, 11))
    assert union.shared == 6 * (2 * block + 3 * (block + 64 * 64 * 2 * 4 / 128))
    assert (exact.shared, mma.shared, gather.shared) == tuple(6 * (n + 11) * block for n in (3, 2, 11))
    assert union.memory == 2 * 2 * 8 * (48 * 64 + 3 * 64 + 3 * 128 + 48 * 128) + 4 * 2 * 3 * 8
    with pytest.raises(ValueError, match="16 heads"):
        model.count(replace(point, Hq=24), "union", found)


def test_all_blocks_selected_are_the_causal_ones() -> None:
    """Then queries of a tile agree, and neither kernel does in vain what the other leaves out."""
    point = cases.override(POINTS["statement", "medium"], "dense", topk=16)
    found = selected(point, "dense")
    causal = sum(i // 64 + 1 for i in range(1024))
    flop = 2 * (64 + 64) * 64 * 16 * causal * point.B * point.Hk
    assert [model.count(point, kernel, found).flop for kernel in ("union", "exact", "mma", "gather")] == [flop] * 4
    assert flop <= model.count(point, "dense", found).flop <= 1.1 * flop  # its blocks at the diagonal are larger


@pytest.mark.parametrize("pattern", ["random", "local"])
@pytest.mark.parametrize("point", cases.POINTS, ids=lambda point: f"{point.set}-{point.size}")
def test_sharing_saves_loads_and_costs_products(point: cases.Point, pattern: str) -> None:
    found = selected(point, pattern)
    union, exact, mma, gather = (model.count(point, kernel, found) for kernel in ("union", "exact", "mma", "gather"))
    assert exact.flop == mma.flop == gather.flop <= union.flop <= 4 * exact.flop
    assert union.l2 == mma.l2 <= exact.l2 <= gather.l2 <= model.TILE * mma.l2
    assert union.shared < mma.shared <= exact.shared <= gather.shared


def test_products_in_vain_at_large_2() -> None:
    random_, local = selected(LARGE, "random"), selected(LARGE, "local")
    ratio = [model.count(LARGE, "union", x).flop / model.count(LARGE, "exact", x).flop for x in (random_, local)]
    assert 1.9 < ratio[0] < 2.0
    assert 1.05 < ratio[1] < 1.2
    assert model.count(LARGE, "exact", random_).flop == 4 * 128 * 64 * LARGE.Hq * 8 * sum(
        min(32, i // 64 + 1) for i in range(8192)
    )


def test_queries_are_dealt_as_the_backend_does() -> None:
    """Four of a window at a time: the first that is left, then whichever adds fewest blocks, the first of those."""
    found = selected(replace(LARGE, N=300, M=300, topk=3, block_size=16), "random")
    got = model.dealt(found)
    assert torch.equal(got[256:], found[256:])
    sets = [set(row.nonzero().flatten().tolist()) for row in found[:128]]
    expected = []
    while sets:
        union: set[int] = set()
        for member in range(4):
            best = min(range(len(sets)), key=lambda i: (len(sets[i] - union) if member else 0, i))
            union |= sets[best]
            expected.append(sets.pop(best))
    assert [set(row.nonzero().flatten().tolist()) for row in got[:128]] == expected
    assert torch.equal(model.dealt(found[:100]), found[:100])


@pytest.mark.parametrize("key", model.MEASURED, ids="-".join)
def test_times_of_an_h200_are_near_those_measured(key: tuple[str, str, str, str]) -> None:
    point, (low, high) = POINTS[key[:2]], model.MEASURED[key]
    found = selected(point, "local" if key[2] == "local" else "random")
    (ms,), bound = model.predict(model.count(point, key[3], found), model.H200)
    assert 0.9 * low < ms < 1.1 * high, bound


def test_lost_clocks_stay_the_same_where_products_are_slower() -> None:
    union = model.count(LARGE, "union", selected(LARGE, "random"))
    share = []
    for gpu in (model.H200, model.H20):
        alone = union.flop / (gpu.sms * gpu.product_clock * gpu.wgmma)
        share.append(alone / model.times(union, gpu, gpu.mma[0])["tensor"])
    assert share == pytest.approx([model.EFFICIENCY, 0.87], abs=0.005)
    assert model.H20.mma == pytest.approx((148e12 / 78 / 1.83e9, 0.62 * 148e12 / 78 / 1.83e9))


def test_table_is_markdown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main(["--markdown", "--size", "large-2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(cells) == 2 + 6 + 5 + 6
    assert cells[0][:3] == ["point", "pattern", "kernel"]
    row = next(row for row in cells if row[:3] == ["statement large-2", "random", "mma"])
    assert row[cells[0].index("measured ms")] == "14.6"
    assert " to " in row[cells[0].index("H20 ms")]
