"""Pictures and the page of one run."""

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("rich", reason="the benchmark needs rich")
pytest.importorskip("matplotlib", reason="its pictures need matplotlib")
pytest.importorskip("jinja2", reason="its page needs jinja2")

from bench import cases, plot, report
from bench.__main__ import main
from bench.ratios import ratios

from .bench_run import QUICK, SHAPE, document, row

LARGE = cases.points("handout", ["large-2"])[0]


def swept(**header: Any) -> dict[str, Any]:
    """A made-up run of three lengths and three densities, with a yardstick, a peer, and rows that have no time."""
    points = [cases.override(LARGE, f"large-2 N={n}", N=n) for n in (2048, 8192, 16384)]
    points += [cases.override(LARGE, f"large-2 topk={topk}", topk=topk) for topk in (8, 32)]
    rows = []
    for number, point in enumerate(points, 1):
        rows += [row(point, "triton", 2.0 * number), row(point, "sdpa-cudnn", 3.0 * number, "yardstick")]
        rows.append(row(point, "fla", 5.0 * number, "peer") if number < 5 else row(point, "fla", None, "peer"))
    rows.append(row(points[2], "reference", None, status="error", reason="<script>alert('&')</script> out of memory"))
    return document(*rows, **header)


# --- pictures -------------------------------------------------------------------------------------------------------


def test_sweeps_become_panels() -> None:
    length, density = plot.panels(swept()["rows"])
    assert (length.field, sorted({row["N"] for row in length.rows})) == ("N", [2048, 8192, 16384])
    assert (density.field, sorted({row["topk"] for row in density.rows})) == ("topk", [8, 32, 64])
    assert all(row["median_ms"] is not None for row in (*length.rows, *density.rows))
    assert length.subtitle == "B=2 Hq=64 Hk=4 D=128 topk=64 block_size=64, random index"
    assert density.subtitle == "B=2 Hq=64 Hk=4 N=8192 D=128 block_size=64, random index"


def test_points_that_differ_in_more_are_compared_by_point() -> None:
    rows = [row(point, "triton", 1.0) for point in cases.points("handout", ["all"])]
    (panel,) = plot.panels(rows)
    assert (panel.field, len(panel.rows)) == (None, 4)
    decode = [
        row(cases.override(LARGE, f"{m}", N=1, M=m, q_offset=m - 1), "triton", 1.0) for m in (1024, 4096)
    ]  # M and q_offset differ: no sweep of one field
    assert [panel.field for panel in plot.panels(decode)] == [None]


def test_lines_have_the_rows_values() -> None:
    figure = plot.draw(swept())
    time_by_length, rate_by_length, time_by_density, _ = figure.axes
    lines = {line.get_label(): line for line in time_by_length.lines}
    assert set(lines) == {"triton", "sdpa-cudnn (dense)", "fla"}
    assert list(lines["triton"].get_xdata()) == [2048, 8192, 16384]
    assert list(lines["triton"].get_ydata()) == [2.0, 4.0, 6.0]
    assert (time_by_length.get_xscale(), time_by_length.get_yscale()) == ("log", "log")
    # Dense attention is another function: it has no rate of selected work. The matrix product is a line without rows.
    rates = {line.get_label() for line in rate_by_length.lines}
    assert rates == {"triton", "fla", "matmul ceiling, 745 TFLOP/s"}
    (triton,) = [line for line in time_by_density.lines if line.get_label() == "triton"]
    densities = [cases.override(LARGE, "x", topk=topk).density for topk in (8, 32, 64)]
    assert list(triton.get_xdata()) == pytest.approx(densities)
    title = figure.get_suptitle()
    assert "NVIDIA H200 (sm90)" in title
    assert "torch 2" in title
    assert len({line.get_color() for line in time_by_length.lines}) == 3


