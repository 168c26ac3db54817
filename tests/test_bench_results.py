"""What one run leaves behind: sweeps, stored results read again, and two runs compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark needs rich")

from bench import __main__ as command_line
from bench import cases, options, results
from bench.__main__ import main
from bench.arguments import parser
from bench.compare import compare

from .bench_run import QUICK, SHAPE, SMALL, document, row, rows_of

LARGE = cases.points("handout", ["large-1"])[0]


def stored(path: Path, *rows: dict[str, Any], **header: Any) -> str:
    path.write_text(json.dumps(document(*rows, **header)))
    return str(path)


# --- sweeps ---------------------------------------------------------------------------------------------------------


def test_sweep_changes_one_field_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--set", "handout", "--size", "small", *QUICK, "--backend", "reference", "--no-check"]
    assert main([*arguments, "--sweep", "N=32,64", "--sweep", "topk=1,2", "--D", "16", "--json"]) == 0
    rows = rows_of(capsys)
    changes = [(row["size"].split()[-1], row["N"], row["M"], row["topk"], row["D"]) for row in rows]
    assert changes == [
        ("N=32", 32, 32, 4, 16), ("N=64", 64, 64, 4, 16), ("topk=1", 128, 128, 1, 16), ("topk=2", 128, 128, 2, 16)
    ]  # fmt: skip
    assert all(row["size"].startswith("small D=16 ") for row in rows)
    assert rows[2]["density"] == pytest.approx(128 / (64 + 2 * 64))  # of 1 and 2 causal blocks, one each


def test_sweep_of_no_size_is_of_medium_and_has_no_point_twice() -> None:
    args = parser().parse_args(["--device", "cpu", "--sweep", "N=1k,4k", "--sweep", "topk=16,4"])
    points = options.chosen_points(parser(), args)
    assert [point.size for point in points] == ["medium N=1024", "medium N=4096", "medium topk=4"]


def test_sweep_goes_on_where_memory_does_not_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cases.make_case

    def bounded(point: cases.Point, *args: Any) -> cases.Case:
        if point.N > 40:
            raise torch.OutOfMemoryError("made up")
        return real(point, *args)

    monkeypatch.setattr(cases, "make_case", bounded)
    assert main([*SHAPE, *QUICK, "--sweep", "N=32,64,16", "--json"]) == 1
    assert [row["status"] for row in rows_of(capsys)] == ["PASS", "error", "PASS"]


# --- stored results -------------------------------------------------------------------------------------------------


def test_from_shows_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    assert main([*SMALL, "--json", str(path), "--peers", "sdpa-flash"]) == 0
    shown = capsys.readouterr().out
    assert main(["--from", str(path)]) == 0
    assert capsys.readouterr().out == shown
    assert main(["--from", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


def test_from_fails_as_the_run_did(tmp_path: Path) -> None:
    broken = row(LARGE, "triton", None, status="error", reason="made up")
    assert main(["--from", stored(tmp_path / "a.json", row(LARGE, "reference", 1.0), broken)]) == 1


def test_files_of_before_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields that earlier versions did not write are filled in; nothing else is made up."""
    rows = [row(LARGE, "triton", 2.0), row(LARGE, "sdpa-cudnn", 1.0), row(LARGE, "fla", 3.0)]
    for old in rows:
        for name in ("density", "kind", "l2", "compulsory_bytes", "matmul_percent", "copy_percent", "bound_by"):
            del old[name]
    whole = document(*rows)
    header = {name: whole["header"][name] for name in ("device", "arch", "torch", "sparse_attn")}
    (tmp_path / "old.json").write_text(json.dumps({"header": header, "rows": rows}))
    loaded = results.load(str(tmp_path / "old.json"))
    assert [(row["kind"], row["l2"]) for row in loaded["rows"]] == [
        ("backend", "cold"), ("yardstick", "cold"), ("peer", "cold")
    ]  # fmt: skip
    assert loaded["rows"][0]["density"] == LARGE.density
    assert loaded["rows"][0]["bound_by"] is None
    assert main(["--from", str(tmp_path / "old.json"), "--compare", str(tmp_path / "old.json")]) == 0


@pytest.mark.parametrize("option", ["--from", "--compare"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[1]", "without its header"),
        ('{"header": {"torch": "2"}, "rows": []}', "without its header"),
        (json.dumps({**document(), "rows": []}), "--list and --overhead write others"),
        (json.dumps({**document(), "rows": [{"set": "x"}]}), "row 0 lacks size, B, Hq"),
        (json.dumps({**document(), "rows": [1]}), "row 0 lacks set"),
    ],
)
def test_other_files_are_refused_before_anything_is_measured(
    option: str,
    content: str | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command_line, "execute", None)  # a call would be another error
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as exit_:
        main([option, str(path)])
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert f"{option} {path}: needs a file that `python -m bench --json FILE` wrote" in said
    assert message in said


