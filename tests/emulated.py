"""Run the CUDA C++ that TileLang makes of a kernel on a CPU, by ``emulated_hopper.h``: what it computes, not how fast.

A stand-in for what ``tilelang.compile`` gives: called with the kernel's arguments, in their order, on CPU tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tilelang import tvm

from .hopper import kept, lower

_COMPILER = shutil.which("g++")
_HEADER = Path(__file__).with_name("emulated_hopper.h")
# CUDA's C++ may see a value as another type. What a kernel does not set shall not be 0. Libraries keep to themselves.
# No vectors: g++ 12.2 for znver3 gets a loop of the order kernel wrong with them (its ids are all 0), for others not.
_FLAGS = [
    "-std=c++20", "-O2", "-march=native", "-fno-tree-vectorize", "-w", "-shared", "-fPIC", "-U_FORTIFY_SOURCE",
    "-fno-strict-aliasing", "-ftrivial-auto-var-init=pattern", "-fno-gnu-unique",
]  # fmt: skip
# Names of kernels, as they were run.
launched: list[str] = []
# Pieces of PTX in the kernels' own CUDA C++, and what does the same here.
_PTX = (
    (
        r'asm\("cvt\.rn\.bf16x2\.f32 %0, %1, %2;" : "=r"\((.+?)\) : "f"\((.+?)\), "f"\((.+?)\)\);',
        r"\1 = emulated_pair<bfloat16_t>(\2, \3);",
    ),
    (
        r'asm\("cvt\.rn\.f16x2\.f32 %0, %1, %2;" : "=r"\((.+?)\) : "f"\((.+?)\), "f"\((.+?)\)\);',
        r"\1 = emulated_pair<half_t>(\2, \3);",
    ),
    (
        r'asm volatile\(\s*"[^"]*barrier\.cta\.red\.or\.pred p, %1, 128, p;[^"]*"\s*: "\+r"\((\w+)\)'
        r' : "n"\((\w+)\) : "memory"\);',
        r"\1 = emulated_any(\2, 128, \1);",
    ),
)
_PRELUDE = """
#include "emulated_hopper.h"
#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
"""


@cache
def unusable() -> str | None:
    """Why nothing can be emulated here."""
    if _COMPILER is None:
        return "needs g++ 12 or newer, found none"
    version = subprocess.run([_COMPILER, "-dumpversion"], capture_output=True, text=True, check=True).stdout.strip()
    return f"needs g++ 12 or newer, found {version}" if int(version.split(".")[0]) < 12 else None


@cache
def emulated(kernel_of: Any, *variant: Any, edit: Callable[[str], str] = str) -> Any:
    """The kernel that ``kernel_of(*variant)`` makes, as a function. ``edit`` changes its source.

    The function takes, beside the kernel's arguments, the seed of everything that is left to chance.
    """
    kernel = kernel_of(*variant)
    source, host = lower(kernel)
    source = edit(source)
    name, parameters = re.search(r'extern "C" __global__ void (\w+)\((.*?)\);', source).groups()
    names = [parameter.split()[-1].lstrip("*") for parameter in parameters.split(",")]
    types = dict(zip(names, parameters.split(","), strict=True))
    *_, launch = re.search(rf'T\.call_packed\("{name}", (.*)\)\n', host)[1].partition(", ".join(names) + ", ")
    *grid, threads, _, _, shared = launch.split(", ")
    maps = dict(re.findall(r'(\w+): \["__tvm_tensormap_create_tiled", \w+, (.*?)\]', host))
    library = ctypes.CDLL(_compiled(_program(source, name, parameters, names, int(threads))))
    library.message.restype = ctypes.c_char_p

    def run(*args: Any, seed: int = 0) -> None:
        launched.append(name)
        known = _bound(kernel, args)

        def value(text: str) -> int:
            return eval(text, {"T": SimpleNamespace(int64=int, int32=int), "min": min, "max": max}, known)

        assert int(shared) <= 227 * 1024
        dims = [value(text) for text in grid]
        dims += [1] * (3 - len(dims))
        passed = [
            _map(maps[n], value) if "CUtensorMap" in types[n] else _scalar(types[n], known[n]) for n in names
        ]  # fmt: skip
        if library.run(seed, *dims, *(ctypes.byref(x) if isinstance(x, _Map) else x for x in passed)) == 0:
            raise RuntimeError(f"{library.message().decode()} (seed {seed})")

    return run


class _Map(ctypes.Structure):
    """A tensor map: see ``CUtensorMap`` in the header."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
        ("box", ctypes.c_int64 * 4),
    )


