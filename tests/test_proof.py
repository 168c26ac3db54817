"""Everything that is claimed, in one command: runs that fail, results of several calls, pages, README."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the benchmark needs rich")
pytest.importorskip("matplotlib", reason="its pictures need matplotlib")
pytest.importorskip("jinja2", reason="its page needs jinja2")

from bench import claims, environment, proof, proof_pages
from bench.claims import Bar, Run

from .bench_run import QUICK, ROOT, SHAPE, document, row
from .proof_run import FAST, RUNS, measured, merged, points_of

LARGE = [measured(name, FAST, "large-1", "large-2") for name in ("statement", "local", "handout")]


# --- runs -------------------------------------------------------------------------------------------------------------


def processes(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have ``code`` run in place of the benchmark; its arguments end with --json FILE."""
    monkeypatch.setattr(proof, "COMMAND", (sys.executable, "-c", "import json, os, sys, time\n" + code))


def test_list_shows_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert proof.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^\| ([\w-]+) ", out, re.MULTILINE) == ["run", *RUNS]
    assert "--code-for sm80" in out


@pytest.mark.parametrize(
    ("code", "timeout_s", "why"),
    [
        ("print('a word', file=sys.stderr); sys.exit('needs a device')", 60.0, "exit status 1: needs a device"),
        ("os.abort()", 60.0, "ended by SIGABRT"),
        ("time.sleep(600)", 1.0, "no result within 1 s"),
        ("open(sys.argv[-1], 'w').write('{')", 60.0, "it cannot be read"),
        (f"sys.exit('no file {ROOT}/bench/x.py')", 60.0, "exit status 1: no file ./bench/x.py"),
    ],
)
def test_a_run_that_fails_costs_its_rows_and_is_shown(
    code: str,
    timeout_s: float,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(claims, "RUNS", (Run("local", "breaks", "--x", timeout_s), *claims.RUNS[:2]))
    whole = merged(LARGE[0], LARGE[1])
    proof._write(whole, tmp_path)
    processes(monkeypatch, code)
    assert proof.main(["--out", str(tmp_path), "--only", "local"]) == 1
    assert "local: failed: " in capsys.readouterr().err
    after = json.loads((tmp_path / "results.json").read_text())
    assert why in after["runs"]["local"]["failed"]
    assert {made["run"] for made in after["rows"]} == {"statement"}
    for page in ("results.md", "index.html"):
        text = (tmp_path / page).read_text()
        assert text.count(f"failed: {after['runs']['local']['failed']}") >= 2  # in front, and where its rows would be


def test_a_run_that_is_ended_takes_its_processes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    code = f"""
import subprocess
child = subprocess.Popen(["sleep", "600"])
open({str(pid)!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    processes(monkeypatch, code)
    wait = subprocess.Popen.wait

    def wait_for_child(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        """Its time is over once the child runs."""
        while timeout is not None and not (pid.exists() and pid.read_text()) and process.poll() is None:
            time.sleep(0.05)
        return wait(process, timeout and 0.0)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_child)
    with pytest.raises(RuntimeError, match="no result within"):
        proof.measure(Run("statement", "", "", 60.0))
    status = Path("/proc", pid.read_text(), "status")
    for _ in range(600):
        try:
            if "State:\tZ" in status.read_text():  # where nobody reaps it, it stays as a zombie
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.05)
    pytest.fail("the child runs on")


def test_an_override_of_the_backend_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_ATTN_BACKEND", "reference")
    processes(monkeypatch, "sys.exit(repr(os.environ.get('SPARSE_ATTN_BACKEND')))")
    with pytest.raises(RuntimeError, match="exit status 1: None"):
        proof.measure(RUNS["statement"])


def test_everything_from_a_run_to_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Run("tiny", "a tiny run", " ".join([*SHAPE, *QUICK, "--backend", "reference"]))
    monkeypatch.setattr(claims, "RUNS", (tiny,))
    limits = (1e9, 1e-9)
    bars = [Bar("Triton", "made up", "tiny", "custom", "reference us", "<=", limit) for limit in limits]
    monkeypatch.setattr(claims, "BARS", tuple(bars))
    assert proof.main(["--out", str(tmp_path / "new"), "--commit", "c0ffee"]) == 0
    said = capsys.readouterr()
    assert "Of 2 bars, 1 holds and 1 is missed." in said.out
    assert said.err.splitlines()[-1].startswith("tiny: 1 rows, ")
    whole = json.loads((tmp_path / "new" / "results.json").read_text())
    (made,) = whole["rows"]
    assert (made["run"], made["status"], made["resolved_backend"]) == ("tiny", "PASS", "reference")
    header = whole["runs"]["tiny"]["header"]
    assert header["commit"] == "c0ffee"
    assert "date" not in header
    markdown = (tmp_path / "new" / "results.md").read_text()
    assert "| holds " in markdown
    assert "| missed " in markdown
    assert f"`python -m bench {tiny.arguments}`" in markdown
    assert 'class="holds"' in (tmp_path / "new" / "index.html").read_text()
    for path in (tmp_path / "new").iterdir():
        assert not re.search(r"20\d\d-\d\d-\d\d", path.read_text())  # two runs of one commit differ in times alone

    again = tmp_path / "again"
    assert proof.main(["--from", str(tmp_path / "new" / "results.json"), "--out", str(again)]) == 0
    for path in again.iterdir():
        assert path.read_text() == (tmp_path / "new" / path.name).read_text()


# --- results of several calls -----------------------------------------------------------------------------------------


def test_only_replaces_its_runs_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "measure", lambda run: document(row(points_of(run)[-1], "triton", 7.0)))
    proof._write(merged(*LARGE), tmp_path)
    assert proof.main(["--out", str(tmp_path), "--only", "handout", "sm80"]) == 0
    after = json.loads((tmp_path / "results.json").read_text())
    assert list(after["runs"]) == ["statement", "handout", "local", "sm80"]  # in the order of RUNS
    rows = {name: [made for made in after["rows"] if made["run"] == name] for name in after["runs"]}
    assert rows["statement"] == LARGE[0]["rows"]
    assert rows["local"] == LARGE[1]["rows"]
    assert [(made["requested_backend"], made["median_ms"]) for made in rows["handout"]] == [("triton", 7.0)]
    assert len(rows["sm80"]) == 1

    made = []
    monkeypatch.setattr(proof, "measure", lambda run: made.append(run.name) or document(row(points_of(run)[0], "x", 1)))
    assert proof.main(["--out", str(tmp_path)]) == 0  # without --only nothing of before is kept
    assert made == list(RUNS)
    after = json.loads((tmp_path / "results.json").read_text())
    assert {row["requested_backend"] for row in after["rows"]} == {"x"}


def test_results_of_several_places_are_put_together(tmp_path: Path) -> None:
    slower = measured("statement", {"triton": 9.0})
    for name, whole in (("a", merged(LARGE[0], LARGE[1])), ("b", slower)):
        (tmp_path / name).mkdir()
        proof._write(whole, tmp_path / name)
    files = [str(tmp_path / name / "results.json") for name in ("a", "b")]
    assert proof.main(["--from", *files, "--out", str(tmp_path)]) == 0
    after = json.loads((tmp_path / "results.json").read_text())
    assert after == merged(slower, LARGE[1])


def test_runs_of_other_commits_and_versions_are_told_apart() -> None:
    whole = merged(*(json.loads(json.dumps(one)) for one in LARGE))
    whole["runs"]["local"]["header"]["commit"] = "decade"
    whole["runs"]["local"]["header"]["peers"] = {"fla": "0.7.0"}
    found = dict(proof_pages.facts(whole))
    assert found["commit"] == "c0ffee (statement, handout), decade (local)"
    assert found["fla"] == "0.6.0 (statement, handout), 0.7.0 (local)"
    assert found["Triton"] == "3.6.0"
    assert dict(proof_pages.facts(whole, ["local"]))["commit"] == "decade"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs --out DIR, or --from FILE"),
        (["--out", "x", "--only", "statemnt"], "invalid choice: 'statemnt'"),
        (["--from", "README.md"], "README.md: needs a results.json that `python -m bench.proof` wrote; it cannot"),
        (["--from", "x", "--only", "statement"], "leave out --only"),
        (["--out", "README.md/x"], "Not a directory"),
        (["--out", "x", "--readme", "LICENSE"], "LICENSE needs the lines <!-- results --> and <!-- /results -->"),
    ],
)
def test_usage_errors_exit_with_2_before_anything_is_measured(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(proof, "measure", None)  # a call would be another error
    with pytest.raises(SystemExit) as exit_:
        proof.main(words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert not Path("x").exists()


def test_files_that_are_written_do_not_make_the_commit_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "results").mkdir()
    for name in ("bench/a", "results/a"):
        (tmp_path / name).write_text("before")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True, env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull})
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "bench" / "environment.py"))
    clean = environment.commit()
    assert clean is not None
    assert re.fullmatch("[0-9a-f]{40}", clean)
    (tmp_path / "results" / "a").write_text("after")
    assert environment.commit() == f"{clean}-dirty"
    assert environment.commit(besides=tmp_path / "results") == clean
    assert environment.commit(besides=tmp_path.parent) == f"{clean}-dirty"
    (tmp_path / "bench" / "a").write_text("after")
    assert environment.commit(besides=tmp_path / "results") == f"{clean}-dirty"


# --- README -----------------------------------------------------------------------------------------------------------


def test_readme_gets_the_table_between_its_markers_and_nothing_else(tmp_path: Path) -> None:
    readme, stored = tmp_path / "README.md", tmp_path / "results.json"
    proof._write(merged(*LARGE), tmp_path)
    readme.write_text("above\n\n<!-- results -->\nwhat was there\n<!-- /results -->\n\nbelow\n")
    assert proof.main(["--from", str(stored), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith("above\n\n<!-- results -->\n| ms ")
    assert text.endswith("\n<!-- /results -->\n\nbelow\n")
    assert "what was there" not in text
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    heading, _, *lines = cells
    assert heading[1:5] == ["`tilelang`", "`triton`", "dense, cuDNN", "fla"]
    assert heading[5:] == ["tilelang / dense", "triton / dense", "fla / tilelang", "fla / triton"]
    assert [line[0] for line in lines] == [label for label, _, _ in claims.HEADLINE]
    assert {tuple(line[1:]) for line in lines} == {
        ("1.5", "2", "3", "6", "**0.50**", "**0.67**", "**4.00**", "**3.00**")
    }
    prose = " ".join(text.split())
    for said in ("large points on NVIDIA H200 (sm90)", "commit c0ffee", "Triton 3.6.0", "fla 0.6.0", "Of 31 bars, "):
        assert said in prose
    assert "(docs/results/results.md)" in text
    assert max(len(line) for line in text.splitlines() if line[:1] != "|") <= 130

    assert proof.main(["--from", str(stored), "--readme", str(readme)]) == 0
    assert readme.read_text() == text


def test_readme_has_a_dash_for_what_was_not_measured(tmp_path: Path) -> None:
    text = proof_pages.headline(merged(measured("statement", {"triton": 2.0, "tilelang": None}, "large-1")))
    lines = [line for line in text.splitlines() if line.startswith("| statement large-1")]
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert cells == ["statement large-1", "-", "2", "-", "-", "-", "-", "-", "-"]


@pytest.mark.parametrize("text", ["none", "<!-- results -->\n", "<!-- /results -->\n<!-- results -->\n", "twice"])
def test_readme_without_its_markers_stays_as_it_is(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "<!-- results -->\n<!-- /results -->\n" * 2 if text == "twice" else text
    proof._write(merged(*LARGE), tmp_path)
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(SystemExit):
        proof.main(["--from", str(tmp_path / "results.json"), "--readme", str(tmp_path / "README.md")])
    assert "needs the lines" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == text


def test_readme_is_not_emptied_by_results_without_large_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proof._write(measured("decode", {"triton": 2.0}), tmp_path)
    (tmp_path / "README.md").write_text("<!-- results -->\nold\n<!-- /results -->\n")
    with pytest.raises(SystemExit):
        proof.main(["--from", str(tmp_path / "results.json"), "--readme", str(tmp_path / "README.md")])
    assert "no large point was measured" in capsys.readouterr().err
    assert "old" in (tmp_path / "README.md").read_text()


def test_the_readme_at_hand_has_the_markers() -> None:
    before, between, after = proof_pages.between_markers(ROOT / "README.md")
    assert "large points" in between
    assert "Ran on the device" not in between
    assert before + after


def test_pages_stay_small(tmp_path: Path) -> None:
    """Every run with all of its rows."""
    whole = merged(
        *(measured(name, dict.fromkeys(("auto", "triton", "tilelang", "fla", "flex"), 2.0)) for name in RUNS)
    )
    proof._write(whole, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 300_000
