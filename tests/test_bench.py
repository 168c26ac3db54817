"""The benchmark: its points and data, its FLOP counts, and that it gives no times for wrong results."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import sparse_attn
from sparse_attn.backends.reference import Reference
from sparse_attn.registry import select

pytest.importorskip("rich", reason="the benchmark needs rich")

from bench import cases, measure, options, peers
from bench.__main__ import main
from bench.dense import dense_attention
from bench.overhead import measure_overhead

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--size", "small", "--device", "cpu", "--warmup", "0", "--rep", "1")
TINY = cases.Point("statement", "tiny", B=2, Hq=4, Hk=2, N=37, M=45, D=8, Dv=4, topk=3, block_size=8, q_offset=5)


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, with pipes for stdout and stderr."""
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def rows_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return json.loads(capsys.readouterr().out)["rows"]


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


@pytest.mark.parametrize("set_name", cases.SETS)
def test_large_index_is_made_and_counted_in_seconds(set_name: str) -> None:
    (point,) = cases.points(set_name, ["large-2"])
    start = time.perf_counter()
    selected = measure.selected_flop(point, cases.make_index(point, "random", CPU, seed=0))
    cases.make_index(point, "local", CPU, seed=0)
    assert time.perf_counter() - start < 15
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
    monkeypatch.setattr(measure, "_CHUNK", chunk)
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
    assert measure.selected_flop(point, index) == expected


def test_nominal_flop_is_the_contest_count() -> None:
    for p in cases.POINTS:
        assert measure.nominal_flop(p) == 4 * p.B * p.Hq * p.N * p.topk * p.block_size * p.D
    assert measure.nominal_flop(TINY) == 2 * (8 + 4) * 2 * 4 * 37 * 3 * 8


# --- the command line -----------------------------------------------------------------------------------------------


def test_piped_table_is_plain_and_whole() -> None:
    done = bench(*SMALL, FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "| small" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["small", "reference", "PASS"]
    assert cells[-2:] == ["dense fp64", "torch.utils.benchmark"]
    said = [line for line in done.stderr.splitlines() if "CUDA runtime" not in line]  # torch's own, where it finds nvcc
    assert [line.partition(":")[0] for line in said] == ["On a CPU"]


def test_json_has_every_field(tmp_path: Path) -> None:
    done = bench(*SMALL, "--json", "--csv", str(tmp_path / "rows.csv"), "--set", "handout", "--q-offset", "3")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document["header"]) >= {
        "device", "arch", "torch", "triton", "tilelang", "python", "sparse_attn", "commit", "date"
    }  # fmt: skip
    (row,) = document["rows"]
    assert set(row) == {
        "set", "size", "B", "Hq", "Hk", "N", "M", "D", "Dv", "topk", "block_size", "q_offset", "dtype", "pattern",
        "seed", "requested_backend", "resolved_backend", "status", "reason", "median_ms", "p20_ms", "p80_ms",
        "tflops_selected", "tflops_nominal", "max_error", "checked_against", "timer", "first_call_s",
    }  # fmt: skip
    assert row["set"] == "handout"
    assert row["size"] == "small q_offset=3"
    assert (row["requested_backend"], row["resolved_backend"], row["status"]) == ("auto", "reference", "PASS")
    assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
    assert row["tflops_selected"] < row["tflops_nominal"]
    (line,) = csv.DictReader((tmp_path / "rows.csv").read_text().splitlines())
    assert list(line) == list(row)
    assert line["status"] == "PASS"


