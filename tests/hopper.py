"""Lower TileLang kernels for Hopper without a GPU, compile them where nvcc is found, and read what came out."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tilelang
from tilelang import tvm
from tvm.target import Target

from sparse_attn.backends.tilelang_hopper.compiled import PASS_CONFIGS

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
_ROOT = Path(tilelang.__file__).parent
_FLAGS = ["-std=c++20", "-O3", "-use_fast_math", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v"]


class Compiled(NamedTuple):
    """What nvcc made of a kernel: registers and bytes of spills of a thread, and warnings of ptxas about it."""

    registers: int
    spills: int
    warnings: list[str]


class Lowered(NamedTuple):
    """CUDA C++ of a kernel for sm_90a, and the code of the host that launches it, as TileLang prints it."""

    source: str
    host: str


def lower(kernel: Any) -> Lowered:
    """What TileLang makes of a kernel. That takes 10 to 20 seconds: it is kept, by all that the kernel says."""
    key = hashlib.sha256(repr((tilelang.__version__, PASS_CONFIGS, tvm.ir.save_json(kernel))).encode()).hexdigest()
    file = kept() / f"{key}.json"
    if not file.exists():
        target = Target({"kind": "cuda", "arch": "sm_90a"})
        with target, tvm.transform.PassContext(config=dict(PASS_CONFIGS)):
            artifact = tilelang.lower(kernel, target=target)
        with tempfile.NamedTemporaryFile("w", dir=kept(), delete=False) as new:
            json.dump(Lowered(artifact.kernel_source, str(artifact.host_mod)), new)
        Path(new.name).rename(file)
    return Lowered(*json.loads(file.read_text()))


@cache
def kept() -> Path:
    """A folder for what takes long to make. This user's alone: what is in it gets run."""
    folder = Path(tempfile.gettempdir(), f"sparse_attn_tests_{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp())


def shared_bytes(source: str) -> int:
    """Shared memory that a kernel's source takes: buffers where they end, and barriers."""
    offsets = [int(offset) for offset in re.findall(r"buf_dyn_shmem \+ (\d+)\)", source)]
    barriers = [int(n) for n in re.findall(r"__shared__ __align__\(16\) uint64_t \w+\[(\d+)\]", source)]
    assert offsets, "no buffers found in the source"
    return max(offsets) + 8 * sum(barriers)


def compile_source(source: str) -> Compiled:
    """Compile by nvcc, with the headers that come with TileLang."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cu")
        file.write_text(source)
        includes = ["-I", _ROOT / "src", "-I", _ROOT / "3rdparty" / "cutlass" / "include"]
        done = subprocess.run(
            [NVCC, *_FLAGS, *includes, "-cubin", "-o", file.with_suffix(".cubin"), file], capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr[-3000:]
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr).groups())
    warnings = [line for line in done.stderr.splitlines() if "wgmma" in line or "setmaxnreg" in line]
    return Compiled(registers, stores + loads, warnings)
