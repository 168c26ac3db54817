"""The benchmark's points and data, and what is counted in them: FLOPs and bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch

from bench import cases, counts

from .bench_run import CPU, TINY

# --- points and data ------------------------------------------------------------------------------------------------


def test_points_are_those_of_the_contest() -> None:
    table = """
        small   statement 1 16 1  128  128  64  4 32
        medium  statement 2 64 4 1024 1024  64 16 64
        large-1 statement 4 64 4 4096 4096 128 32 64
        large-2 statement 8 64 4 8192 8192 128 32 64
        small   handout   1 16 1  128  128  64  4 64
        medium  handout   1 64 4 1024 1024  64 16 64
        large-1 handout   1 64 4 4096 4096 128 32 64
        large-2 handout   2 64 4 8192 8192 128 64 64
    """
    expected = [tuple(line.split()) for line in table.strip().splitlines()]
    found = [
        tuple(map(str, (p.size, p.set, p.B, p.Hq, p.Hk, p.N, p.M, p.D, p.topk, p.block_size))) for p in cases.POINTS
    ]
    assert found == expected
    assert all(p.Dv == p.D and p.q_offset == 0 for p in cases.POINTS)
    assert [round(p.density, 2) for p in cases.POINTS] == [1, 1, 0.75, 0.44, 1, 1, 0.75, 0.75]


def causal_blocks(point: cases.Point, i: int) -> list[int]:
    return [b for b in range(point.num_blocks) if b * point.block_size <= i + point.q_offset]


@pytest.mark.parametrize("pattern", cases.PATTERNS)
@pytest.mark.parametrize("q_offset", [0, 5, -20, 100])
def test_index_has_distinct_causal_blocks_and_padding_behind(pattern: str, q_offset: int) -> None:
    point = cases.override(TINY, "tiny", q_offset=q_offset, topk=TINY.num_blocks if pattern == "dense" else 3)
    index = cases.make_index(point, pattern, CPU, seed=0)
    assert index.shape == (point.B, point.Hk, point.N, point.topk)
    assert index.dtype == torch.int32
    for lists in index.flatten(0, 1).tolist():
        for i, ids in enumerate(lists):
            causal = causal_blocks(point, i)
            count = min(point.topk, len(causal))
            assert ids[count:] == [-1] * (point.topk - count)
            assert len(set(ids[:count])) == count
            assert set(ids[:count]) <= set(causal)


def test_random_is_one_uniform_permutation_for_all_heads() -> None:
    point = cases.override(TINY, "tiny", N=4000, M=32, block_size=8, topk=2)
    index = cases.make_index(point, "random", CPU, seed=3)
    assert (index == index[:1, :1]).all()
    pairs = index[0, 0, 32:].long()
    counts = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16).view(4, 4)
    assert counts.diagonal().sum() == 0
    off_diagonal = counts[~torch.eye(4, dtype=torch.bool)]
    assert (off_diagonal - len(pairs) / 12).abs().max() < 100  # 330 each, with a deviation of 17
    assert not torch.equal(index, cases.make_index(point, "random", CPU, seed=4))


def test_local_has_first_and_own_block_and_changes_slowly() -> None:
    point = cases.override(TINY, "tiny", N=2048, M=2048, q_offset=0, block_size=16, topk=16)
    index = cases.make_index(point, "local", CPU, seed=0)
    own = torch.arange(point.N)[:, None] // point.block_size
    assert (index == 0).any(-1).all()
    assert (index == own).any(-1).all()
    assert not torch.equal(index[0, 0], index[1, 1])
    late = index[0, 0, point.N // 2 :]
    kept = (late[1:, :, None] == late[:-1, None, :]).any(-1).float().mean()
    assert kept > 0.7  # of 128 blocks, 16 at random would keep 0.13


def test_index_in_chunks_obeys_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "_CHUNK", 50)
    for pattern in cases.PATTERNS:
        test_index_has_distinct_causal_blocks_and_padding_behind(pattern, 5)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("set_name", cases.SETS)
def test_large_index_is_made_and_counted_in_seconds(set_name: str, one_thread: None) -> None:
    (point,) = cases.points(set_name, ["large-2"])
    start = time.process_time()  # which a busy machine makes no longer, where threads do not wait for each other
    selected = counts.selected_flop(point, cases.make_index(point, "random", CPU, seed=0))
    cases.make_index(point, "local", CPU, seed=0)
    assert time.process_time() - start < 15
    assert selected / 1e12 == pytest.approx({"statement": 3.825, "handout": 1.644}[set_name], rel=2e-3)


def test_overrides_keep_lengths_and_features_together() -> None:
    medium = cases.points("statement", ["medium"])[0]
    assert asdict(cases.override(medium, "x", N=7, D=32)) == {**asdict(medium), "size": "x"} | {
        "N": 7,
        "M": 7,
        "D": 32,
        "Dv": 32,
    }
    assert cases.override(medium, "x", N=7, M=9).M == 9
    assert cases.override(TINY, "x", N=7, D=16).shape == {**TINY.shape, "N": 7, "D": 16}


# --- FLOPs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_offset", [0, 8, -11])
@pytest.mark.parametrize(("N", "M"), [(37, 37), (20, 45), (45, 20)])
@pytest.mark.parametrize("chunk", [2**22, 20])
def test_selected_flop_counts_the_mask(
    N: int, M: int, q_offset: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "_CHUNK", chunk)
    point = cases.override(TINY, "tiny", N=N, M=M, topk=6, q_offset=q_offset)
    generator = torch.Generator().manual_seed(N)
    ids = torch.tensor([*range(-2, point.num_blocks + 2), -(2**31), 2**31 - 1], dtype=torch.int32)
    draws = torch.randint(len(ids), (point.B, point.Hk, N, point.topk), generator=generator)  # with repeats
    index = ids[draws]
    mask = torch.zeros(point.B, point.Hk, N, M, dtype=torch.bool)
    for i in range(N):
        for j in range(M):
            if j <= i + q_offset:
                mask[:, :, i, j] = (index[:, :, i] == j // point.block_size).any(-1)
    expected = 2 * (point.D + point.Dv) * int(mask.sum()) * (point.Hq // point.Hk)
    assert counts.selected_flop(point, index) == expected


def test_nominal_flop_is_the_contest_count() -> None:
    for p in cases.POINTS:
        assert counts.nominal_flop(p) == 4 * p.B * p.Hq * p.N * p.topk * p.block_size * p.D
    assert counts.nominal_flop(TINY) == 2 * (8 + 4) * 2 * 4 * 37 * 3 * 8


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_offset", [0, 8, -11])
@pytest.mark.parametrize(("N", "M"), [(37, 37), (20, 45), (45, 20)])
@pytest.mark.parametrize("chunk", [2**22, 20])
def test_compulsory_bytes_count_each_key_that_is_seen_once(
    N: int, M: int, q_offset: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "_CHUNK", chunk)
    point = cases.override(TINY, "tiny", N=N, M=M, topk=2, q_offset=q_offset)
    case = cases.make_case(point, "random", torch.float16, CPU, 0)
    generator = torch.Generator().manual_seed(N)
    # Some blocks, with repeats, ids that mean nothing, and a block that nobody selects.
    ids = torch.tensor([-(2**31), -1, 0, 0, 1, 3, point.num_blocks, 2**31 - 1], dtype=torch.int32)
    index = ids[torch.randint(len(ids), case.index.shape, generator=generator)]
    seen = torch.zeros(point.B, point.Hk, M, dtype=torch.bool)
    for i in range(N):
        for j in range(min(M, max(0, i + q_offset + 1))):
            seen[:, :, j] |= (index[:, :, i] == j // point.block_size).any(-1)
    of_queries = 2 * point.B * point.Hq * N * (point.D + point.Dv)
    expected = of_queries + 2 * int(seen.sum()) * (point.D + point.Dv) + 4 * index.numel()
    assert counts.compulsory_bytes(replace(case, index=index)) == expected


def test_compulsory_bytes_of_decoding_are_what_is_selected() -> None:
    """One query a sequence, 16 blocks of 64 keys: 67 MB, nearly all of it k and v."""
    point = cases.Point("x", "decode", 32, 64, 4, 1, 65536, 128, 128, 16, 64, 65535)
    index = cases.make_index(point, "random", CPU, 0)
    thin = torch.zeros((), dtype=torch.float16).expand(1)  # of q, only the element's size matters
    case = cases.Case(point, "random", 0, thin, thin, thin, index)
    assert counts.compulsory_bytes(case) == 2 * 256 * (32 * 64 + 32 * 4 * 16 * 64) + 4 * 32 * 4 * 16