def test_missing_rich_is_said_in_one_line() -> None:
    code = "import runpy, sys; sys.modules['rich'] = None; runpy.run_module('bench', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "needs rich: pip install 'sparse_attn[bench]'"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "refrence"], "did you mean 'reference'?"),
        (["--size", "mediun"], "did you mean 'medium'?"),
        (["--Hq", "6", "--Hk", "4"], "Hq must be a multiple of Hk"),
        (["--N", "0"], "must be at least 1"),
        (["--device", "nonsense"], "'nonsense' is not there"),
        (["--pattern", "dense", "--topk", "2"], "contradicts"),
        (["--json", "--csv"], "cannot both go to stdout"),
        (["--json", "no/such/folder/x.json"], "cannot write"),
        (["--list", "--N", "5"], "shapes of their own"),
        (["--peers", "flexx"], "did you mean 'flex'?"),
        (["--code-for", "sm80"], "needs a CUDA device, got cpu"),
    ],
)
def test_usage_errors_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--device", "cpu", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_unknown_backend_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARSE_ATTN_BACKEND", "refrence")
    with pytest.raises(SystemExit) as exit_:
        main(SMALL)
    assert exit_.value.code == 2
    assert "SPARSE_ATTN_BACKEND=refrence names no backend: did you mean 'reference'?" in capsys.readouterr().err
    assert main([*SMALL, "--backend", "reference"]) == 0  # which does not ask the environment


def test_list_shows_points_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("large-2") == 2
    assert "3.825" in out
    assert all(f"  {name}: " in out for name in sparse_attn.backend_specs())


# --- what a backend may do wrong ------------------------------------------------------------------------------------


