"""Compile what a call would launch, for a GPU that is not at hand, and read what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from sparse_attn.backends.triton_cuda.launch import Launch

_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiled(NamedTuple):
    """What the compiler made of a launch.

    Attributes:
        registers: of a thread.
        stack: bytes of local memory of a thread: spills.
        spills_in_loops: instructions that reach local memory in innermost loops with matrix products.
        waits_for_wgmma: the most waits for each wgmma instruction in such a loop. One asynchronous product is several
            instructions and one wait; where ptxas gives up on asynchrony, in the whole kernel, each waits twice.
        shared: bytes of shared memory of a block.
        ptx: the code before ptxas.
    """

    registers: int
    stack: int
    spills_in_loops: int
    waits_for_wgmma: float
    shared: int
    ptx: str


def specialisation(launch: Launch) -> tuple[object, ...]:
    """What a launch is compiled for, beside the target: types, constants, and what is assumed of its arguments."""
    signature, constants, attributes = _describe(launch)
    return launch.kernel.__name__, *map(repr, (signature, constants, attributes, launch.warps))


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compile a launch for a compute capability (80, 90, ...), specialised on its arguments as a real one would be."""
    source = ASTSource(launch.kernel, *_describe(launch))
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": launch.warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        sass = _cuobjdump("--dump-sass", file.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    loops = _loops_with_products(sass)
    spills = sum(bool(re.search(r"\b(LDL|STL)\b", text)) for body in loops for text in body)
    waits = [_count("WARPGROUP", body) / _count("HGMMA", body) for body in loops if _count("HGMMA", body)]
    return Compiled(registers, stack, spills, max(waits, default=0.0), kernel.metadata.shared, kernel.asm["ptx"])


def _describe(launch: Launch) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Types, constants and assumptions, by the rules of Triton's own launches: 1 is a constant, 16 divides or not."""
    signature, constants, attributes = {}, {}, {}
    for place, (parameter, value) in enumerate(zip(launch.kernel.params, launch.args, strict=True)):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            if value.is_meta or value.data_ptr() % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            element = _TYPES[value.base.dtype].removeprefix("*")
            signature[name] = f"tensordesc<{element}{list(value.block_shape)}>".replace(" ", "")
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[name] = "constexpr"
            constants[(place,)] = 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _cuobjdump(option: str, file: str) -> str:
    return subprocess.run([_TOOLS / "cuobjdump", option, file], capture_output=True, text=True, check=True).stdout


def _count(instruction: str, body: list[str]) -> int:
    return sum(instruction in text for text in body)


def _loops_with_products(sass: str) -> list[list[str]]:
    """Innermost loops with matrix products: instructions from the targets of backward jumps to the jumps."""
    lines = {int(at, 16): text for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)}
    jumps = [(at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)) for at, text in lines.items()]
    loops = [(int(jump.group(1), 16), at) for at, jump in jumps if jump and int(jump.group(1), 16) < at]
    innermost = [
        (start, end)
        for start, end in loops
        if not any(start <= a and b <= end and (a, b) != (start, end) for a, b in loops)
    ]
    bodies = [[text for at, text in lines.items() if start <= at <= end] for start, end in innermost]
    return [body for body in bodies if _count("MMA", body)]
