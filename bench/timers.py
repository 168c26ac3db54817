"""How the time of a call is taken, by what, and with what left in the L2 cache.

===================== ========================================================================================
do_bench              ``triton.testing.do_bench``: events of the device around each call, L2 flushed before it
graph                 many calls captured in one CUDA graph, replayed: time on the device alone, L2 warm
graph-cold            the same with L2 flushed before each call; a graph of as many flushes alone is subtracted
events                events of the device around each call, L2 warm; a device that waits for the host counts
torch.utils.benchmark its clock of the host around each call, the device's end awaited; caches warm
===================== ========================================================================================

"Cold" means that the call finds none of its data in L2, "warm" that it finds what the call before it left there.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import timer as _clock_of_torch

synchronised_clock: Callable[[], float] = _clock_of_torch  # seconds, after the accelerator has finished
CHOICES = ("do_bench", "graph", "graph-cold", "events")
GRAPHS = ("graph", "graph-cold")
CLOCK = "torch.utils.benchmark"
L2 = {"do_bench": "cold", "graph": "warm", "graph-cold": "cold", "events": "warm", CLOCK: "warm"}

# On the clock: calls to time at least, so that one hiccup is not the median, but not for longer than this.
_SAMPLES = 5
_PATIENCE_S = 1.0
# One replay of a graph: so long, in ms, that starting it does not count, and no more calls than this.
_REPLAY_MS = 5.0
_CALLS_IN_GRAPH = 1000
# Written to flush L2, as do_bench does. Several times an L2 (50 to 60 MB on Hopper): of a buffer as large as it, each
# flush would find a part of the one before, which a call in between pushes out, and the call would pay for that.
_FLUSHED_BYTES = 2**28


class Times(NamedTuple):
    """Median and 20 % and 80 % quantiles of one call, in ms, and what measured them."""

    median: float
    p20: float
    p80: float
    timer: str


def default_timer(device: torch.device) -> str:
    """``do_bench`` where there is Triton and an accelerator, else the host's clock."""
    accelerated = device.type in ("cuda", "npu") and importlib.util.find_spec("triton") is not None
    return "do_bench" if accelerated else CLOCK


def unavailable(timer: str, device: torch.device) -> str | None:
    """Say why ``timer``, one of ``CHOICES``, cannot time calls on ``device``; or None."""
    needed = ("cuda",) if timer in GRAPHS else ("cuda", "npu")
    if device.type not in needed:
        return f"needs a device of type {' or '.join(needed)}, got {device}: leave --timer out, for the host's clock"
    if timer == "do_bench" and importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed: pip install 'sparse_attn[triton]', or --timer graph"
    return None


def measure_time(
    call: Callable[[], object], device: torch.device, warmup: float, rep: float, timer: str | None = None
) -> Times:
    """Time ``call`` for about ``rep`` ms after ``warmup`` ms; at least one call, however long it takes.

    ``timer`` is one of ``CHOICES``, None for :func:`default_timer`. With a graph a sample is the mean of one replay.
    """
    timer = timer or default_timer(device)
    if timer == "do_bench":
        do_bench = importlib.import_module("triton.testing").do_bench
        middle, p20, p80 = do_bench(call, warmup=warmup, rep=rep, quantiles=[0.5, 0.2, 0.8])
        return Times(middle, p20, p80, timer)
    take = {"graph": _graph, "graph-cold": _graph_cold, "events": _events, CLOCK: _clock}[timer]
    quantiles = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    middle, p20, p80 = torch.tensor(take(call, device, warmup, rep), dtype=torch.float64).quantile(quantiles).tolist()
    return Times(middle, p20, p80, timer)


def _clock(call: Callable[[], object], device: torch.device, warmup: float, rep: float) -> list[float]:
    _warm_up(call, warmup)
    seconds: list[float] = []
    while sum(seconds) * 1e3 < rep or (len(seconds) < _SAMPLES and sum(seconds) < _PATIENCE_S):
        start = synchronised_clock()
        call()
        seconds.append(synchronised_clock() - start)
    return [1e3 * second for second in seconds]


def _events(call: Callable[[], object], device: torch.device, warmup: float, rep: float) -> list[float]:
    """Calls are queued without waiting, as do_bench does, but nothing is flushed between them."""
    _warm_up(call, warmup)
    once = _elapsed(call, device, 1)[0]
    return _elapsed(call, device, max(1, int(rep / max(once, 1e-3))))


def _graph(call: Callable[[], object], device: torch.device, warmup: float, rep: float) -> list[float]:
    calls, (replay,) = _captured(device, call)
    return [ms / calls for ms in _events(replay, device, warmup, rep)]


def _graph_cold(call: Callable[[], object], device: torch.device, warmup: float, rep: float) -> list[float]:
    """Replays of (flush, call) and of flushes alone, in turns: a sample is the difference of two neighbours."""
    flush = _flusher(device)

    def flush_and_call() -> None:
        flush()
        call()

    calls, both = _captured(device, flush_and_call, flush)
    _warm_up(both[0], warmup)
    turn = sum(ms for (ms,) in _in_turns(both, device, 1))
    whole, flushes = _in_turns(both, device, max(1, int(rep / max(turn, 1e-3))))
    samples = [(one - other) / calls for one, other in zip(whole, flushes, strict=True)]
    if median(samples) <= 0:
        raise RuntimeError("a call takes less time than flushing L2 varies by: --timer graph, whose L2 is warm")
    return samples


def _flusher(device: torch.device) -> Callable[[], object]:
    """By a kernel: writing zeros would be another kind of node in a graph."""
    return partial(torch.empty(_FLUSHED_BYTES // 4, dtype=torch.int32, device=device).fill_, 1)


def _captured(device: torch.device, *calls: Callable[[], object]) -> tuple[int, list[Callable[[], None]]]:
    """Graphs of each of ``calls``, as often in each as fits a replay of the first: that number, and their replays."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # what is made at a first call has to be there before the capture
        for _ in range(2):
            calls[0]()
        once = _elapsed(calls[0], device, 1)[0]
    count = max(1, min(_CALLS_IN_GRAPH, int(_REPLAY_MS / max(once, 1e-3))))
    replays = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                call()
        replays.append(graph.replay)
    return count, replays


def _warm_up(call: Callable[[], object], warmup: float) -> None:
    start = synchronised_clock()
    while (synchronised_clock() - start) * 1e3 < warmup:
        call()


def _elapsed(call: Callable[[], object], device: torch.device, count: int) -> list[float]:
    """Milliseconds on the device's own clock of ``count`` calls, one after the other."""
    return _in_turns([call], device, count)[0]


def _in_turns(calls: Sequence[Callable[[], object]], device: torch.device, count: int) -> list[list[float]]:
    """The same for each of several calls, which take turns."""
    kind: Any = getattr(torch, device.type)
    events = [[[kind.Event(enable_timing=True) for _ in range(2)] for _ in range(count)] for _ in calls]
    for turn in range(count):
        for call, of_call in zip(calls, events, strict=True):
            before, after = of_call[turn]
            before.record()
            call()
            after.record()
    kind.synchronize()
    return [[before.elapsed_time(after) for before, after in of_call] for of_call in events]
