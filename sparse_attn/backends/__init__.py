"""The backends that ship with the package: one row each. Rows are data; no backend is imported by reading them."""

from __future__ import annotations

import os

from ..contract import BackendSpec, Requirement

# Triton's interpreter, on if this variable is set as Triton reads it, runs kernels on a CPU: for tests and debugging.
_INTERPRETED = ("cpu",) if os.environ.get("TRITON_INTERPRET") == "1" else ()

BUILTIN: tuple[BackendSpec, ...] = (
    BackendSpec(
        name="reference",
        target="sparse_attn.backends.reference:backend",
        architectures=("*",),
    ),
    BackendSpec(
        name="triton",
        target="sparse_attn.backends.triton_cuda:backend",
        architectures=("sm*", *_INTERPRETED),
        requires=(Requirement("triton", minimum="3.2"),),
        install="pip install triton",
    ),
    BackendSpec(
        name="tilelang",
        target="sparse_attn.backends.tilelang_hopper:backend",
        architectures=("sm90",),
        requires=(Requirement("tilelang", minimum="0.1.15"),),
        install="pip install tilelang",
    ),
    BackendSpec(
        name="triton_ascend",
        target="sparse_attn.backends.triton_ascend:backend",
        architectures=("ascend910b",),
        # Its part of triton, by which it is told from the package that it replaces.
        requires=(
            Requirement("triton.backends.ascend", minimum="3.2", distribution="triton-ascend"),
            Requirement("torch_npu"),
        ),
        install=(
            "pip install triton-ascend in an environment without the package triton, and the torch-npu for its torch"
        ),
    ),
    BackendSpec(
        name="torch_npu",
        target="sparse_attn.backends.torch_npu:backend",
        architectures=("ascend910b",),
        requires=(Requirement("torch_npu"),),
        install="pip install torch-npu, in the release that matches torch and CANN",
        automatic=False,  # until a device has confirmed it
    ),
)
