"""What is claimed: that the runs can be made, and what the bars say of made-up rows."""

from __future__ import annotations

import pytest

pytest.importorskip("rich", reason="the benchmark needs rich")
pytest.importorskip("matplotlib", reason="its pictures need matplotlib")
pytest.importorskip("jinja2", reason="its page needs jinja2")

from bench import arguments, claims, options, verdicts
from bench.claims import Bar, Run

from .proof_run import FAST, RUNS, measured, merged, points_of

# --- runs and bars ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", claims.RUNS, ids=lambda run: run.name)
def test_runs_are_what_the_benchmark_understands(run: Run) -> None:
    """Names of backends and peers are checked, points are those that the bars want, at most 10 minutes."""
    p = arguments.parser()
    args = p.parse_args([*run.words, "--device", "cpu"])
    options.check_together(p, args)
    names = [*options.chosen_backends(p, args), *(peer.name for peer in options.chosen_peers(p, args)[0])]
    sizes = {point.size for point in points_of(run)}
    for bar in claims.BARS:
        if bar.run == run.name:
            assert bar.size in sizes
            wanted = [name for name in bar.figure.split(" / ") if name != "best peer"]
            assert {name.split()[0] for name in wanted} <= set(names)
    assert 0 < run.timeout_s <= 600


def test_names_are_told_apart_and_known() -> None:
    assert len(RUNS) == len(claims.RUNS)
    assert {bar.run for bar in claims.BARS} | {run for _, run, _ in claims.HEADLINE} <= set(RUNS)
    assert len(set(claims.BARS)) == len(claims.BARS)


# --- what the bars say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figure", "sign", "threshold", "expected"),
    [
        ("triton / sdpa-cudnn", "<=", 0.67, ("holds", 2 / 3)),
        ("triton / sdpa-cudnn", "<=", 0.66, ("missed", 2 / 3)),
        ("tilelang / sdpa-cudnn", "<=", 0.5, ("holds", 0.5)),
        ("tilelang / triton", "<=", 1.0, ("holds", 0.75)),
        ("triton / tilelang", "<=", 1.0, ("missed", 4 / 3)),
        ("best peer / triton", ">=", 2.5, ("holds", 2.5)),  # flex is the faster one
        ("best peer / triton", ">=", 2.6, ("missed", 2.5)),
        ("fla / triton", ">=", 2.6, ("holds", 3.0)),
        ("triton us", "<=", 2000, ("holds", 2000.0)),
        ("triton us", "<=", 1999, ("missed", 2000.0)),
        ("triton % of copy", ">=", 72, ("holds", 72.0)),
        ("triton % of copy", ">=", 72.1, ("missed", 72.0)),
    ],
)
def test_bars_hold_or_are_missed(figure: str, sign: str, threshold: float, expected: tuple[str, float]) -> None:
    whole = measured("statement", {**FAST, "flex": 5.0}, copy_percent=72.0, compulsory_bytes=10**6)
    (verdict,) = verdicts.judge([Bar("Triton", "made up", "statement", "large-2", figure, sign, threshold)], whole)
    assert (verdict.answer, verdict.figure) == (expected[0], pytest.approx(expected[1]))
    assert "ms" in verdict.note or "L2 cold" in verdict.note


@pytest.mark.parametrize(
    ("figure", "why"),
    [
        ("triton / sdpa-cudnn", "sdpa-cudnn: refused: made up"),
        ("best peer / triton", "no row of best peer"),
        ("tilelang / triton", "no row of tilelang"),
        ("triton % of copy", "the ceilings were not measured"),
    ],
)
def test_bars_without_times_are_not_measured(figure: str, why: str) -> None:
    whole = measured("statement", {"triton": 2.0, "sdpa-cudnn": None})
    (verdict,) = verdicts.judge([Bar("Triton", "made up", "statement", "large-2", figure, "<=", 1.0)], whole)
    assert verdict[1:] == ("not measured", None, why)


def test_bars_of_runs_that_are_not_there_or_failed() -> None:
    bar = Bar("Triton", "made up", "statement", "large-2", "triton us", "<=", 1.0)
    (verdict,) = verdicts.judge([bar], merged())
    assert verdict[1:] == ("not measured", None, "the run statement was not made")
    failed = {"runs": {"statement": {"arguments": "", "failed": "ended by SIGSEGV", "header": None}}, "rows": []}
    (verdict,) = verdicts.judge([bar], failed)
    assert verdict[1:] == ("not measured", None, "the run statement failed: ended by SIGSEGV")


def test_a_size_of_another_run_is_another_row() -> None:
    whole = merged(measured("statement", {"triton": 2.0}), measured("handout", {"triton": 4.0}))
    bars = [Bar("Triton", "made up", run, "large-2", "triton us", "<=", 1e9) for run in ("statement", "handout")]
    assert [verdict.figure for verdict in verdicts.judge(bars, whole)] == [2000.0, 4000.0]


def test_what_was_chosen_is_told_beside_what_was_forced() -> None:
    """The choice of the same kernel is not slower than it, whatever the clock says."""
    whole = measured("handout-device", {"triton": 0.010, "tilelang": 0.012, "auto": 0.0101})
    for made in whole["rows"]:
        if made["requested_backend"] == "auto":
            made["resolved_backend"] = "triton"
    bars = [
        Bar("TileLang", "made up", "handout-device", "small", f"{name} / triton", "<=", 1.0)
        for name in ("tilelang", "auto")
    ]
    forced, chosen = verdicts.judge(bars, whole)
    assert (forced.answer, forced.figure) == ("missed", pytest.approx(1.2))
    assert forced.note == "tilelang 0.012 ms / triton 0.01 ms; auto chose triton"
    assert (chosen.answer, chosen.figure) == ("holds", 1.0)
    assert chosen.note == "the same code; auto (triton) 0.0101 ms / triton 0.01 ms: 1.01"
    for made in whole["rows"]:
        if made["requested_backend"] == "auto":
            made["resolved_backend"] = "tilelang"
    _, chosen = verdicts.judge(bars, whole)
    assert (chosen.answer, chosen.figure) == ("missed", pytest.approx(1.01))


def test_counts_are_said() -> None:
    bars = [Bar("Triton", "made up", "statement", "large-2", "triton us", "<=", limit) for limit in (1999, 2000, 2001)]
    whole = measured("statement", {"triton": 2.0})
    assert verdicts.summary(verdicts.judge(bars, whole)) == "Of 3 bars, 2 hold and 1 is missed."
    said = verdicts.summary(verdicts.judge(bars[1:2], whole) + verdicts.judge(bars, merged()))
    assert said == "Of 4 bars, 1 holds, 0 are missed and 3 were not measured."
