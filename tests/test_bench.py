"""The benchmark's command line, and that it gives no times for wrong results."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

from .bench_run import CPU, QUICK, ROOT, SHAPE, SMALL, TINY, bench, rows_of

# --- the command line -----------------------------------------------------------------------------------------------


def test_piped_table_is_plain_and_whole() -> None:
    done = bench(*SMALL, FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "| small" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["small", "reference", "PASS"]
    assert cells[-3:] == ["dense fp64", "torch.utils.benchmark", "warm"]
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
        "set", "size", "B", "Hq", "Hk", "N", "M", "D", "Dv", "topk", "block_size", "q_offset", "density", "dtype",
        "pattern", "seed", "requested_backend", "kind", "resolved_backend", "status", "reason", "median_ms", "p20_ms",
        "p80_ms", "tflops_selected", "tflops_nominal", "max_error", "checked_against", "timer", "l2",
        "compulsory_bytes", "matmul_percent", "copy_percent", "bound_by", "first_call_s", "cold_start_s",
        "cached_start_s",
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
        (["--pattern", "dense", "--topk", "2"], "contradict"),
        (["--pattern", "dense", "--sweep", "topk=2,4"], "contradict"),
        (["--sweep", "N=1,two"], "needs whole numbers, as 1024 or 1k, got '1,two'"),
        (["--sweep", "n=1"], "needs FIELD=A,B,... with one of B, Hq"),
        (["--sweep", "N=0,4"], "none below 1"),
        (["--timer", "graph"], "--timer graph needs a device of type cuda, got cpu: leave --timer out"),
        (["--timer", "graph-cold"], "--timer graph-cold needs a device of type cuda, got cpu"),
        (["--timer", "do_bench"], "--timer do_bench needs a device of type cuda or npu, got cpu"),
        (["--threshold", "0.1"], "--threshold needs --compare"),
        (["--plot", "x.jpeg"], "needs a file that ends in .png, .svg, .pdf, got x.jpeg"),
        (["--plot", "no/such/folder/x.png"], "cannot write"),
        (["--report", "README.md"], "--report needs a folder"),
        (["--json", "x.png", "--plot", "x.png"], "cannot both go to x.png"),
        (["--list", "--cold-start"], "time no points: leave out --cold-start"),
        (["--cold-start", "--code-for", "sm80"], "leave out --code-for"),
        (["--from", "x.json"], "--from measures nothing: leave out --device"),
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


def test_peers_are_checked_as_what_they_compute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A right peer passes, a wrong one gets no times; a yardstick is compared with dense attention, and has times."""

    def same(case: cases.Case):  # type: ignore[no-untyped-def]
        return lambda: dense_attention(*case.args, dtype=torch.float16)[0]

    def dense(case: cases.Case):  # type: ignore[no-untyped-def]
        return lambda: torch.nn.functional.scaled_dot_product_attention(
            case.q, case.k, case.v, is_causal=True, enable_gqa=True
        )

    def nothing(case: cases.Case):  # type: ignore[no-untyped-def]
        return lambda: torch.zeros_like(case.q)

    def fine(point: cases.Point) -> None:
        return None

    made_up = (
        peers.Peer("right", "torch", "", same, fine),
        peers.Peer("wrong", "torch", "", nothing, fine),
        peers.Peer("other", "torch", "", dense, fine, same_function=False),
        peers.Peer("not-dense", "torch", "", same, fine, same_function=False),
        peers.Peer("picky", "torch", "", same, lambda point: f"needs N = 1, got N={point.N}"),
        peers.Peer("absent", "no_such_package.inner", "pip install no-such-package", same, fine),
        peers.Peer("gpu", "torch", "", same, fine, devices=("cuda",)),
    )
    monkeypatch.setattr(options, "PEERS", made_up)
    sparse = (*SHAPE, *QUICK, "--backend", "reference", "--json")
    assert main([*sparse, "--peers"]) == 1  # one of them is wrong
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    assert [row["status"] for row in rows] == ["PASS", "PASS", "FAIL", "yardstick", "FAIL", "refused"]
    assert [row["median_ms"] is None for row in rows] == [False, False, True, False, True, True]
    assert [row["kind"] for row in rows] == ["backend", "peer", "peer", "yardstick", "yardstick", "peer"]
    assert rows[3]["checked_against"] == "dense fp64"
    assert rows[3]["tflops_selected"] is None
    assert rows[5]["reason"] == "needs N = 1, got N=48"
    assert document["header"]["peers_absent"] == {"absent": "pip install no-such-package"}

    assert main([*sparse, "--peers", "absent", "gpu", "picky", "other"]) == 0
    reasons = [row["reason"] for row in rows_of(capsys)[1:]]
    assert "needs no_such_package.inner, which is not installed, or broken: pip install" in reasons[0]
    assert reasons[1:] == ["needs a device of type cuda, got cpu", "needs N = 1, got N=48", None]