# --- two runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "verdict", "bad"),
    [
        (1.0, 1.0, "same", False),
        (1.0, 1.0499, "same", False),
        (1.0, 1.0501, "slower", True),
        (1.0, 0.96, "same", False),
        (1.0, 0.95, "faster", False),
        (1.0, None, "failed", True),
        (1.0, "absent", "missing", True),
        (None, 1.0, "new", False),
        ("absent", 1.0, "new", False),
        (None, None, "no time", False),
        (None, "absent", "no time", False),
    ],
)
@pytest.mark.parametrize("kind", ["backend", "peer", "yardstick"])
def test_verdicts(old: Any, new: Any, verdict: str, bad: bool, kind: str) -> None:
    other = cases.points("handout", ["small"])[0]  # so that neither run is empty
    before, after = (
        document(row(other, "triton", 7.0), *([] if ms == "absent" else [row(LARGE, "triton", ms, kind)]))
        for ms in (old, new)
    )
    compared = compare(before, after, 0.05)
    (line,) = [line for line in compared.lines if line["size"] == "large-1"]
    assert line["verdict"] == verdict
    assert compared.worse == ([line] if bad and kind == "backend" else [])
    if verdict in ("same", "slower", "faster"):
        assert line["ratio"] == new / old
    assert compared.warnings == []


def test_a_wrong_result_is_a_failure_whatever_its_time() -> None:
    good, wrong = row(LARGE, "triton", 1.0), row(LARGE, "triton", 1.0, status="FAIL")
    assert compare(document(good), document(wrong), 0.05).worse
    assert compare(document(wrong), document(wrong), 0.05).worse


def test_rows_are_matched_by_shape_dtype_pattern_and_backend() -> None:
    old = row(LARGE, "triton", 1.0)
    renamed = {**old, "size": "another name", "median_ms": 2.0}
    (line,) = compare(document(old), document(renamed), 0.05).lines
    assert line["ratio"] == 2
    for change in ({"dtype": "bfloat16"}, {"pattern": "local"}, {"topk": 8}, {"requested_backend": "auto"}):
        verdicts = [line["verdict"] for line in compare(document(old), document({**old, **change}), 0.05).lines]
        assert verdicts == ["missing", "new"]


def test_a_changed_choice_is_told() -> None:
    was = {**row(LARGE, "triton", 1.0), "requested_backend": "auto"}
    now = {**was, "resolved_backend": "tilelang"}
    assert compare(document(was), document(now), 0.05).lines[0]["backend"] == "triton, now tilelang"


def test_other_machines_versions_and_timers_are_warned_of() -> None:
    old = document(row(LARGE, "triton", 1.0), triton="3.2.0", cpu="A")
    new = document(
        row(LARGE, "triton", 1.0, timer="graph", l2="warm", seed=3), device="NVIDIA H20", triton="3.6.0", cpu="A"
    )
    assert compare(old, new, 0.05).warnings == [
        "WARNING: device: NVIDIA H200 (sm90) before, NVIDIA H20 (sm90) now: times of different devices say little of "
        "the code",
        "WARNING: triton: 3.2.0 before, 3.6.0 now",
        "WARNING: timer: do_bench before, graph now",
        "WARNING: L2: cold before, warm now",
        "WARNING: seed of the data: 0 before, 3 now",
    ]
    other_code = document(row(LARGE, "triton", 1.0), triton="3.2.0", cpu="A", code_for="sm80")
    assert "code for sm80 now" in compare(old, other_code, 0.05).warnings[0]


def test_two_files_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = stored(tmp_path / "old.json", row(LARGE, "triton", 1.0), row(LARGE, "fla", 4.0, "peer"))
    new = stored(tmp_path / "new.json", row(LARGE, "triton", 1.08), row(LARGE, "fla", 8.0, "peer"))
    assert main(["--from", new, "--compare", old]) == 1
    out = capsys.readouterr().out
    assert "| large-1 | triton  | slower  |      1 |   1.08 |      1.08 |" in out
    assert "threshold 0.05" in out
    assert main(["--from", new, "--compare", old, "--threshold", "0.1"]) == 0
    assert main(["--from", old, "--compare", new]) == 0
    capsys.readouterr()
    assert main(["--from", new, "--compare", old, "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"]
    assert said.err.splitlines() == ["slower: triton on large-1"]


def test_a_run_is_compared_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is of a run here, its times then made a million times shorter and longer: no noise is as large."""
    arguments = [*SHAPE, *QUICK, "--backend", "reference"]
    path = tmp_path / "old.json"
    assert main([*arguments, "--json", str(path)]) == 0
    old = json.loads(path.read_text())
    for factor, status, verdict in ((1e-6, 1, "slower"), (1e6, 0, "faster")):
        changed = [{**made, "median_ms": factor * made["median_ms"]} for made in old["rows"]]
        path.write_text(json.dumps({**old, "rows": changed}))
        capsys.readouterr()
        assert main([*arguments, "--compare", str(path), "--threshold", "50"]) == status
        assert f"| reference | {verdict}" in capsys.readouterr().out
