"""How the benchmark takes times, and what it says bounds them: timers, roofline, cold starts."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark needs rich")

from bench import cases, cold_start, roofline, run, timers
from bench.__main__ import main
from bench.measure import Row
from bench.roofline import Ceilings, place

from .bench_run import CPU, QUICK, SHAPE, SMALL, rows_of

# --- timers ---------------------------------------------------------------------------------------------------------


def test_timer_is_do_bench_on_an_accelerator_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def do_bench(call: object, **options: object) -> list[float]:
        assert options == {"warmup": 10, "rep": 50, "quantiles": [0.5, 0.2, 0.8]}
        return [2.0, 1.0, 3.0]

    for name in ("triton", "triton.testing"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["triton.testing"], "do_bench", do_bench, raising=False)
    for kind in ("cuda", "npu"):
        device = SimpleNamespace(type=kind)
        assert timers.measure_time(print, device, 10, 50) == (2.0, 1.0, 3.0, "do_bench")  # type: ignore[arg-type]


def test_slow_calls_are_timed_once_after_one_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "_PATIENCE_S", 0.02)
    calls: list[float] = []

    def slow() -> None:
        calls.append(0)
        time.sleep(0.03)

    times = timers.measure_time(slow, CPU, warmup=10, rep=20)
    assert len(calls) == 2
    assert times.median >= 29
    assert times.timer == "torch.utils.benchmark"


class FakeDevice:
    """What the timers use of ``torch.cuda``, with a clock that only calls move: by ``ms`` each, in a replay, too.

    A flush takes ``flush_ms``, and the call after it ``cold_ms``. ``order`` is what ran, in graphs or outside them.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, ms: float, flush_ms: float = 0.1, cold_ms: float | None = None
    ) -> None:
        self.now, self.ms, self.calls, self.captured = 0.0, ms, 0, None
        self.flush_ms, self.cold_ms, self.flushed, self.order = flush_ms, ms if cold_ms is None else cold_ms, False, ""
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = fake.now

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Graph:
            def __init__(self) -> None:
                self.nodes = ""

            def replay(self) -> None:
                for node in self.nodes:
                    fake.spend(node)

        class Capture:
            def __init__(self, graph: Graph, stream: object) -> None:
                self.graph = graph

            def __enter__(self) -> None:
                fake.captured = ""

            def __exit__(self, *_: object) -> None:
                self.graph.nodes, fake.captured = fake.captured, None

        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": Capture,
            "synchronize": lambda: None,
            "Stream": lambda device: stream,
            "current_stream": lambda device: stream,
            "stream": lambda stream: nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(timers, "synchronised_clock", lambda: fake.now / 1e3)
        monkeypatch.setattr(timers, "_flusher", lambda device: fake.flush)

    def spend(self, node: str) -> None:
        self.now += self.flush_ms if node == "f" else self.cold_ms if self.flushed else self.ms
        self.flushed = node == "f"
        self.order += node

    def call(self) -> None:
        if self.captured is None:
            self.calls += 1
            self.spend("c")
        else:
            self.captured += "c"

    def flush(self) -> None:
        if self.captured is None:
            self.spend("f")
        else:
            self.captured += "f"


