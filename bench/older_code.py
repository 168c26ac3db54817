"""Run the code that Triton makes for an older NVIDIA GPU on the one at hand: an A100's kernels, on a Hopper GPU.

Triton is told to build for the older one (its variable ``TRITON_OVERRIDE_ARCH``, which the backend's plan follows): its
instructions, its tile sizes. PTX runs on newer GPUs, machine code does not; so only the last step, PTX to machine code,
is done for the GPU at hand. What is seen is the older GPU's code at the newer one's speeds.
"""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any

import torch


def build_for(architecture: str) -> None:
    """Make Triton build for ``architecture``, as ``"sm80"``, from now on. Before the first launch; not to be undone.

    Raises:
        ValueError: if it is no such name, or not older than the GPU at hand.
    """
    major, minor = torch.cuda.get_device_capability()
    at_hand = 10 * major + minor
    match = re.fullmatch(r"sm(\d+)", architecture)
    if not match or int(match.group(1)) >= at_hand:
        raise ValueError(f"needs an architecture older than sm{at_hand}, as 'sm80', got {architecture!r}")
    from triton.backends.nvidia import compiler

    os.environ["TRITON_OVERRIDE_ARCH"] = architecture
    # Triton's cache does not know about the last step.
    os.environ["TRITON_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), f"sparse_attn_{architecture}_on_sm{at_hand}")
    assemble = compiler.CUDABackend.make_cubin

    def assemble_for_gpu_at_hand(self: Any, source: Any, metadata: Any, options: Any, capability: int) -> Any:
        return assemble(self, source, metadata, options, at_hand)

    compiler.CUDABackend.make_cubin = assemble_for_gpu_at_hand