class Wrong(Reference):
    def __call__(self, *args: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, lse = super().__call__(*args)  # type: ignore[arg-type]
        out[-1, -1, -1, -1] += 0.5
        return out, lse


class NotFinite(Reference):
    def __call__(self, *args: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, lse = super().__call__(*args)  # type: ignore[arg-type]
        return out.fill_(torch.inf), lse


class Raising(Reference):
    def __call__(self, *args: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise torch.OutOfMemoryError("made up")


class Refusing(Reference):
    def unsupported(self, problem: sparse_attn.Problem) -> list[str]:
        return ["needs [B, Hq] that it likes, got others"]


TIMES = ("median_ms", "p20_ms", "p80_ms", "tflops_selected", "tflops_nominal", "timer")


def test_wrong_result_gets_no_times(register, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    register("wrong", Wrong())
    register("infinite", NotFinite())
    assert main([*SMALL, "--backend", "wrong,infinite", "--json"]) == 1
    wrong, infinite = rows_of(capsys)
    for row in (wrong, infinite):
        assert row["status"] == "FAIL"
        assert row["checked_against"] == "reference"
        assert all(row[name] is None for name in TIMES)
    assert wrong["max_error"] == pytest.approx(0.5, abs=1e-3)
    assert infinite["reason"] == "the output is not finite"


def test_reference_is_not_checked_against_itself() -> None:
    check = measure.Check(cases.make_case(TINY, "random", torch.float32, CPU, 0))
    out, _ = Wrong()(*check.case.args, TINY.D**-0.5, TINY.q_offset, False)
    verdict = check(out, "reference")
    assert verdict.against == "dense fp64"
    assert verdict.fault is not None
    assert verdict.max_error == pytest.approx(0.5, abs=1e-3)


def test_run_goes_on_after_errors_and_refusals(register, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    register("raising", Raising())
    register("refusing", Refusing())
    assert main([*SMALL, "--backend", "raising", "refusing", "--backend", "reference"]) == 1
    out = capsys.readouterr().out
    lines = [[c.strip() for c in line.split("|")[1:4]] for line in out.splitlines() if line.startswith("| small")]
    assert lines == [["small", "raising", "error"], ["small", "refusing", "refused"], ["small", "reference", "PASS"]]
    assert "error: raising on small: OutOfMemoryError: made up" in out
    assert "refusing needs [B, Hq] that it likes, got others" in out


def test_refusal_alone_is_not_success(register, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    register("refusing", Refusing())
    assert main([*SMALL, "--backend", "refusing", "--json"]) == 1
    (row,) = rows_of(capsys)
    assert row["status"] == "refused"
    assert "needs [B, Hq]" in str(row["reason"])
    assert main([*SMALL, "--backend", "refusing", "reference"]) == 0


def test_no_check_says_so(register, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    register("wrong", Wrong())
    assert main([*SMALL, "--backend", "wrong", "--no-check", "--json"]) == 0
    (row,) = rows_of(capsys)
    assert row["status"] == "unchecked"
    assert row["checked_against"] is None
    assert row["median_ms"] is not None


def test_data_that_cannot_be_made_is_an_error_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(cases, "make_case", out_of_memory)
    assert main([*SMALL, "--json"]) == 1
    (row,) = rows_of(capsys)
    assert (row["status"], row["reason"]) == ("error", "OutOfMemoryError: made up")


def test_peers_are_checked_unless_they_are_yardsticks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A right peer passes, a wrong one gets no times, one that computes something else is timed and says so."""

    def dense(case: cases.Case):  # type: ignore[no-untyped-def]
        return lambda: dense_attention(*case.args, dtype=torch.float16)[0]

    def nothing(case: cases.Case):  # type: ignore[no-untyped-def]
        return lambda: torch.zeros_like(case.q)

    made_up = (
        peers.Peer("right", "torch", "", dense, lambda point: None),
        peers.Peer("wrong", "torch", "", nothing, lambda point: None),
        peers.Peer("other", "torch", "", nothing, lambda point: None, same_function=False),
        peers.Peer("absent", "no_such_package", "pip install no-such-package", dense, lambda point: None),
        peers.Peer("picky", "torch", "", dense, lambda point: f"needs N = 1, got N={point.N}"),
    )
    monkeypatch.setattr(options, "PEERS", made_up)
    assert main([*SMALL, "--backend", "reference", "--peers", "--json"]) == 1  # one of them is wrong
    rows = rows_of(capsys)
    assert [row["status"] for row in rows] == ["PASS", "PASS", "FAIL", "yardstick", "refused", "refused"]
    assert [row["median_ms"] is None for row in rows] == [False, False, True, False, True, True]
    assert rows[4]["reason"] == "needs no_such_package, which is not installed: pip install no-such-package"
    assert rows[5]["reason"] == "needs N = 1, got N=128"


def test_what_peers_refuse() -> None:
    square = cases.POINTS[0]
    decode = cases.override(square, "decode", N=1, M=128, q_offset=127)
    refused = {peer.name: (peer.refuses(square), peer.refuses(decode)) for peer in peers.PEERS}
    assert refused["sdpa-cudnn"] == (None, "needs N = M and q_offset = 0, got N=1, M=128 and q_offset=127")
    assert refused["fla"] == (None, None)
    assert "at least 16" in (peers.PEERS[3].refuses(cases.override(square, "mha", Hk=16)) or "")


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
        assert measure.measure_time(print, device, 10, 50) == (2.0, 1.0, 3.0, "do_bench")  # type: ignore[arg-type]


def test_slow_calls_are_timed_once_after_one_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_PATIENCE_S", 0.02)
    calls: list[float] = []

    def slow() -> None:
        calls.append(0)
        time.sleep(0.03)

    times = measure.measure_time(slow, CPU, warmup=10, rep=20)
    assert len(calls) == 2
    assert times.median >= 29
    assert times.timer == "torch.utils.benchmark"


# --- overhead -------------------------------------------------------------------------------------------------------


def test_overhead_measures_hits_and_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import overhead

    monkeypatch.setattr(overhead, "_CALLS", 10)
    monkeypatch.setenv("SPARSE_ATTN_BACKEND", "reference")
    before = set(sparse_attn.backend_specs())
    rows = measure_overhead(CPU, torch.float16, seed=0)
    assert len(rows) == 5
    assert all(0 < row["us"] < 10_000 for row in rows)
    assert set(sparse_attn.backend_specs()) == before
    assert os.environ["SPARSE_ATTN_BACKEND"] == "reference"


def test_new_lengths_miss_the_selection_cache(monkeypatch: pytest.MonkeyPatch, register) -> None:  # type: ignore[no-untyped-def]
    from bench import overhead

    monkeypatch.setattr(overhead.null, "out", torch.zeros(1), raising=False)
    monkeypatch.setattr(overhead.null, "lse", torch.zeros(1), raising=False)
    register("null_here", overhead.null)
    with sparse_attn.use_backend("null_here"):
        before = select.cache_info()
        overhead._per_new_length(cases.POINTS[0], torch.float16, CPU, seed=0)
    after = select.cache_info()
    assert after.misses - before.misses > 4 * 4096
    assert after.hits == before.hits
