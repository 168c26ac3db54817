"""What triton-ascend makes of a launch before the 910B's compiler gets it: Linalg on tensors, as text."""

from __future__ import annotations

import torch
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from sparse_attn.backends.triton_ascend.adapter import Launch

_TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}


def signature(launch: Launch) -> dict[str, str]:
    """Types of the arguments by parameter, constants left out: an int is as wide as its value needs."""
    names = [name for name in launch.kernel.arg_names if name not in launch.constants]
    return {name: _type(value) for name, value in zip(names, launch.args, strict=True)}


def linalg(launch: Launch, target: str) -> str:
    """Lower for a device by its name, as ``"Ascend910B2"``."""
    backend = AscendBackend(GPUTarget("npu", target, 0))
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(launch.kernel, signature(launch), launch.constants)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"hash": "offline", "target": backend.target, **options.__dict__}
    return ttir_to_linalg(make_ttir(module, metadata, options), metadata, options, named_ops=True)


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"
