"""Run the Linalg form of a launch on a CPU, by way of LLVM: in numbers what the 910B is asked to do."""

from __future__ import annotations

import ctypes
import re
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sparse_attn.backends.triton_ascend.adapter import Launch

from .lowering import signature

_LLVM = Path("/usr/lib/llvm-19")
# From tensors to memory, from memory to loops, from loops to LLVM: in the order of triton-ascend's own way to a CPU,
# with the names of LLVM 19, arithmetic on whole tensors made Linalg first, and what LLVM has no instruction for
# expanded.
_PASSES = (
    "--allow-unregistered-dialect",
    "--convert-elementwise-to-linalg", "--convert-linalg-to-affine-loops", "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor", "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--buffer-deallocation-pipeline", "--convert-bufferization-to-memref", "--lower-affine",
    "--convert-linalg-to-loops",
    "--convert-scf-to-cf", "--arith-expand=include-bf16=true", "--memref-expand", "--expand-strided-metadata",
    "--lower-affine", "--convert-math-to-llvm", "--convert-math-to-libm", "--convert-index-to-llvm",
    "--convert-arith-to-llvm", "--finalize-memref-to-llvm", "--convert-func-to-llvm", "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)  # fmt: skip


def run(launch: Launch, linalg: str) -> None:
    """Compile, once for each text, and run; results are where the launch's arguments say."""
    function = getattr(_compiled(linalg), launch.kernel.__name__)
    unused = torch.zeros(16, dtype=torch.int8)  # two buffers that only a device needs
    arguments = [*_memref(unused), *_memref(unused)]
    for value, kind in zip(launch.args, signature(launch).values(), strict=True):
        if isinstance(value, torch.Tensor):
            arguments += _memref(value)
        else:
            arguments.append({"fp32": ctypes.c_float, "i32": ctypes.c_int32, "i64": ctypes.c_int64}[kind](value))
    for program in range(launch.programs):
        function(*arguments, *map(ctypes.c_int32, (launch.programs, 1, 1, program, 0, 0)))


@cache
def _compiled(linalg: str) -> ctypes.CDLL:
    with TemporaryDirectory() as folder:
        source, llvm, ir, library = (Path(folder) / name for name in ("k.mlir", "k.llvm.mlir", "k.ll", "k.so"))
        source.write_text(re.sub(r', mix_mode = "[^"]*"', "", linalg))  # an attribute that LLVM's tools do not know
        _tool("mlir-opt", source, *_PASSES, "-o", llvm)
        _tool("mlir-translate", "--mlir-to-llvmir", llvm, "-o", ir)
        helpers = _LLVM / "lib/libmlir_c_runner_utils.so.19.1"  # copies between strided memory
        link = ("-shared", "-fPIC", helpers, f"-Wl,-rpath,{helpers.parent}", "-lm")
        _tool("clang", "-O2", "-march=native", "-Wno-override-module", ir, *link, "-o", library)
        return ctypes.CDLL(str(library))


def _memref(x: torch.Tensor) -> list[object]:
    """A one-dimensional memref as C passes it: allocated, aligned, offset, size, stride."""
    pointer = ctypes.c_void_p(x.data_ptr())
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(x.numel()), ctypes.c_int64(1)]


def _tool(name: str, *arguments: object) -> None:
    done = subprocess.run([_LLVM / "bin" / name, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, f"{name}: {done.stderr[:2000]}"
