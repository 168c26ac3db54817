"""Running the benchmark in tests: in this process or one of its own, at shapes that take no time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cases
from bench.environment import header
from bench.measure import Row
from bench.roofline import Ceilings

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
QUICK = ("--device", "cpu", "--warmup", "0", "--rep", "1", "--no-roofline")
SMALL = ("--size", "small", *QUICK)
SHAPE = ("--B", "1", "--Hq", "2", "--Hk", "1", "--N", "48", "--D", "16", "--topk", "2", "--block-size", "16")
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


def rows_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return json.loads(capsys.readouterr().out)["rows"]


def row(point: cases.Point, name: str, ms: float | None, kind: str = "backend", **changes: Any) -> dict[str, Any]:
    """A made-up row, as in JSON."""
    made = Row(point, "float16", "random", 0, name, kind, name, "PASS" if ms else "refused", None if ms else "made up")
    if ms:
        made.median_ms, made.p20_ms, made.p80_ms, made.timer, made.l2 = ms, 0.9 * ms, 1.1 * ms, "do_bench", "cold"
        made.tflops_selected = None if kind == "yardstick" else 100 / ms
    return {**made.flat(), **changes}


def document(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A made-up run of them on an H200 that is not there."""
    ceilings = Ceilings(745.0, 4.24, "float16", 8192, 2**30, "do_bench")
    facts = {**header(CPU), "device": "NVIDIA H200", "arch": "sm90", "code_for": None, "peers": {}, "peers_absent": {}}
    support = [{"device": "cuda:0", "backend": "triton", "answer": "no", "why": "needs <more> & better"}]
    whole = {**facts, "ceilings": ceilings._asdict(), "notes": [], **changes}
    return {"header": whole, "rows": list(rows), "support": support}
