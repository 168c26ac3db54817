"""What is claimed: the runs that measure it, and the bars that were set beforehand. Data; :mod:`bench.verdicts` judges.

A document of :mod:`bench.proof` has ``runs``, by name (``arguments``; ``failed``, why there is no result, or None; and
``header``, that of :mod:`bench.results` without its date), and ``rows``, those of all runs with the name as ``run``.
"""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

Proof = dict[str, Any]


class Run(NamedTuple):
    """One ``python -m bench`` in a process of its own, which is ended after ``timeout_s``."""

    name: str
    what: str
    arguments: str
    timeout_s: float = 300.0

    @property
    def words(self) -> list[str]:
        """The arguments, split."""
        return shlex.split(self.arguments)


class Bar(NamedTuple):
    """``figure``, of the rows of ``size`` in the run ``run``, has to be ``sign`` ``threshold``.

    A figure is ``A / B``, the ratio of two medians; ``A us``, a median; or ``A % of copy``, what the roofline says.
    A and B are backends or peers as they were asked for, or ``best peer``, the fastest that computes the same.
    """

    issue: str
    claim: str
    run: str
    size: str
    figure: str
    sign: str
    threshold: float


_DENSE = "sdpa-cudnn"
_WHOLE = f"--size all --timer do_bench --backend triton tilelang --peers {_DENSE} sdpa-flash fla"
_DEVICE = f"--size small medium --timer graph --backend auto triton tilelang --peers {_DENSE}"
_LONG = "--B 1 --Hq 64 --Hk 4 --N 65536 --D 128 --topk 16 --block-size 64"
_DECODE = "--B 32 --Hq 64 --Hk 4 --N 1 --M 65536 --q-offset 65535 --D 128 --topk 16 --block-size 64"
_SLOW = "--B 32 --Hq 16 --Hk 1 --N 1024 --D 128 --topk 16 --block-size 32"

RUNS = (
    Run("statement", "the statement's points", f"--set statement {_WHOLE}", 450),
    Run("handout", "the handout's points", f"--set handout {_WHOLE}", 450),
    Run(
        "local", "the statement's large-2, neighbouring queries choosing alike",
        f"--set statement --size large-2 --pattern local --timer do_bench --backend triton tilelang "
        f"--peers {_DENSE} fla",
    ),
    Run("65536", "65536 keys", f"{_LONG} --timer do_bench --backend triton tilelang --peers fla"),
    Run(
        "65536-local", "65536 keys, neighbouring queries choosing alike",
        f"{_LONG} --pattern local --timer do_bench --backend triton tilelang --peers fla",
    ),
    Run(
        "decode", "one query of each of 32 sequences against 65536 keys, device time, cold",
        f"{_DECODE} --timer graph-cold --backend auto triton tilelang",
    ),
    Run("statement-device", "the statement's small and medium, device time", f"--set statement {_DEVICE}"),
    Run("handout-device", "the handout's small and medium, device time", f"--set handout {_DEVICE}"),
    Run(
        "short", "32 short sequences of one group, small blocks, device time",
        f"{_SLOW} --timer graph --backend auto triton tilelang --peers {_DENSE}",
    ),
    Run(
        "sm80", "an A100's Triton kernels, run here",
        "--code-for sm80 --set statement --size large --timer do_bench --backend triton --peers fla",
    ),
    Run(
        "bfloat16", "bfloat16, the statement's large-1",
        f"--dtype bfloat16 --set statement --size large-1 --timer do_bench --backend triton tilelang "
        f"--peers {_DENSE} fla",
    ),
    Run(
        "cold-start", "first calls in fresh processes, the handout's large-1",
        "--set handout --size large-1 --timer do_bench --cold-start --backend triton tilelang",
    ),
    Run(
        "reference", "the reference, the handout's large-1",
        "--set handout --size large-1 --timer do_bench --backend reference",
    ),
)  # fmt: skip