def test_what_peers_refuse() -> None:
    square = cases.POINTS[0]
    decode = cases.override(square, "decode", N=1, M=128, q_offset=127)
    refused = {peer.name: (peer.refuses(square), peer.refuses(decode)) for peer in peers.PEERS}
    elsewhere = "needs N = M and q_offset = 0, got N=1, M=128 and q_offset=127"
    for name in ("sdpa-cudnn", "sdpa-flash", "flash-attn", "flash-attn-3", "nsa-triton"):
        assert refused[name] == (None, elsewhere)
    assert refused["fla"] == (None, None)
    by_name = {peer.name: peer for peer in peers.PEERS}
    assert "at least 16" in (by_name["fla"].refuses(cases.override(square, "mha", Hk=16)) or "")
    assert by_name["flash-attn"].refuses(cases.override(square, "x", Dv=32)) == "needs D = Dv, got D=64 and Dv=32"
    assert "got 48" in (by_name["nsa-triton"].refuses(cases.override(square, "x", block_size=48)) or "")


def test_what_peers_refuse_beyond_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up tensors of a GPU: dtypes, and calls that wait for the device in a graph."""
    monkeypatch.setattr(peers.Peer, "installed", True)
    by_name = {peer.name: peer for peer in peers.PEERS}

    def case(device: str, dtype: torch.dtype) -> cases.Case:
        q: Any = SimpleNamespace(device=torch.device(device), dtype=dtype)
        return cases.Case(cases.POINTS[0], "random", 0, q, q, q, q)

    for name in ("sdpa-cudnn", "sdpa-flash", "flash-attn", "flash-attn-3", "nsa-triton"):
        assert by_name[name].unavailable(case("cuda", torch.bfloat16)) is None
        assert "needs float16 or bfloat16" in (by_name[name].unavailable(case("cuda", torch.float32)) or "")
    assert by_name["sdpa-flash"].unavailable(case("cpu", torch.float32)) is None
    assert by_name["fla"].unavailable(case("cuda", torch.float32), "graph") is None
    for timer in ("graph", "graph-cold"):
        assert f"got {timer}: each call waits" in (
            by_name["nsa-triton"].unavailable(case("cuda", torch.float16), timer) or ""
        )


@pytest.mark.parametrize("name", ["flash-attn", "flash-attn-3", "nsa-triton"])
def test_layouts_of_peers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with these packages' documented signatures and layouts get what makes their answers ours."""

    def flash_attn_func(q, k, v, causal):  # type: ignore[no-untyped-def]
        assert causal
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # from [B, N, heads, D]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2) if name == "flash-attn" else (out.transpose(1, 2), None)

    def topk_sparse_attention(q, k, v, topk_idx, block_size, cu_seqlens):  # type: ignore[no-untyped-def]
        outs = []
        for start, end in pairwise(cu_seqlens.tolist()):
            part = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            outs.append(dense_attention(*part, topk_idx[None, :, start:end], block_size)[0][0].transpose(0, 1))
        return torch.cat(outs).to(q.dtype)

    module = SimpleNamespace(flash_attn_func=flash_attn_func, topk_sparse_attention=topk_sparse_attention)
    (peer,) = [peer for peer in peers.PEERS if peer.name == name]
    monkeypatch.setitem(sys.modules, peer.module, module)
    point = cases.override(TINY, "square", N=37, M=37, Dv=8, q_offset=0)
    case = cases.make_case(point, "local", torch.float32, CPU, 0)  # a list for each batch entry and head
    out = peer.prepare(case)()
    expected = case if peer.same_function else measure.with_every_block(case)
    verdict = measure.Check(expected)(out, "reference")
    assert verdict.fault is None
    assert verdict.against == "dense fp64"


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
