"""The triton_ascend backend where no 910B and no triton-ascend are: its lists, its limits, what it hands to a launch.

The kernel itself is checked by `make test-ascend`, in an environment of its own (tests/ascend).
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import sparse_attn
from sparse_attn import registry

pytest.importorskip("triton")

from sparse_attn.backends.triton_ascend import adapter, block_lists
from sparse_attn.backends.triton_ascend.adapter import TritonAscendBackend, prepare
from sparse_attn.backends.triton_ascend.plan import MOST_CORES, Tiles, tiles_for

from .cases import CASES, make
from .test_registry import ASCEND

LENGTH = "needs N * max(D, Dv) < 2**31 / 16 with 16 heads in a group, "
IDS = st.one_of(st.integers(-3, 12), st.sampled_from([2**31 - 1, -(2**31), 2**24, 1000]))


@given(data=st.data())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_block_lists(data: st.DataObject) -> None:
    """Against sets and dictionaries in Python: what each list holds, in which segment, and who sees anything."""
    draw = data.draw
    T, N, M = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 9)), draw(st.integers(1, 60))
    block_size, topk, q_offset = draw(st.integers(1, 20)), draw(st.integers(1, 7)), draw(st.integers(-9, 70))
    mask_all = draw(st.booleans())
    values = draw(st.lists(IDS, min_size=2 * N * topk, max_size=2 * N * topk))
    index = torch.tensor(values, dtype=draw(st.sampled_from([torch.int32, torch.int64]))).view(1, 2, N, topk)
    lists = block_lists.block_lists(index, M, block_size, q_offset, T, mask_all)
    assert [x.dtype for x in lists] == [torch.int32] * 3
    assert all(x.is_contiguous() for x in lists)
    for row, (h, tile) in enumerate(itertools.product(range(2), range(-(-N // T)))):
        chosen: dict[int, int] = {}
        for i in range(tile * T, min(N, tile * T + T)):
            for block in set(index[0, h, i].tolist()):
                if 0 <= block < -(-M // block_size) and block * block_size <= i + q_offset:
                    chosen[block] = chosen.get(block, 0) | 1 << i - tile * T
        segments: list[list[int]] = [[], [], [], []]
        for block in sorted(chosen):
            last = (block + 1) * block_size
            masked = mask_all or last - 1 > tile * T + q_offset or last > M
            alone = chosen[block] if T == 2 and chosen[block] < 3 else 0
            segments[3 if masked else alone].append(block)
        *ends, seen = lists.fields[row].tolist()
        assert ends == list(itertools.accumulate(map(len, segments)))
        blocks = list(itertools.chain(*segments))
        assert lists.blocks[row, : len(blocks)].tolist() == blocks
        assert lists.masks[row, : len(blocks)].tolist() == [chosen[block] for block in blocks]
        assert seen == sum({1 << t for mask in chosen.values() for t in range(T) if mask >> t & 1})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "needs fp16 or bf16, got float32"),
        ({"D": 320}, "needs D <= 256, got D=320"),
        ({"Dv": 257}, "needs Dv <= 256, got Dv=257"),
        ({"block_size": 129}, "needs block_size or M <= 128, got 129 and M=1024"),
        ({"topk": 2**18 + 1}, "needs topk <= 262144, got 262145"),
        ({"M": 2**26, "block_size": 16}, "needs fewer than 2**22 key blocks, got 4194304"),
        ({"N": 2**20}, LENGTH + "got N=1048576, D=128 and Dv=128"),
        ({"N": 2**20, "Dv": 9}, LENGTH + "got N=1048576, D=128 and Dv=9"),
    ],
)  # fmt: skip
def test_limits(changes: dict[str, Any], reason: str) -> None:
    x = make(torch.float16)
    problem = sparse_attn.problem_of(*x.args)._replace(device=ASCEND, Hq=64, Hk=4, N=1024, M=1024, D=128, Dv=128)
    unsupported = TritonAscendBackend().unsupported
    assert list(unsupported(problem)) == []
    assert list(unsupported(problem._replace(block_size=2**20, M=128))) == []
    assert list(unsupported(problem._replace(**changes))) == [reason]


def test_the_package_that_it_replaces_is_not_enough() -> None:
    """Upstream Triton is not taken for triton-ascend: it would fail at every launch."""
    reason = registry.unavailable_on("triton_ascend", ASCEND)
    assert reason is not None
    assert reason.startswith("needs the package triton-ascend >= 3.2, which is not installed")


def test_plan() -> None:
    assert tiles_for(16, 8192, 8192, 128, 128, 64, 32) == Tiles(16, 2, 64)
    assert tiles_for(16, 1, 8192, 128, 128, 64, 4) == Tiles(16, 1, 64)  # decoding: as many tiles as there are
    assert tiles_for(64, 8192, 8192, 256, 256, 128, 4) == Tiles(32, 1, 32)
    assert tiles_for(3, 8192, 8, 16, 64, 64, 4) == Tiles(16, 2, 16)


def arguments(name: str, **changes: Any) -> tuple[Any, ...]:
    x = replace(CASES[name].build(torch.float16), **changes)
    return x.q, x.k, x.v, x.index, x.block_size, 0.1, x.q_offset, True


def test_what_a_launch_reads() -> None:
    """No copies where strides allow it; strides that nothing is stepped over with are 0, whatever a tensor says."""
    cache = torch.randn(2, 4, 300, 64, dtype=torch.float16)
    views = {"k": cache[:, :, :128], "v": cache[:, :, 64:192]}
    launch = prepare(*arguments("contest_medium", **views))[2]
    assert [x.data_ptr() for x in launch.args[1:3]] == [x.data_ptr() for x in views.values()]
    launch = prepare(*arguments("last_dim_strided"))[2]
    assert all(t.stride(3) == 1 for t in launch.args[:3])
    launch = prepare(*arguments("strange_batch_stride_huge"))[2]
    assert launch.args[9] == launch.args[12] == launch.args[15] == 0
    rows = torch.empty(2**27 * 31 + 64, dtype=torch.float16).as_strided((1, 1, 32, 64), (0, 0, 2**27, 1))
    x = make(torch.float16, Hq=1, Hk=1, N=32)
    launch = prepare(x.q, rows, x.v, x.index, x.block_size, 0.1, 0, True)[2]
    assert launch.args[1].is_contiguous()  # a tile of 32 keys would reach 2**32 elements far


def test_launch_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an NPU: its device is made the current one, and there are no more programs than cube cores."""
    seen: list[Any] = []
    npu = SimpleNamespace(device=lambda device: seen.append(device) or nullcontext())
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(adapter, "cube_cores", lambda device: 20)
    monkeypatch.setattr(adapter.Launch, "run", lambda self: seen.append(self.programs))
    q, k, v, index, *rest = arguments("contest_medium")
    device = SimpleNamespace(type="npu", index=0)

    class OnNpu(torch.Tensor):
        device = property(lambda self: device)

    out, lse, launch = prepare(q, k, v, index, *rest)
    assert launch.programs == MOST_CORES
    monkeypatch.setattr(adapter, "prepare", lambda *args: (out, lse, launch))
    assert TritonAscendBackend()(q.as_subclass(OnNpu), k, v, index, *rest) == (out, lse)
    assert seen == [device, 20]
