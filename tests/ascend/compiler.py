"""The open steps of the 910B's compiler (ascendnpu-ir), from Linalg to a memory plan: no device code is made."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

# Each in a folder of its own, installed by `make test-ascend`: which of them a CANN release holds is not known here.
COMPILERS = {version: Path(os.environ["SPARSE_ATTN_ASCENDNPU_IR"]) / version for version in ("1.2.0", "1.1.0", "1.0.0")}
TARGETS = ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4")
# Bytes of the 910B's buffers: of a vector core, L1 and L0C of a cube core.
UB, L1, L0C = 192 * 1024, 512 * 1024, 128 * 1024
_BYTES = {"i1": 0.125, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8}


class Compiled(NamedTuple):
    """What the compiler made.

    Attributes:
        error: empty if it succeeded.
        notes: what it had to give up to succeed, as its own sentences.
        ub, l1, l0c: bytes planned in these buffers.
        hivm: the program that the closed step would get.
    """

    error: str
    notes: list[str]
    ub: int
    l1: int
    l0c: int
    hivm: str


@cache
def compile_for(linalg: str, target: str, version: str) -> Compiled:
    """Compile for a device by its name, with a version of the compiler."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        source, result = folder / "kernel.mlir", folder / "kernel"
        source.write_text(
            re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg)
        )  # triton-ascend keeps this attribute to itself
        options = ("--enable-hfusion-compile=true", "--enable-hivm-compile=true", "--enable-triton-kernel-compile=true")
        buffers = ("--enable-auto-multi-buffer=true", "--enable-auto-bind-sub-block=true")
        command = COMPILERS[version] / "ascendnpuir/bin/bishengir-compile"
        environment = {**os.environ, "PATH": f"{Path(__file__).parent}:{os.environ['PATH']}"}
        environment.pop("BISHENG_INSTALL_PATH", None)
        done = subprocess.run(
            [command, source, f"--target={target}", *buffers, *options, "-o", result],
            capture_output=True, text=True, env=environment, timeout=300,
        )  # fmt: skip
        log = done.stdout + done.stderr
        notes = sorted(set(re.findall(r"\[NOTE\] (.*)", log)))
        if done.returncode:
            errors = [line for line in re.findall(r"error: (.*)", log) if "Failed to run" not in line]
            return Compiled("; ".join(dict.fromkeys(errors)) or log[-500:] or "no message", notes, 0, 0, 0, "")
        hivm = result.with_suffix(".hivm.mlir").read_text()
    plan = {space: _planned(hivm, space) for space in ("ub", "cbuf", "cc")}
    return Compiled("", notes, plan["ub"], plan["cbuf"], plan["cc"], hivm)


def _planned(hivm: str, space: str) -> int:
    """Where the last buffer of a memory ends, over all functions."""
    end = 0
    for function in re.split(r"\n  func\.func ", hivm):
        constants = dict(re.findall(r"(%c\w+) = arith\.constant (\d+) : i64", function))
        casts = re.findall(
            rf"pointer_cast\(([^)]*)\)[^:]*: memref<((?:\d+x)*)(\w+), #hivm\.address_space<{space}>>", function
        )
        for offsets, shape, element in casts:
            elements = 1
            for length in shape.split("x")[:-1]:
                elements *= int(length)
            for offset in offsets.split(","):
                if offset.strip() in constants:
                    end = max(end, int(constants[offset.strip()]) + int(elements * _BYTES[element]))
    return end