def _map(text: str, value: Any) -> _Map:
    """From the arguments of the call that makes it: what TMA can do with it is checked, as on a GPU."""
    _, rank, tensor, *numbers = text.split(", ")
    sizes, strides, box, steps = ([value(n) for n in numbers[4 * i : 4 * i + 4]] for i in range(4))
    interleave, swizzle, _, fill = map(int, numbers[16:])
    assert (int(rank), steps, interleave, swizzle, fill) == (4, [1] * 4, 0, 3, 0), text
    assert strides[0] == 2, strides
    assert all(0 < s < 2**40 and s % 16 == 0 for s in strides[1:]), strides
    assert all(0 < n < 2**32 for n in sizes), sizes
    assert box[0] == 64, box
    assert all(0 < n <= 256 for n in box), box
    base = value(tensor)
    assert base.data_ptr() % 16 == 0
    return _Map(base.data_ptr(), *((ctypes.c_int64 * 4)(*x) for x in (sizes, strides, box)))


def _scalar(declared: str, x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        assert "*" in declared, declared
        return ctypes.c_void_p(x.data_ptr())
    kind = ctypes.c_float if "float" in declared else ctypes.c_int64 if "int64_t" in declared else ctypes.c_int
    if kind is ctypes.c_int:
        assert -(2**31) <= x < 2**31, (declared, x)
    return kind(x)


def _bound(kernel: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Values of the kernel's parameters, and of its dynamic shapes and strides, by name."""
    known: dict[str, Any] = {}

    def bind(expected: Any, got: int) -> None:
        if isinstance(expected, tvm.tirx.Var):
            assert known.setdefault(expected.name, got) == got, (expected.name, known[expected.name], got)
        elif isinstance(expected, tvm.tirx.IntImm):
            assert int(expected) == got, (expected, got)

    for parameter, arg in zip(kernel.params, args, strict=True):
        buffer = kernel.buffer_map.get(parameter)
        if buffer is None:
            known[parameter.name] = arg
            continue
        known[buffer.name] = arg
        assert str(arg.dtype).removeprefix("torch.") == buffer.dtype, (buffer.name, arg.dtype)
        for expected, got in zip(buffer.shape, arg.shape, strict=True):
            bind(expected, got)
        if buffer.strides:
            for expected, got in zip(buffer.strides, arg.stride(), strict=True):
                bind(expected, got)
        else:
            assert arg.is_contiguous(), buffer.name
    return known


def _program(source: str, name: str, parameters: str, names: list[str], threads: int) -> str:
    source = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith("#"))
    for pattern, replacement in _PTX:
        source = re.sub(pattern, replacement, source)
    assert "asm" not in source, re.search(r".*asm.*", source)[0]
    source = re.sub(
        r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];", r"auto \2 = (\1*)emulated::shared_memory;", source
    )
    by_reference = re.sub(r"const CUtensorMap (\w+)", r"const CUtensorMap& \1", parameters)
    return f"""{_PRELUDE}
{source}
extern "C" const char* message() {{ return emulated::message; }}
extern "C" int run(int seed, int gx, int gy, int gz, {by_reference}) {{
  emulated::dice.seed(seed);
  for (int z = 0; z < gz; ++z)
    for (int y = 0; y < gy; ++y)
      for (int x = 0; x < gx; ++x) {{
        blockIdx = {{x, y, z}};
        if (!emulated::run_block({threads}, [&] {{ {name}({", ".join(names)}); }})) return 0;
      }}
  return 1;
}}
"""


def _compiled(program: str) -> str:
    """The library's path. Kept between runs, by what it was made of."""
    key = hashlib.sha256("\n".join([program, _HEADER.read_text(), *_FLAGS, _target()]).encode()).hexdigest()[:32]
    library = kept() / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=kept()) as work:
            file = Path(work, "kernel.cpp")
            file.write_text(program)
            built = Path(work, "kernel.so")
            done = subprocess.run(
                [_COMPILER, *_FLAGS, "-I", _HEADER.parent, file, "-o", built], capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr[-3000:]
            built.rename(library)
    return str(library)


@cache
def _target() -> str:
    """The compiler, and the CPU that it compiles for."""
    asked = subprocess.run(
        [_COMPILER, "-march=native", "-v", "-E", "-x", "c", "-"], input="", capture_output=True, text=True
    )
    return asked.stderr