def test_no_times_are_said_in_the_picture() -> None:
    figure = plot.draw(document(row(LARGE, "triton", None)))
    assert "no row has a time" in [text.get_text() for text in figure.texts]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_of_a_run(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"picture.{ending}"
    arguments = [*SHAPE, *QUICK, "--backend", "reference", "--sweep", "N=16,32", "--sweep", "topk=1,2"]
    assert main([*arguments, "--plot", str(path)]) == 0
    data = path.read_bytes()
    if ending == "png":
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width > 1000
        assert height > 1000  # two rows of panels
    else:
        assert ElementTree.fromstring(data).tag.endswith("svg")
        assert "sequence length N" in data.decode()


@pytest.mark.parametrize(("option", "missing"), [("--plot", "matplotlib"), ("--report", "jinja2")])
def test_what_is_not_installed_is_said_before_measuring(
    option: str, missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import options

    real = options.importlib.util.find_spec
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    with pytest.raises(SystemExit) as exit_:
        main([*QUICK, option, str(tmp_path / "x.png")])
    assert exit_.value.code == 2
    assert f"{option} needs {missing}: pip install 'sparse_attn[bench]'" in capsys.readouterr().err


# --- ratios ---------------------------------------------------------------------------------------------------------


def test_ratios_are_to_the_fastest_dense_and_the_fastest_peer() -> None:
    rows = [
        row(LARGE, "triton", 4.0),
        row(LARGE, "sdpa-flash", 6.0, "yardstick"),
        row(LARGE, "sdpa-cudnn", 5.0, "yardstick"),
        row(LARGE, "fla", 12.0, "peer"),
        row(LARGE, "flex", 40.0, "peer"),
        row(LARGE, "nsa-triton", None, "peer"),
        row(LARGE, "triton", 1.0, pattern="local"),  # nothing to compare with
    ]
    (line,) = ratios(rows)
    assert (line["backend"], line["dense"], line["over_dense"]) == ("triton", "sdpa-cudnn", 0.8)
    assert (line["peer"], line["peer_over"]) == ("fla", 3.0)
    (line,) = ratios([row(LARGE, "triton", 4.0), row(LARGE, "fla", 2.0, "peer")])
    assert (line["dense"], line["over_dense"], line["peer_over"]) == (None, None, 0.5)


# --- the page -------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a reader would see, what would be loaded, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags, self.loaded, self.open = "", [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value for name, value in attributes if name in ("src", "href", "data", "xlink:href")]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def written(whole: dict[str, Any], folder: Path) -> str:
    report.write(whole, folder)
    return (folder / "index.html").read_text()


def test_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    text = written(swept(), tmp_path)
    page = Page(text)
    assert all(value.startswith("#") for value in page.loaded)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.tags.count("svg") == 1
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)\)", text)) == set(re.findall(r"url\((#[^)]*)\)", text))
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert re.findall(r"https?://[^\s\"<]*", without_namespaces) == []


def test_page_says_all_that_belongs_to_a_run(tmp_path: Path) -> None:
    whole = swept(peers={"fla": "0.6.0"}, peers_absent={"flash-attn": "pip install flash-attn"}, notes=["a note"])
    text = Page(written(whole, tmp_path)).text
    for expected in (
        "NVIDIA H200 (sm90)",
        whole["header"]["commit"],
        whole["header"]["torch"],
        "0.6.0",
        "flushes the L2 cache before each call (cold)",
        "matmul 745 TFLOP/s (8192 x 8192 x 8192, float16), copy 4.24 TB/s",
        "<script>alert('&')</script> out of memory",
        "not installed: flash-attn: pip install flash-attn",
        "a note",
        "ours / dense",
        "needs <more> & better",
        "sequence length N",
        "large-2 topk=32: B=2 Hq=64",
    ):
        assert expected in text
    assert text.index("out of memory") < text.index("ours / dense")  # faults are seen first


def test_page_of_a_run_without_faults_peers_or_times() -> None:
    fine = document(row(LARGE, "triton", 1.0))
    headings = [section.heading for section in report.sections(fine)]
    assert headings == ["Machine and method", "Results", "Support matrix"]
    nothing = document(row(LARGE, "triton", None))
    assert "no row has a time" in Page(report.page(nothing, report.sections(nothing))).text
    unchecked = document(row(LARGE, "triton", 1.0, status="unchecked"))
    assert "1 of 1 rows were timed without a check." in report.sections(unchecked)[0].notes


def test_report_of_a_run_and_again_from_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "deep" / "first", tmp_path / "second"
    arguments = [*SHAPE, *QUICK, "--backend", "reference", "--sweep", "N=16,32", "--peers", "sdpa-flash"]
    assert main([*arguments, "--report", str(first)]) == 0
    assert main(["--from", str(first / "results.json"), "--report", str(second)]) == 0
    assert {path.name for path in first.iterdir()} == {"index.html", "results.json", "results.md"}
    for path in first.iterdir():
        assert path.read_text() == (second / path.name).read_text()
    text = Page((first / "index.html").read_text()).text
    assert "Measured on a CPU" in text
    assert "caches warm" in text
    markdown = (first / "results.md").read_text()
    assert "| custom N=16 | reference  | PASS" in markdown
    assert "ours / dense" in markdown
    support = json.loads((first / "results.json").read_text())["support"]
    assert {"device": "cpu", "backend": "reference", "answer": "chosen", "why": ""} in support


def test_report_shows_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = document(row(LARGE, "triton", 1.0)), document(row(LARGE, "triton", 2.0), device="NVIDIA H20")
    for name, whole in (("old", old), ("new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(whole))
    arguments = ["--from", str(tmp_path / "new.json"), "--compare", str(tmp_path / "old.json")]
    assert main([*arguments, "--report", str(tmp_path / "page")]) == 1
    text = Page((tmp_path / "page" / "index.html").read_text()).text
    assert "WARNING: device: NVIDIA H200 (sm90) before" in text
    assert "slower" in text