_TR, _TL = "Triton", "TileLang"
_OVERRIDDEN = "custom"  # what `python -m bench` calls a shape that is given in full
BARS = (
    Bar(_TR, "large-2: 0.95x dense", "statement", "large-2", "triton / sdpa-cudnn", "<=", 0.95),
    Bar(_TR, "large-2: 1.45x faster than the best peer", "statement", "large-2", "best peer / triton", ">=", 1.45),
    Bar(_TR, "large-2, local: 0.62x dense", "local", "large-2", "triton / sdpa-cudnn", "<=", 0.62),
    Bar(_TR, "large-2: 1.15x dense", "handout", "large-2", "triton / sdpa-cudnn", "<=", 1.15),
    Bar(_TR, "large-1: 1.2x dense", "statement", "large-1", "triton / sdpa-cudnn", "<=", 1.2),
    Bar(_TR, "large-1: 1.2x dense", "handout", "large-1", "triton / sdpa-cudnn", "<=", 1.2),
    Bar(_TR, "small: 15 us of device time", "statement-device", "small", "triton us", "<=", 15),
    Bar(_TR, "small: 15 us of device time", "handout-device", "small", "triton us", "<=", 15),
    Bar(_TR, "random: 1.5x faster than the best peer", "65536", _OVERRIDDEN, "best peer / triton", ">=", 1.5),
    Bar(_TR, "70 % of copy bandwidth", "decode", _OVERRIDDEN, "triton % of copy", ">=", 70),
    Bar(_TR, "large-2: 1.25x faster than fla's gather kernel", "sm80", "large-2", "fla / triton", ">=", 1.25),
    Bar(_TR, "large-1: 1.7x faster than fla's gather kernel", "sm80", "large-1", "fla / triton", ">=", 1.7),
    Bar(_TL, "large-2: 0.80x dense", "statement", "large-2", "tilelang / sdpa-cudnn", "<=", 0.80),
    Bar(_TL, "large-2, local: 0.50x dense", "local", "large-2", "tilelang / sdpa-cudnn", "<=", 0.50),
    Bar(_TL, "large-2: 1.0x dense", "handout", "large-2", "tilelang / sdpa-cudnn", "<=", 1.0),
    Bar(_TL, "large-1: 1.05x dense", "statement", "large-1", "tilelang / sdpa-cudnn", "<=", 1.05),
    Bar(_TL, "large-1: 1.05x dense", "handout", "large-1", "tilelang / sdpa-cudnn", "<=", 1.05),
    Bar(_TL, "medium: 1.1x dense", "statement-device", "medium", "tilelang / sdpa-cudnn", "<=", 1.1),
    Bar(_TL, "medium: 1.1x dense", "handout-device", "medium", "tilelang / sdpa-cudnn", "<=", 1.1),
    *(
        Bar(_TL, f"never slower than triton: {what}", run, size, "tilelang / triton", "<=", 1.0)
        for what, run, size in (
            ("large-2", "statement", "large-2"), ("large-2, local", "local", "large-2"),
            ("large-1", "statement", "large-1"), ("large-2", "handout", "large-2"), ("large-1", "handout", "large-1"),
            ("medium", "statement-device", "medium"), ("medium", "handout-device", "medium"),
            ("small, forced", "statement-device", "small"), ("small, forced", "handout-device", "small"),
            ("short sequences", "short", _OVERRIDDEN),
        )
    ),
    *(
        Bar(_TL, "never slower than triton: small, as chosen", run, "small", "auto / triton", "<=", 1.0)
        for run in ("statement-device", "handout-device")
    ),
)  # fmt: skip

# The large points: what README's table shows, by run and size.
HEADLINE = (
    ("statement large-1", "statement", "large-1"),
    ("statement large-2", "statement", "large-2"),
    ("the same, local index", "local", "large-2"),
    ("handout large-1", "handout", "large-1"),
    ("handout large-2", "handout", "large-2"),
)