@pytest.mark.parametrize(("ms", "calls"), [(2.0, 5 + 1 + 10), (30.0, 1 + 1 + 1)])
def test_events_time_each_call(ms: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice(monkeypatch, ms)
    times = timers.measure_time(fake.call, torch.device("cuda"), warmup=10, rep=20, timer="events")
    assert times == (ms, ms, ms, "events")
    assert fake.calls == calls  # to warm up, to estimate, to measure


@pytest.mark.parametrize("ms", [0.004, 0.5, 40.0])
def test_graph_times_many_calls_at_once(ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice(monkeypatch, ms)
    times = timers.measure_time(fake.call, torch.device("cuda"), warmup=10, rep=50, timer="graph")
    assert times[:3] == pytest.approx((ms, ms, ms))
    assert times.timer == "graph"
    assert fake.calls == 3  # before the capture; all others are in the graph


@pytest.mark.parametrize(("flush_ms", "cold_ms"), [(0.1, 0.022), (0.1, 0.3), (40.0, 0.5)])
def test_graph_cold_times_calls_that_find_l2_flushed(
    flush_ms: float, cold_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDevice(monkeypatch, 0.001, flush_ms, cold_ms)
    times = timers.measure_time(fake.call, torch.device("cuda"), warmup=10, rep=50, timer="graph-cold")
    assert times[:3] == pytest.approx((cold_ms, cold_ms, cold_ms))
    assert times.timer == "graph-cold"
    assert "cc" not in fake.order
    calls = max(1, int(timers._REPLAY_MS / (flush_ms + cold_ms)))
    assert fake.order.endswith("fc" * calls + "f" * calls)  # replays take turns, each of as many flushes


def test_graph_cold_gives_no_time_that_is_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice(monkeypatch, 1.0, cold_ms=0.0)
    with pytest.raises(RuntimeError, match="less time than flushing"):
        timers.measure_time(fake.call, torch.device("cuda"), warmup=10, rep=50, timer="graph-cold")


def test_flush_writes_all_of_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "_FLUSHED_BYTES", 2**20)
    flush = timers._flusher(CPU)
    written = flush()
    assert isinstance(written, torch.Tensor)
    assert written.nbytes == 2**20
    written.zero_()
    flush()
    assert (written == 1).all()


def test_every_timer_says_what_is_in_l2() -> None:
    assert set(timers.L2) == {*timers.CHOICES, timers.CLOCK}
    assert [name for name, state in timers.L2.items() if state == "cold"] == ["do_bench", "graph-cold"]
    assert timers.unavailable("events", torch.device("cuda")) is None


def test_do_bench_without_triton_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'sparse_attn[triton]'" in (timers.unavailable("do_bench", torch.device("cuda")) or "")
    assert timers.default_timer(torch.device("cuda")) == "torch.utils.benchmark"


# --- roofline -------------------------------------------------------------------------------------------------------

ROOF = Ceilings(
    matmul_tflops=100.0, copy_tbs=2.0, dtype="float16", matmul_size=8192, copy_bytes=2**30, timer="do_bench"
)


@pytest.mark.parametrize(
    ("flop", "moved", "ms", "expected"),
    [
        (50e9, 0.1e9, 1.0, (50.0, 5.0, "compute")),
        (1e9, 1.4e9, 1.0, (1.0, 70.0, "memory")),
        (20e9, 0.4e9, 1.0, (20.0, 20.0, "compute")),
        (10e9, 0, 1.0, (10.0, 0.0, "compute")),
        (9.9e9, 0, 1.0, (9.9, 0.0, "neither")),
        (0, 0.19e9, 1.0, (0.0, 9.5, "neither")),
        (0.1e9, 0.001e9, 0.1, (1.0, 0.5, "launch")),
        (0, 0, 0.199, (0.0, 0.0, "launch")),
        (0, 0, 0.2, (0.0, 0.0, "neither")),
        (120e9, 0, 1.0, (120.0, 0.0, "compute")),
    ],
)
def test_what_bounds_a_time(flop: float, moved: float, ms: float, expected: tuple[float, float, str]) -> None:
    found = place(flop, moved, ms, ROOF)
    assert found[:2] == pytest.approx(expected[:2])
    assert found.bound_by == expected[2]


def test_ceilings_are_measured_once_and_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "_MATMUL_CPU", 64)
    monkeypatch.setattr(roofline, "_COPY_CPU", 2**20)
    measured = []

    def once(*args: object) -> Ceilings:
        measured.append(roofline.measure_ceilings(*args))  # type: ignore[arg-type]
        return measured[-1]

    monkeypatch.setattr(run, "measure_ceilings", once)
    arguments = [*SHAPE, *QUICK[:-1], "--dtype", "float16", "--sweep", "N=32,48", "--backend", "reference"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (ceilings,) = measured
    assert document["header"]["ceilings"] == ceilings._asdict()
    assert (ceilings.dtype, ceilings.matmul_size, ceilings.copy_bytes) == ("float32", 64, 2**20)
    for row in document["rows"]:
        expected = place(
            row["tflops_selected"] * row["median_ms"] * 1e9, row["compulsory_bytes"], row["median_ms"], ceilings
        )
        assert (row["matmul_percent"], row["copy_percent"]) == pytest.approx(expected[:2])
        assert row["bound_by"] == expected.bound_by
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "| % of matmul | % of copy | bound by |" in out
    assert str(measured[-1]) in out


def test_no_roofline_measures_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_ceilings", None)  # a call would fail, and be told in a note
    assert main([*SMALL, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["header"]["ceilings"] is None
    assert document["header"]["notes"] == []
    assert document["rows"][0]["bound_by"] is None
    assert document["rows"][0]["compulsory_bytes"] > 0


def test_ceilings_that_cannot_be_measured_stop_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(run, "measure_ceilings", out_of_memory)
    assert main([*SMALL[:-1]]) == 0
    out = capsys.readouterr().out
    assert "ceilings could not be measured: OutOfMemoryError: made up" in out
    assert "bound by" not in out


# --- cold starts ----------------------------------------------------------------------------------------------------


def test_cold_start_is_measured_in_fresh_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHAPE, *QUICK, "--cold-start", "--backend", "reference", "--json"]) == 0
    (row,) = rows_of(capsys)
    assert 0 < row["cold_start_s"] < 60
    assert 0 < row["cached_start_s"] < 60


def test_cold_start_has_caches_of_its_own_and_fills_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, one folder that is empty before the first, and gone afterwards; nothing of ours is in it."""
    seen = []

    def process(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        folders = [Path(env[name]) for name in cold_start.CACHES]
        assert "TRITON_CACHE_DIR" in cold_start.CACHES
        assert "TILELANG_CACHE_DIR" in cold_start.CACHES
        assert len(set(folders)) == len(folders)
        seen.append([sorted(os.listdir(folder)) if folder.exists() else None for folder in folders])
        for folder in folders:
            folder.mkdir(exist_ok=True)
            (folder / "kernel").write_text("")
        wanted = json.loads(command[-1])
        assert (wanted["name"], wanted["kind"], wanted["device"]) == ("auto", "backend", "cpu")
        return SimpleNamespace(returncode=0, stdout=f'a word of a library\n{{"seconds": {len(seen)}}}\n', stderr="")

    monkeypatch.setattr(cold_start.subprocess, "run", process)
    row = Row(cases.POINTS[0], "float16", "random", 0, "auto")
    cold_start.fill(row, CPU)
    assert (row.cold_start_s, row.cached_start_s) == (1, 2)
    empty, filled = seen
    assert set(empty) == {None}
    assert filled == [["kernel"]] * len(cold_start.CACHES)


def test_cold_start_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, register) -> None:  # type: ignore[no-untyped-def]
    """A backend that is known to this process alone: the fresh one says so, and that is the reason."""
    from sparse_attn.backends.reference import Reference

    register("only_here", Reference())
    row = Row(cases.POINTS[0], "float16", "random", 0, "only_here", status="PASS", median_ms=1.0)
    cold_start.fill(row, CPU)
    assert row.status == "error"
    assert "in a fresh process: " in (row.reason or "")
    assert "only_here" in (row.reason or "")
    assert (row.median_ms, row.cold_start_s) == (1.0, None)


def test_cold_start_of_a_peer_prepares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []

    def prepare(case: cases.Case):  # type: ignore[no-untyped-def]
        prepared.append(case.point)
        return lambda: case.q

    monkeypatch.setattr(cold_start, "PEERS", (SimpleNamespace(name="made_up", prepare=prepare),))
    point = cases.POINTS[0]
    wanted = {"point": {"set": point.set, "size": point.size, **point.shape}, "dtype": "float16", "pattern": "random"}
    done = cold_start.main({**wanted, "seed": 0, "name": "made_up", "kind": "peer", "device": "cpu"})
    assert prepared == [point]
    assert done["seconds"] > 0
